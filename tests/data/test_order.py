"""One global order from (seed, epoch), and seeds that depend on the sample alone."""

from __future__ import annotations

import numpy as np
import torch

from disttrain.data.dataset import VOID, Order, Position, sample_seeds
from disttrain.data.seeds import derive, epoch_seeds, integers, mix, normal, uniform, unmix


def epoch(order, number):
    return torch.cat([order.global_batch(Position(number, step)) for step in range(order.steps_per_epoch)])


def test_epochs_hold_the_same_samples_in_orders_of_their_own():  # F01
    order = Order(103, 8, seed=5)
    epochs = [epoch(order, number) for number in range(3)]
    for rows in epochs:
        assert sorted(rows[rows != VOID].tolist()) == list(range(103))
        assert (rows == VOID).sum() == 1
        assert rows[-1] == VOID
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[1], epochs[2])
    again = Order(103, 8, seed=5)
    assert torch.equal(epoch(again, 2), epochs[2])  # without the epochs before
    assert not torch.equal(epoch(Order(103, 8, seed=6), 0), epochs[0])


def test_the_batch_size_cuts_one_order():
    assert torch.equal(epoch(Order(96, 8, seed=1), 0), epoch(Order(96, 32, seed=1), 0))


def test_without_shuffle_samples_come_as_they_are():
    rows = epoch(Order(10, 4, seed=0, shuffle=False), 3)
    assert rows.tolist() == [*range(10), VOID, VOID]


def test_neighbouring_seeds_and_epochs_are_strangers():
    """Seed and epoch are not added up: (seed, epoch + 1) is not (seed + 1, epoch)."""
    seeds = {derive(seed, epoch) for seed in range(30) for epoch in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_sample_seeds_are_apart_by_sample_epoch_and_seed():
    indices = torch.arange(1000)
    seeds = torch.cat([sample_seeds(seed, number, indices) for seed in (0, 1) for number in (0, 1, 2)])
    assert seeds.dtype == torch.int64
    assert seeds.unique().numel() == 6000
    assert torch.equal(sample_seeds(0, 1, indices[500:]), sample_seeds(0, 1, indices)[500:])


def test_one_seed_gives_away_the_others_of_its_epoch():
    seeds = sample_seeds(7, 3, torch.arange(20))
    seed_of = epoch_seeds(11, int(seeds[11]))
    assert [seed_of(i) for i in range(20)] == seeds.tolist()


def test_mix_is_splitmix64():
    """First outputs of SplitMix64 with seed 1234567, as published with xoshiro's reference implementation."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + golden * (i + 1)) % (1 << 64) for i in range(3)], np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert unmix(mix(states)).tolist() == states.tolist()


def test_numbers_have_the_right_laws():
    keys = mix(np.arange(100, dtype=np.uint64))
    flat, bell, whole = uniform(keys, 1000), normal(keys, 999), integers(keys, 1000, 7)
    assert flat.min() >= 0
    assert flat.max() < 1
    assert abs(flat.mean() - 0.5) < 0.005
    assert bell.shape == (100, 999)
    assert bell.dtype == np.float32
    assert abs(bell.mean()) < 0.01
    assert abs(bell.std() - 1) < 0.01
    assert abs((bell**4).mean() - 3) < 0.1
    assert np.abs(np.corrcoef(bell[:50]) - np.eye(50)).max() < 0.2
    assert set(whole.ravel()) == set(range(7))
