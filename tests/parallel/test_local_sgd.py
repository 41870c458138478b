"""Replicas that train by themselves and average their weights every n-th step: the maths, the bytes, and what waits for a sync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain import build
from disttrain.checkpoint.save import save
from disttrain.data.adapt import numbered
from disttrain.data.dataset import Order
from disttrain.errors import CheckpointError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world as run_ranks
from disttrain.parallel import collectives
from disttrain.parallel.batch_norm import ALONE
from disttrain.parallel.local_sgd import Synced
from disttrain.parallel.step import Report, Verdict
from disttrain.parallel.update import Update
from disttrain.record import RunFolder
from disttrain.train.assembly import make_feed
from disttrain.train.batch import Slice
from disttrain.train.state import restore, state_of
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.parallel.ranks import prepared, run_step
from tests.train.runs import EVERY_STEP, notes_of, trainer_of

RunWorld = Callable[..., list[Any]]
UNEVEN = tiny.TOKENS | {"uneven": True}
DILOCO = {"sync_every": 2, "outer_lr": 0.7, "outer_momentum": 0.9}


def flat(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.parameters.values()])


def by_replica(trainer: Trainer, x: torch.Tensor) -> torch.Tensor:
    """[replicas, ...]"""
    return collectives.all_gather(x[None], trainer.mesh.axis("dp_replicate"))


@pytest.mark.world(2)
def test_with_the_same_samples_on_each_replica_it_is_one_device(run_world: RunWorld) -> None:
    def run(place: Place, **config: Any) -> tuple[list[float], torch.Tensor]:
        trainer = trainer_of(place, **EVERY_STEP, dataset=UNEVEN, steps=5, **config)
        data = numbered(trainer.data.train())
        trainer.feed = make_feed(trainer.data, data, Order(len(data), 4, 0), Slice(ALONE, 4, 4), trainer.strategy)
        trainer.fit()
        return notes_of(trainer).column("train/loss"), flat(trainer)

    ((losses, weights),) = run_ranks(lambda place: run(place, global_batch_size=4), 1)
    for found, held in run_world(lambda place: run(place, dp=2, strategy={"sync_every": 2})):
        assert found == losses
        assert torch.equal(held, weights)


@pytest.mark.world(2)
def test_each_replica_takes_the_mean_over_its_own_samples_and_its_own_norm(run_world: RunWorld) -> None:
    """Weighted with their counts, the replicas' means are ddp's over all; they differ."""

    def errors(place: Place) -> tuple[float, float, bool]:
        plain = prepared(place, dp=2, dataset=UNEVEN, dtype="float64")
        local = prepared(place, dp=2, dataset=UNEVEN, dtype="float64", strategy={"sync_every": 4})
        assert type(plain.update) is Update
        assert isinstance(local.update, Synced)
        run_step(plain, 0)
        report = run_step(local, 0)
        whole, own = (torch.cat([one.grad.flatten() for one in trainer.parameters.values()]) for trainer in (plain, local))
        both, counts = by_replica(local, own), by_replica(local, report.counts)
        mean = (both * counts).sum(0) / counts.sum()
        return float((mean - whole).abs().max()), float(report.grad_norm - own.norm()), bool((both[0] - both[1]).abs().max() > 1e-3)

    for error, norm, differs in run_world(errors):
        assert error < 1e-15
        assert abs(norm) < 1e-13
        assert differs


@pytest.mark.world(4)
def test_nothing_moves_between_syncs_and_the_weights_once_at_one(run_world: RunWorld) -> None:
    """Also under tp: bytes over the replicas are those of this rank's weights, and of four counters, every n-th step."""

    def moved(place: Place) -> list[tuple[list[int], bool]]:
        trainer = prepared(place, dp=2, tp=2, strategy={"sync_every": 3}, steps=99)
        axes = [trainer.mesh.axis(name) for name in ("dp_replicate", "data", "grad", "world")]
        found = []
        for number in range(6):
            for axis in axes:
                axis.traffic.clear()
            trainer.update(run_step(trainer, number))
            assert not any(axis.traffic for axis in axes[1:])
            traffic = axes[0].traffic.get("all_reduce", [0, 0]).copy()
            both = by_replica(trainer, flat(trainer))
            found.append((traffic, torch.equal(both[0], both[1])))
        assert found[2][0] == [2, flat(trainer).nbytes + len(Verdict) * 8]
        return found

    for found in run_world(moved):
        assert [traffic for traffic, _ in found] == [[0, 0], [0, 0], found[2][0]] * 2
        assert [same for _, same in found] == [False, False, True] * 2


