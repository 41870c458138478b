"""The loop. It knows steps, hooks and verdicts; every feature is a callback, a layout or a model.

Hooks fire in the order drawn in `hooks.py`, on every rank. Under tensor parallelism each rank holds shards of
the weights and the samples of its data index; the numbers of a `Report` are the true global ones everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from disttrain.checkpoint.load import load
from disttrain.checkpoint.state import State
from disttrain.data.dataset import Position
from disttrain.models.task import Task
from disttrain.parallel import collectives
from disttrain.parallel.layout import Layout
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.step import Report, Step, Verdict
from disttrain.parallel.strategy import Strategy
from disttrain.parallel.update import Update
from disttrain.train.batch import Feed, train_positions
from disttrain.train.evaluate import Evaluator
from disttrain.train.hooks import Callback, StepPolicy, defined
from disttrain.train.progress import Progress

if TYPE_CHECKING:
    from disttrain.config.schema import Config
    from disttrain.record import RunFolder


@dataclass
class Window:
    """What happened since the last log point."""

    steps: int = 0
    data_wait_seconds: float = 0.0
    _start: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Wall-clock time since the last log point, evaluations and saves left out."""
        return time.perf_counter() - self._start

    def leave_out(self, seconds: float) -> None:
        """Time that was not spent on steps."""
        self._start += seconds


@dataclass
class Result:
    """How a run ended: 'done', or 'stopped' with the reason, and the last value of every metric."""

    status: str
    reason: str
    step: int
    metrics: dict[str, float]


