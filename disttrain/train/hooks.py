"""The contract of callbacks: who may watch a run, who may steer it, and when each is asked.

    fit_start
      train_epoch_start
        train_step_start
          (forward and backward of every micro-batch)        forward_context around each module call
          judge: verdicts from this rank's numbers
          one reduction over the world                       measure adds this rank's values at log points
          judge_global: verdicts from agreed numbers
          before_optimizer_step
          (update)
        train_step_end
        log                                                  at log points; derive adds to the row first
        roll_back                                            when agreed; then weights of the newest checkpoint
        validation_start ... validation_end                  when due
        save_checkpoint                                      when due or asked for
      train_epoch_end
    fit_end                                                  or exception, on the rank that raised

A `Callback` observes. It changes nothing about the step, so the order of callbacks can't change a number. It
may ask for something with `trainer.progress.request(verdict, reason)`, and all ranks then do it together. A
`StepPolicy` steers, by values that it returns and that fold: contexts nest, verdicts take the largest.

What each rank sees: every hook fires on every rank, and the numbers of a report are the true global ones on
each. Which samples a rank holds depends on its place; no hook may assume that it holds any. A hook that talks
to the outside (files, network, terminal) asks `trainer.is_lead` first.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from disttrain.errors import ConfigError
from disttrain.parallel.step import Declaration, Local, Report

if TYPE_CHECKING:
    from torch import Tensor

    from disttrain.checkpoint.state import State
    from disttrain.train.trainer import Trainer

_LIGHTNING_ONLY = {
    "on_train_batch_start": "on_train_step_start",
    "on_train_batch_end": "on_train_step_end",
    "on_before_zero_grad": "on_train_step_end",
    "on_after_backward": "on_before_optimizer_step",
    "on_train_start": "on_fit_start",
    "on_train_end": "on_fit_end",
    "on_validation_epoch_end": "on_validation_end",
    "on_validation_epoch_start": "on_validation_start",
}


class Callback:
    """Watches a run. Define any of the hooks; the loop calls only those that a class defines."""

    HOOKS: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse hooks that the loop would never call."""
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name.startswith("on_") and name not in Callback.HOOKS:
                instead = _LIGHTNING_ONLY.get(name) or next(iter(difflib.get_close_matches(name, Callback.HOOKS, 1)), None)
                why = " (here the unit is the whole step, all its micro-batches)" if "batch" in name else ""
                raise ConfigError(
                    f"{cls.__name__}.{name} is not a hook{why}; the hooks are {', '.join(sorted(Callback.HOOKS))}",
                    f"rename it to {instead}" if instead else None,
                )

    # --- in time order; each returns nothing ---------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer) -> None:
        """Everything is built (and restored, if resumed); no step has been taken."""

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        """`trainer.progress.epoch` begins."""

    def on_train_step_start(self, trainer: Trainer) -> None:
        """A global batch is ready, this rank's part in `trainer.step`; `trainer.progress.step` steps were taken before it."""

    def on_before_optimizer_step(self, trainer: Trainer, report: Report) -> None:
        """Gradients are summed over all ranks, still scaled and unclipped; `report` is agreed."""

    def on_train_step_end(self, trainer: Trainer, report: Report) -> None:
        """The update is made or skipped; `trainer.progress.step` counts this step. Reading `report` waits for the device."""

    def on_log(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        """A log point: `row` holds the metrics of `trainer.progress.step` by name, the same on every rank."""

    def on_validation_start(self, trainer: Trainer) -> None:
        """An evaluation begins."""

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """An evaluation has ended; `metrics` (`val/...`) are the same on every rank and are logged by `on_log` too."""

    def on_save_checkpoint(self, trainer: Trainer, state: State) -> None:
        """The state of the run is complete in `state`, callbacks' own included; who stores it does so here."""

    def on_roll_back(self, trainer: Trainer) -> None:
        """The run is about to take up its newest checkpoint's weights: who is writing one finishes it. On every rank."""

    def on_load_checkpoint(self, trainer: Trainer, state: State) -> None:
        """The run was restored from `state`; this callback's own part came through `load_state_dict`."""

    def on_train_epoch_end(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        """An epoch is over; `row` holds `train/epoch_loss`."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """This rank raised; others may be anywhere, so nothing here may talk to them."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """The run is over, as planned or stopped by agreement; on every rank."""

    # --- what a callback offers --------------------------------------------------------------------------------

    def due(self, trainer: Trainer, step: int) -> frozenset[str]:
        """What follows from the number `step` of a step just taken: of 'log', 'evaluate', 'save'. No communication."""
        return frozenset()

    def measure(self, trainer: Trainer) -> Mapping[str, float]:
        """This rank's values at a log point, the same keys on every rank; the row gets mean, `_min` and `_max` over ranks."""
        return {}

    def derive(self, trainer: Trainer, row: Mapping[str, float]) -> Mapping[str, float]:
        """Further metrics of a row, computed from agreed numbers only."""
        return {}

    def weight_sets(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Further weights to evaluate, {suffix: {parameter name: local tensor}}: metrics become `val/loss_<suffix>`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What must survive a resume, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up `state_dict`'s values."""

    def state_tensors(self, trainer: Trainer) -> Mapping[str, Tensor]:
        """Tensors that must survive a resume: {'<set>/<parameter name>': local tensor, laid out as that parameter}.

        A resume asks for them before `on_fit_start`, to fill them in place.
        """
        return {}


Callback.HOOKS = frozenset(name for name in vars(Callback) if name.startswith("on_"))


class StepPolicy(Callback):
    """Steers a run by what it returns. `declare` is asked before any object exists."""

    def declare(self) -> Declaration:
        """What this policy fixes for the whole run; at most one policy may answer each field."""
        return Declaration()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Entered inside every forward of the wrapped module, never around a backward."""
        return nullcontext()

    def judge(self, trainer: Trainer, local: Local) -> Tensor | None:
        """Verdict counters [5] on the device from this rank's numbers, before the reduction; None for none. No host read."""
        return None

    def judge_global(self, trainer: Trainer, report: Report) -> Tensor | None:
        """Verdict counters [5] on the device from agreed numbers, the same on every rank; None for no opinion. No host read."""
        return None

    def after_update(self, trainer: Trainer, report: Report) -> None:
        """The update is made or skipped (`report.skip`): adapt device state of one's own, such as the loss scale."""


def by_name(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by the name of their class; more of one class are numbered: Shout, Shout_2."""
    found: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__name__
        number = 1 + sum(type(other).__name__ == name for other in found.values())
        found[name if number == 1 else f"{name}_{number}"] = callback
    return found


def declared(callbacks: Mapping[str, Callback]) -> Declaration:
    """What all policies fix together. ConfigError where two answer the same question."""
    answers: dict[str, tuple[str, Any]] = {}
    for key, callback in callbacks.items():
        if not isinstance(callback, StepPolicy):
            continue
        for name, value in vars(callback.declare()).items():
            if value is None:
                continue
            if name in answers:
                what = name.replace("_", " ")
                raise ConfigError(f"callbacks.{answers[name][0]} and callbacks.{key} both fix the {what}", f"~callbacks.{key}")
            answers[name] = (key, value)
    return Declaration(**{name: value for name, (_, value) in answers.items()})


def defined(callback: Callback, name: str) -> bool:
    """Whether the class of `callback` defines the hook `name` itself."""
    base = StepPolicy if isinstance(callback, StepPolicy) else Callback
    return getattr(type(callback), name) is not getattr(base, name)
