"""The moving average of the weights."""

import torch

from disttrain.callbacks.ema import EMA
from tests.callbacks.fakes import FakeTrainer, report


def test_ema_follows_real_updates_only():
    trainer, ema = FakeTrainer(), EMA(decay=0.9)
    ema.on_fit_start(trainer)
    average = torch.zeros(4, dtype=torch.float64)
    for step, (value, skip) in enumerate([(1.0, 0.0), (5.0, 1.0), (2.0, 0.0), (3.0, 0.0)]):
        with torch.no_grad():
            trainer.parameters["w"].fill_(value)
        trainer.update.updates += 1 - skip
        ema.on_train_step_end(trainer, report(skip=skip))
        if not skip:
            updates = int(trainer.update.updates)
            decay = min(0.9, (1 + updates) / (10 + updates))
            average = decay * average + (1 - decay) * value
        assert torch.allclose(ema.weight_sets()["ema"]["w"].double(), average, rtol=1e-6), step


def test_ema_on_a_rank_that_trains_nothing_averages_nothing():
    trainer, ema = FakeTrainer(), EMA()
    trainer.parameters["w"].requires_grad_(False)
    ema.on_fit_start(trainer)
    ema.on_train_step_end(trainer, report())
    assert ema.weight_sets() == {"ema": {}}


def test_ema_is_restored_or_begins_at_the_weights():
    trainer, ema = FakeTrainer(), EMA()
    with torch.no_grad():
        trainer.parameters["w"].fill_(7.0)
    (name,) = ema.state_tensors(trainer)
    assert name == "shadow/w"
    ema.state_tensors(trainer)[name].fill_(3.0)  # what a load does
    ema.load_state_dict(EMA().state_dict())
    ema.on_fit_start(trainer)
    assert ema.weight_sets()["ema"]["w"].tolist() == [3.0] * 4
    added = EMA()
    added.state_tensors(trainer)["shadow/w"].fill_(3.0)
    added.on_fit_start(trainer)
    assert added.weight_sets()["ema"]["w"].tolist() == [7.0] * 4


def test_ema_reads_nothing_on_the_host(monkeypatch):
    trainer, ema = FakeTrainer(), EMA()
    ema.on_fit_start(trainer)
    agreed = report()
    for name in ("item", "tolist", "__float__", "__bool__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, _forbidden)
    ema.on_train_step_end(trainer, agreed)


def _forbidden(*args, **kwargs):
    raise AssertionError("a read of the device")