class Trainer:
    """Runs steps until the last one or an agreed stop."""

    def __init__(
        self,
        strategy: Strategy,
        update: Update,
        progress: Progress,
        feed: Feed,
        *,
        num_steps: int,
        evaluator: Evaluator | None = None,
        callbacks: Mapping[str, Callback] | None = None,
        log_every: int = 20,
        eval_every: int | None = None,
        overfit: bool = False,
        stop_requested: Callable[[], str | None] = lambda: None,
        folder: RunFolder | None = None,
        config: Config | None = None,
    ) -> None:
        """`strategy` is prepared; `build.trainer` puts one together from a config, `build.simple` from objects."""
        self.strategy = strategy
        self.update = update
        self.progress = progress
        self.feed = feed
        self.num_steps = num_steps
        self.evaluator = evaluator
        self.callbacks: dict[str, Callback] = dict(callbacks or {})
        self.log_every = log_every
        self.eval_every = eval_every
        self.overfit = overfit
        self.folder = folder
        self.config = config
        self.window = Window()
        self.metrics: dict[str, float] = {}
        self._stop_requested = stop_requested
        self._stop_reason = ""
        self._totals: Tensor | None = None
        self._logged = self._epoch_start = torch.zeros(())
        self._policies = [callback for callback in self.callbacks.values() if isinstance(callback, StepPolicy)]
        self._on = {name: self._who(name) for name in (*Callback.HOOKS, "due", "measure", "derive", "weight_sets", "after_update")}
        self._judge, self._judge_global = self._who("judge"), self._who("judge_global")
        strategy.module.contexts = self._who("forward_context")

    # --- what callbacks may look at ----------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The world as axes."""
        return self.strategy.mesh

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.strategy.device

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, who talks to the outside."""
        return self.mesh.rank == 0

    @property
    def model(self) -> nn.Module:
        """The plain module, holding this rank's part of the parameters."""
        return self.strategy.model

    @property
    def task(self) -> Task:
        """Loss, counts and metrics."""
        return self.strategy.task

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """This rank's part of every parameter, by plain name."""
        return self.strategy.parameters

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """How each parameter lies on the mesh."""
        return self.strategy.layouts

    # --- the loop -------------------------------------------------------------------------------------------------------

    def fit(self) -> Result:
        """Train. Raises what went wrong on this rank, after telling the callbacks."""
        try:
            self._call("on_fit_start")
            self._steps()
            self._call("on_fit_end")
        except BaseException as error:
            self._call("on_exception", error)
            raise
        status = "stopped" if self._stop_reason else "done"
        return Result(status, self._stop_reason, self.progress.step, self.metrics)

    def _steps(self) -> None:
        """Every step from where the run stands to its last, or to an agreed stop."""
        progress, strategy = self.progress, self.strategy
        start = Position(progress.epoch, progress.step_in_epoch)
        steps = self.feed.steps(train_positions(self.feed.order, progress.step, start, self.num_steps, self.overfit))
        upcoming = next(steps, None)
        if upcoming is None:
            return
        strategy.count(upcoming)
        strategy.model.train()
        self.window = Window()
        ending = False
        while upcoming is not None and not ending:
            step, upcoming = upcoming, self._fetch(steps)
            number = progress.step + 1
            if progress.step_in_epoch == 0:
                self._call("on_train_epoch_start")
            self._call("on_train_step_start")
            if signal := self._stop_requested():
                progress.request(Verdict.STOP, signal)

            local = strategy.forward_backward(step)
            asked = [verdict for judge in self._judge if (verdict := judge(self, local)) is not None]
            measured = self._measure(number)
            report = strategy.finish(local, asked, progress.flags(), list(measured.values()), upcoming, _counted(step))
            for judge in self._judge_global:
                if (skip := judge(self, report)) is not None:
                    report.skip = torch.maximum(report.skip, skip)
            self._call("on_before_optimizer_step", report)
            self.update(report)
            for adapt in self._on["after_update"]:
                adapt(self, report)
            self._count(report)
            progress.step = number
            self.window.steps += 1
            self._call("on_train_step_end", report)

            due = self._due(number, last=upcoming is None)
            verdict = progress.settle(report.verdict, drain=bool(due))
            ending = upcoming is not None and verdict is Verdict.STOP
            self._follow(number, report, list(measured), due, verdict, ending)

    def _fetch(self, steps: Any) -> Step | None:
        """The next step, built before the current one runs so that its counts can ride along."""
        before = time.perf_counter()
        step: Step | None = next(steps, None)
        self.window.data_wait_seconds += time.perf_counter() - before
        return step

    def _due(self, number: int, last: bool) -> set[str]:
        """What follows from the step's number alone: of 'evaluate', 'save'; both at the end."""
        due: set[str] = {"evaluate", "save"} if last or _every(number, self.eval_every) else set()
        if not last:
            due.discard("save")
        return due.union(*(due(self, number) for due in self._on["due"]))

    def _follow(self, number: int, report: Report, measured: list[str], due: set[str], verdict: Verdict, ending: bool) -> None:
        """What is due or was agreed, in this order: log row, end of epoch, evaluation, save. `ending`: stopped before the last step."""
        epoch_ends = self.progress.step_in_epoch + 1 == self.feed.order.steps_per_epoch
        row = self._row(report, measured) if ending or self._is_log_point(number) else {}
        paused = time.perf_counter()
        if epoch_ends:
            row |= self._epoch_row()
        if "evaluate" in due and self.evaluator is not None and not ending:
            row |= self._evaluate(self.evaluator)
        if row:
            self.metrics |= row
            self._call("on_log", row)
        if epoch_ends:
            self._call("on_train_epoch_end", row)
        self.progress.finish_step(epoch_ends)
        if ending:
            self._stop_reason = self._agreed_reason()
        if "save" in due or ending or verdict is Verdict.SAVE:
            self._save()
        if self._is_log_point(number):
            self.window = Window()
        else:
            self.window.leave_out(time.perf_counter() - paused)

    def _save(self) -> None:
        if self._on["on_save_checkpoint"]:
            self._call("on_save_checkpoint", self.state())

    def _agreed_reason(self) -> str:
        """Why the run stops, from whichever rank asked; every rank is here."""
        given = collectives.gather_json(self.progress.reasons, self.mesh.axis("world"), self.device)
        stops = [reason for reasons in given for reason in reasons if reason.startswith(Verdict.STOP.name)]
        return stops[-1] if stops else "asked to stop"

    # --- numbers ---------------------------------------------------------------------------------------------------------

    def _is_log_point(self, number: int) -> bool:
        return number == 1 or number == self.num_steps or number % self.log_every == 0

    def _measure(self, number: int) -> dict[str, float]:
        """This rank's values of a log point; nothing otherwise."""
        if not self._is_log_point(number):
            return {}
        values: dict[str, float] = {}
        for measure in self._on["measure"]:
            values |= measure(self)
        return values

    def _count(self, report: Report) -> None:
        """Add the step to the run's loss sums and counts, on the device."""
        if self._totals is None:
            self._totals = torch.zeros(2, report.counts.numel(), dtype=torch.float64, device=self.device)
            self._logged, self._epoch_start = self._totals.clone(), self._totals.clone()
        self._totals[0] += report.losses.sum(1)
        self._totals[1] += report.counts

    def _row(self, report: Report, measured: list[str]) -> dict[str, float]:
        """The metrics of a log point: one read of the device."""
        assert self._totals is not None
        parts = [report.loss, report.grad_norm, self.update.rate, self.progress.skipped, (self._totals - self._logged)[1].sum()]
        self._logged = self._totals.clone()
        flat = torch.cat([torch.stack([part.double() for part in parts]), report.measured.flatten().double()]).tolist()
        names = ("train/loss", "train/grad_norm", "train/lr", "train/skipped_updates", "train/targets")
        row: dict[str, float] = {"epoch": float(self.progress.epoch)} | dict(zip(names, flat, strict=False))
        by_rank = flat[len(parts) :]
        for index, name in enumerate(measured):
            values = by_rank[index :: len(measured)]
            row |= {name: sum(values) / len(values), f"{name}_min": min(values), f"{name}_max": max(values)}
        for derive in self._on["derive"]:
            row |= derive(self, row)
        return row

    def _epoch_row(self) -> dict[str, float]:
        """The epoch's loss: its sum over its valid targets."""
        assert self._totals is not None
        losses, counts = (self._totals - self._epoch_start).tolist()
        self._epoch_start = self._totals.clone()
        return {"train/epoch_loss": sum(loss / max(1.0, count) for loss, count in zip(losses, counts, strict=True))}

    def _evaluate(self, evaluator: Evaluator) -> dict[str, float]:
        self._call("on_validation_start")
        sets: dict[str, Any] = {}
        for weight_sets in self._on["weight_sets"]:
            sets |= weight_sets()
        found = evaluator.run("val", sets)
        self._call("on_validation_end", found)
        return found

    # --- state -----------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """The run as it stands, after a step: this rank's parts and the values that all ranks share."""
        state = State()
        for name, parameter in self.parameters.items():
            state.tensors[f"model/{name}"] = (parameter.detach(), self.layouts[name])
        state.tensors |= {f"model/{name}": held for name, held in self.strategy.buffers().items()}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for name, held in self.update.state_tensors(names, self.layouts).items():
            state.tensors[f"optimizer/{name}"] = held
        for key, callback in self.callbacks.items():
            for name, tensor in callback.state_tensors(self).items():
                state.tensors[f"callbacks/{key}/{name}"] = (tensor, self.layouts[name.split("/", 1)[1]])
        state.values = {
            "progress": self.progress.state_dict(),
            "update": self.update.state_dict(),
            "totals": None if self._totals is None else [self._totals.tolist(), self._epoch_start.tolist()],
            "callbacks": {key: callback.state_dict() for key, callback in self.callbacks.items()},
        }
        return state

    def restore(self, folder: Path) -> list[str]:
        """Take up the checkpoint `folder`, whatever layout wrote it; before `fit`. Returns what a person should know."""
        self.update.make_state()
        state = self.state()
        notes = load(state, folder, self.mesh)
        self.progress.load_state_dict(state.values["progress"])
        self.update.load_state_dict(state.values["update"])
        if state.values["totals"] is not None:
            totals, epoch_start = (torch.tensor(x, dtype=torch.float64, device=self.device) for x in state.values["totals"])
            self._totals, self._logged, self._epoch_start = totals, totals.clone(), epoch_start
        for key, callback in self.callbacks.items():
            if key in state.values["callbacks"]:  # one that was added for this start begins anew
                callback.load_state_dict(state.values["callbacks"][key])
        self._call("on_load_checkpoint", state)
        return notes

    def load_weights(self, folder: Path) -> list[str]:
        """Take the weights of the checkpoint `folder` and nothing else."""
        return load(self.state(), folder, self.mesh, {"model"})

    # --- hooks -----------------------------------------------------------------------------------------------------------

    def _who(self, name: str) -> list[Callable[..., Any]]:
        """The bound `name` of every callback that defines it."""
        return [getattr(callback, name) for callback in self.callbacks.values() if hasattr(callback, name) and defined(callback, name)]

    def _call(self, name: str, *arguments: Any) -> None:
        for hook in self._on[name]:
            hook(self, *arguments)


def _counted(step: Step) -> Tensor:
    assert step.counts is not None
    return step.counts


def _every(number: int, interval: int | None) -> bool:
    return interval is not None and number % interval == 0