@pytest.mark.world(2)
def test_the_outer_step_is_nesterovs(run_world: RunWorld) -> None:
    """Two outer steps by hand, from the weights that replicas came to."""

    def error(place: Place) -> float:
        trainer = prepared(place, dp=2, strategy=DILOCO, optimizer=tiny.SGD, dtype="float64", steps=99)
        last, velocity, worst = flat(trainer), torch.zeros(()), 0.0
        average = trainer.update._average
        came: list[torch.Tensor] = []
        trainer.update._average = lambda: (came.append(flat(trainer)), average())
        for number in range(4):
            trainer.update(run_step(trainer, number))
            if number % 2 == 1:
                moved = last - by_replica(trainer, came[-1]).mean(0)
                velocity = 0.9 * velocity + moved
                last = last - 0.7 * (moved + 0.9 * velocity)
                worst = max(worst, float((flat(trainer) - last).abs().max() / moved.abs().max()))
        return worst

    assert max(run_world(error)) < 1e-11


def requests(trainer: Trainer, report: Report) -> None:
    """The second rank's signal at its first step."""
    if trainer.progress.step == 1 and trainer.mesh.rank == 1:
        trainer.progress.request(Verdict.STOP, "enough")


def bad_step(trainer: Trainer, report: Report) -> None:
    """A skip that the first replica asks for."""
    if trainer.progress.step == 1 and trainer.mesh.rank == 0:
        report.skip.fill_(1.0)


@pytest.mark.world(2)
def test_requests_wait_for_a_sync_and_rows_are_everybodys(run_world: RunWorld) -> None:
    def run(place: Place, **config: Any) -> tuple[list[dict[str, float]], str, int, float]:
        trainer = trainer_of(place, **EVERY_STEP, dp=2, dataset=UNEVEN | {"num_samples": 24}, steps=9, **config)
        trainer._on["on_train_step_end"].append(requests)
        trainer._on["on_before_optimizer_step"].append(bad_step)
        trainer._on["due"].append(lambda t, step: frozenset({"evaluate"} if step == 2 else ()))
        result = trainer.fit()
        rows = [{key: row[key] for key in row if key.startswith(("step", "train/", "val/"))} for row in notes_of(trainer).rows]
        return rows, result.reason, result.step, float(trainer.update.skipped)

    found = run_world(lambda place: run(place, strategy={"sync_every": 4}))
    (rows, reason, step, _) = found[0]
    assert found[1][:3] == (rows, reason, step)
    assert (reason, step) == ("enough", 4)
    assert [skipped for *_, skipped in found] == [1.0, 0.0]
    assert rows[-1]["train/skipped_updates"] == 0.5
    assert [row["step"] for row in rows if "val/loss" in row] == [4.0]
    ((ddp, *_), _) = run_world(run)
    assert rows[0]["train/loss"] == pytest.approx(ddp[0]["train/loss"], rel=1e-6)
    assert rows[0]["train/targets"] == ddp[0]["train/targets"]
    assert [row["train/targets"] for row in rows[:2]] == [row["train/targets"] for row in ddp[:2]]
    of_epoch = next(row for row in rows if "train/epoch_loss" in row)
    weighted = sum(row["train/loss"] * row["train/targets"] for row in rows[:3]) / sum(row["train/targets"] for row in rows[:3])
    assert of_epoch["train/epoch_loss"] == pytest.approx(weighted, rel=1e-6)


def goes_back(trainer: Trainer) -> None:
    if trainer.progress.step == 6:
        trainer.progress.request(Verdict.ROLL_BACK, "a spike")


