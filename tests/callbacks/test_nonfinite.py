"""The first value that is not finite is traced to module, rank and direction; the run goes on as if nobody had looked."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from disttrain.launch.outcome import WorldError
from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.models.task import Classification
from disttrain.parallel.step import Report
from disttrain.train.hooks import Callback
from disttrain.train.trainer import Trainer
from tests import tiny
from tests.train.runs import WARM, copy_of, trainer_of, world_size

GUARD = "disttrain.callbacks.nan_guard.NaNGuard"
PIPELINING = ("torch.distributed.pipelining",)


class Spoils(Callback):
    """Sets one number of a weight to `value` on one rank after step 2, and heals it before step 4, when others have looked."""

    def __init__(self, name: str, value: float, rank: int = 1) -> None:
        self.name, self.value, self.rank = name, value, rank

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        if (number := self._number(trainer, 2)) is not None:
            self.before = number.clone()
            number.fill_(self.value)

    def on_train_step_start(self, trainer: Trainer) -> None:
        if (number := self._number(trainer, 3)) is not None:
            number.copy_(self.before)

    def _number(self, trainer: Trainer, step: int) -> Tensor | None:
        held = trainer.parameters.get(self.name)
        is_now = trainer.mesh.rank == self.rank and trainer.progress.step == step
        return held.detach().view(-1)[:1] if is_now and held is not None else None


class Listens(logging.Handler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def told(name: str = "", value: float = 0.0, rank: int = 1, guard: dict[str, Any] | None = None, **config: Any) -> str:
    """What rank 0 says of a run of five steps with this weight spoilt in the third."""
    callbacks = {"guard": {"_target_": GUARD} | (guard or {})}
    if name:
        callbacks["spoils"] = {"_target_": "tests.callbacks.test_nonfinite.Spoils", "name": name, "value": value, "rank": rank}

    def entry(place: Place) -> str:
        listens = Listens()
        logging.getLogger("disttrain.callbacks.nan_guard").addHandler(listens)
        trainer = trainer_of(place, callbacks, steps=5, **config)
        trainer.fit()
        assert all(parameter.isfinite().all() for parameter in trainer.parameters.values())
        return "\n".join(listens.said)

    warm = WARM if config.get("shard", 1) > 1 else PIPELINING if config.get("pp", 1) > 1 else ()
    return run_world(entry, world_size(config), warm=warm)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("config", "name", "value", "words"),
    [
        ({"dp": 2}, "blocks.0.mlp.up.weight", torch.inf, ("on rank 1 (dp_replicate 1)", "weight 'blocks.0.mlp.up.weight'", "roll_back")),
        ({"tp": 2}, "blocks.0.mlp.up.weight", 3e38, ("on rank 1 (tp 1)", "forward of micro-batch 0", "'blocks.0.mlp.up' (ColumnLinear)")),
        ({"shard": 2}, "norm.weight", torch.nan, ("on rank 1 (dp_shard 1)", "weight 'norm.weight'")),
        (
            {"pp": 2, "micro_batch_size": 2},
            "blocks.1.mlp.up.weight",
            3e38,
            ("on rank 1 (pp 1)", "forward of micro-batch 0", "module 'blocks.1."),
        ),
        ({"cp": 2}, "blocks.1.attention.qkv.weight", 3e38, ("on rank 1 (cp 1)", "module 'blocks.1.attention")),
    ],
    ids=["dp", "tp", "shard", "pp", "cp"],
)
def test_the_rank_and_the_module_are_named(config: dict[str, Any], name: str, value: float, words: tuple[str, ...]) -> None:
    said = told(name, value, **config)
    assert said.count("step 3: the first value that is not finite arose") == 1
    for word in (*words, "learning rate 0.001", "gradient norms of the steps before", "try: "):
        assert word in said


class Root(nn.Module):
    """A square root, which is finite at zero, and whose slope is not."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * x.gt(0)).sqrt()


class Net(nn.Module):
    """Rows with a negative sum go into the root as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.root = Root()
        self.down = nn.Linear(16, 2)
        self.task = Classification()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.root(self.up(x)))  # type: ignore[no-any-return]


class Vectors(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Numbers from a normal distribution; that of sample 5 is NaN where asked for."""

    def __init__(self, spoilt: bool = False) -> None:
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        if spoilt:
            self.x[5] = torch.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], (index % 2) * torch.ones((), dtype=torch.int64)


MODEL = {"_target_": "tests.callbacks.test_nonfinite.Net"}
DATA = {"_target_": "tests.callbacks.test_nonfinite.Vectors"}


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (DATA, r"arose on ranks 0, 1, in the backward of micro-batch 0, in module 'root' \(Root\): aten::div.*epsilon in that module"),
        (DATA | {"spoilt": True}, r"arose on rank \d.*in the samples themselves: numbers 5 \(micro-batch 0\).*out of the data set"),
    ],
    ids=["backward", "samples"],
)
def test_a_slope_and_a_sample_that_are_not_finite(dataset: dict[str, Any], words: str) -> None:
    with pytest.raises(WorldError, match=f"(?s)updates in a row were skipped.*{words}"):
        told(model=MODEL, dataset=dataset, dp=2, global_batch_size=64, guard={"max_consecutive": 2})


@pytest.mark.world(2)
def test_looking_leaves_no_trace_in_what_follows() -> None:
    """Weights, moments and random streams of a run that looked are those of one that did not, bit for bit."""

    def entry(place: Place, explain: bool) -> dict[str, Tensor]:
        guard = {"guard": {"_target_": GUARD, "explain": explain}}
        spoils = {"_target_": "tests.callbacks.test_nonfinite.Spoils", "name": "blocks.0.mlp.down.weight", "value": 3e38}
        trainer = trainer_of(place, guard | {"spoils": spoils}, steps=6, tp=2, model=tiny.GPT | {"dropout": 0.1})
        trainer.fit()
        return copy_of(trainer)

    looked, plain = (run_world(lambda place, e=explain: entry(place, e), 2) for explain in (True, False))
    for mine, theirs in zip(looked, plain, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.world(2)
def test_a_run_that_stops_says_why() -> None:
    with pytest.raises(WorldError, match=r"(?s)not finite \(callbacks.nan_guard.on_nan=stop\).*arose on rank 1.*try: "):
        told("blocks.0.mlp.up.weight", 3e38, tp=2, guard={"on_nan": "stop"})
