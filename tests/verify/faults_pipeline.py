"""Faults of pipelines, entered beside the others."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch.distributed.pipelining  # noqa: F401  (seconds; imported once, before ranks are forked)

from disttrain.config.schedules import SCHEDULES
from disttrain.parallel import materialise
from disttrain.parallel.data import Reducer
from disttrain.parallel.layout import ENDS, Layout
from disttrain.parallel.pipeline import Pipeline
from disttrain.parallel.step import Report
from disttrain.parallel.strategy import Strategy
from tests import tiny
from tests.verify.faults import LAYOUTS, LOST_BACKWARD, NORM, START, WRONG_FORWARD, fault, wrapped

DEEP = tiny.GPT | {"num_layers": 4}
LAYOUTS["pp"] = tiny.config(pp=2, model=DEEP, micro_batch_size=2, verify={"steps": 2, "shrink": False})
for schedule in SCHEDULES:
    LAYOUTS[f"ddp_{schedule}"] = tiny.config(
        dp=2, pp=2, model=DEEP, micro_batch_size=1, strategy={"schedule": schedule}, verify={"steps": 1, "shrink": False}
    )


@fault("pp", "norm", NORM, named=("gradient norm",))
def norm_of_one_stage_alone() -> AbstractContextManager[Any]:
    """C04: each stage clips with its own."""

    def own_norm(original: Any, self: Strategy, *arguments: Any) -> Report:
        report = original(self, *arguments)
        report.grad_norm = self._squares().sqrt()
        return report

    return wrapped(Strategy, "finish", own_norm)


@fault("pp", "gradient", LOST_BACKWARD, named=("tokens.weight",), spared=("positions.weight", "norm.weight", "blocks.0.mlp.up.weight"))
def tied_copies_go_their_own_ways() -> AbstractContextManager[Any]:
    """C10: embedding and head keep the gradients of their own uses."""

    def without_ends(original: Any, self: Layout) -> list[str]:
        return [axis for axis in original(self) if axis != ENDS]

    return wrapped(Layout, "reductions", without_ends)


@fault("pp", "norm", NORM, named=("gradient norm",))
def tied_weights_count_twice_in_the_norm() -> AbstractContextManager[Any]:
    return patch.object(Layout, "weight", lambda self: 1.0)


@fault("pp", "start", START, named=("blocks.2.mlp.up.weight", "blocks.3.attention.qkv.weight"))
def stages_start_from_one_seed() -> AbstractContextManager[Any]:
    """H11: the layers of each stage are drawn as if they were the first ones."""

    def by_place_in_stage(original: Any, name: str, *rest: Any) -> Any:
        return original(name.replace("blocks.2", "blocks.0").replace("blocks.3", "blocks.1"), *rest)

    return wrapped(materialise, "_draw", by_place_in_stage)


@fault("pp", "gradient", "the number of micro-batches", named=("tokens.weight", "blocks.3.mlp.up.weight"))
def pipeline_gradients_are_times_the_micro_batches() -> AbstractContextManager[Any]:
    def too_often(original: Any, self: Pipeline, step: Any, weights: Any) -> Any:
        local = original(self, step, weights)
        for parameter in self.module.model.parameters():
            parameter.grad.mul_(len(step.micro))  # type: ignore[union-attr]
        return local

    return wrapped(Pipeline, "train", too_often)


@fault("pp", "gradient", WRONG_FORWARD, named=("loss", "tokens.weight"))
def outputs_meet_the_targets_of_the_next_micro_batch() -> AbstractContextManager[Any]:
    """H07."""

    def next_one(original: Any, self: Pipeline, stage: int, micro: int, x: Any) -> Any:
        assert self._now is not None
        return original(self, stage, (micro + 1) % len(self._now.micro) if stage == self.stages.last else micro, x)

    return wrapped(Pipeline, "_forward", next_one)


@fault(
    "pp", "gradient", LOST_BACKWARD, named=("blocks.0.mlp.up.weight", "positions.weight"), spared=("blocks.3.mlp.up.weight", "norm.weight")
)
def no_gradient_crosses_the_border() -> AbstractContextManager[Any]:
    from disttrain.parallel.torch_stages import CountedStage

    def zeros(original: Any, self: Any, *arguments: Any) -> list[Any]:
        operations: list[Any] = original(self, *arguments)
        for operation in operations:
            operation.tensor = operation.tensor * 0.0
        return operations

    return wrapped(CountedStage, "get_bwd_send_ops", zeros)


def not_sent() -> AbstractContextManager[Any]:
    """Data ranks keep their own gradients."""

    def stay(original: Any, self: Reducer, bucket: Any) -> None:
        self._next += 1

    return wrapped(Reducer, "_send", stay)


def not_collected() -> AbstractContextManager[Any]:
    """Only what a hook has seen is summed: a backward for weights alone is silent."""
    return patch.object(Reducer, "_collect", lambda self: None)


for schedule, kind in SCHEDULES.items():
    plant = not_collected if kind.splits_backward and schedule != "dualpipev" else not_sent  # some of its backwards are whole

    def under(chosen: Any = plant) -> AbstractContextManager[Any]:
        planted: AbstractContextManager[Any] = chosen()
        return planted

    under.__name__ = f"gradients_are_not_summed_under_{schedule}"
    fault(f"ddp_{schedule}", "gradient", LOST_BACKWARD, named=("blocks.2.mlp.up.weight",))(under)