@pytest.mark.world(2)
def test_after_a_roll_back_syncs_fall_on_the_same_steps(run_world: RunWorld, tmp_path: Path) -> None:
    """The weights of step 4 come back at step 8; what is measured there, saved there, and left at the end is one model."""
    folder = RunFolder.make(tmp_path)
    checkpoint = {"_target_": "disttrain.callbacks.checkpoint.Checkpoint", "every": 4, "keep_last": None}

    def run(place: Place) -> list[torch.Tensor]:
        config = tiny.config(dp=2, strategy={"sync_every": 4}, callbacks={"checkpoint": checkpoint}, steps=10, eval_every=4)
        trainer = build.build_trainer(config, folder, place)
        found: list[torch.Tensor] = []
        trainer._on["on_train_step_start"].append(goes_back)
        trainer._on["on_validation_start"].append(lambda t: found.append(flat(t).clone()))
        trainer.fit()
        return [*found, flat(trainer)]

    first, second = run_world(run)
    assert torch.equal(first[0], first[1]), "step 8 has the weights of step 4 again"
    assert len(first) == 4
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def saved_at_four(place: Place, folder: Path, **config: Any) -> list[dict[str, float]]:
    trainer = trainer_of(place, **EVERY_STEP, steps=9, **config)
    trainer._on["due"].append(lambda t, step: frozenset({"save"} if step == 4 else ()))
    trainer._on["on_save_checkpoint"].append(lambda t, state: save(state, folder, t.mesh) if t.progress.step == 4 else None)
    trainer._on["on_before_optimizer_step"].append(bad_step)
    trainer.fit()
    return notes_of(trainer).rows


def from_four(place: Place, folder: Path, **config: Any) -> list[dict[str, float]]:
    trainer = trainer_of(place, **EVERY_STEP, steps=9, **config)
    assert restore(trainer, folder) == []
    trainer.fit()
    return notes_of(trainer).rows


def seen(rows: list[dict[str, float]]) -> list[list[float]]:
    return [[row[key] for key in ("step", "train/loss", "train/grad_norm", "train/skipped_updates")] for row in rows]


@pytest.mark.world(2)
def test_a_resume_goes_on_to_the_bit_in_its_own_layout_only(run_world: RunWorld, tmp_path: Path) -> None:
    config = {"dp": 2, "strategy": DILOCO, "dataset": UNEVEN}
    whole = run_world(lambda p: saved_at_four(p, tmp_path / "step-4", **config))
    for rows, again in zip(whole, run_world(lambda p: from_four(p, tmp_path / "step-4", **config)), strict=True):
        assert seen(again) == seen(rows)[4:]

    def refused(place: Place, **config: Any) -> str:
        trainer = trainer_of(place, **config)
        with pytest.raises(CheckpointError) as raised:
            restore(trainer, tmp_path / "step-4")
        return str(raised.value)

    assert "each of 2 replicas" in run_world(lambda p: refused(p, dp=2))[0]
    assert "optimizer state of 2 replicas" in run_ranks(lambda p: refused(p, dp=4, strategy=DILOCO), 4)[0]


@pytest.mark.world(2)
def test_moments_are_stacked_and_weights_are_not(run_world: RunWorld) -> None:
    def shapes(place: Place) -> dict[str, tuple[tuple[int, ...], Any]]:
        trainer = prepared(place, dp=2, strategy=DILOCO)
        trainer.update(run_step(trainer, 0))
        state = state_of(trainer).tensors
        at = trainer.mesh.coordinate()
        return {name: (layout.shape, layout.pieces(at)[0][0][0]) for name, (_, layout) in state.items() if layout.shape}

    first, second = run_world(shapes)
    d = tiny.GPT["hidden_size"]
    name = "blocks.0.attention.out.weight"
    assert first[f"optimizer/{name}/exp_avg"] == ((2, d, d), slice(0, 1))
    assert second[f"optimizer/{name}/exp_avg"] == ((2, d, d), slice(1, 2))
    assert first[f"model/{name}"] == second[f"model/{name}"] == ((d, d), slice(0, d))
    assert first[f"optimizer/outer/momentum/{name}"][0] == (d, d)
