"""The loop. It knows steps, hooks and verdicts; every feature is a callback, a layout or a model.

Hooks fire in the order drawn in `hooks.py`, on every rank. Under tensor parallelism each rank holds shards of
the weights and the samples of its data index; the numbers of a `Report` are the true global ones everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from disttrain.data import adapt
from disttrain.data.dataset import Position
from disttrain.errors import DataError
from disttrain.models.task import Task, task_of
from disttrain.parallel import collectives
from disttrain.parallel.layout import Layout
from disttrain.parallel.mesh import Mesh, found_device, found_mesh
from disttrain.parallel.step import Report, Step, Verdict
from disttrain.parallel.strategy import Options, Strategy
from disttrain.parallel.update import LossScale
from disttrain.train.assembly import local_part, make_evaluator, make_feed, make_update, run_length, training_order
from disttrain.train.batch import train_positions
from disttrain.train.hooks import Callback, declared, defined
from disttrain.train.optimizer import Constant, Schedule
from disttrain.train.progress import FAILED, DivergedError, Progress, Result
from disttrain.train.rows import Sums, Window, row_of
from disttrain.train.state import state_of

if TYPE_CHECKING:
    from disttrain.config.schema import Config
    from disttrain.record import RunFolder


class Trainer:
    """One experiment on one rank of a mesh. `fit` runs it to its last step, or to an agreed stop."""

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        *,
        task: Task | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        weight_decay: float = 0.0,
        schedule: Callable[[int], Schedule] = Constant,
        callbacks: Mapping[str, Callback] | Sequence[Callback] = (),
        metrics: Mapping[str, Any] | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        global_batch_size: int = 32,
        clip_norm: float | None = 1.0,
        log_every: int = 20,
        eval_every: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        mesh: Mesh | None = None,
        options: Options | None = None,
        device: torch.device | None = None,
        overfit: bool = False,
        stop_requested: Callable[[], str | None] = lambda: None,
        folder: RunFolder | None = None,
        config: Config | None = None,
    ) -> None:
        """Lay `model` out on `mesh` (by default the world found: torchrun's, joined if need be, else this process) and get ready.

        data: a DataModule, or a torch data set to train on.
        task: the model's own by default. optimizer: takes parameter groups. schedule: takes the number of steps.
        callbacks: by key, or in order. metrics: torchmetrics by name, beside the task's.
        steps or epochs: one of both. global_batch_size: samples a step, whatever the layout.
        stop_requested: name of a signal that asks to stop, asked every step.
        """
        self.mesh = mesh or found_mesh()
        self.device = device or found_device()
        self.callbacks = dict(callbacks) if isinstance(callbacks, Mapping) else {type(one).__name__: one for one in callbacks}
        self.folder, self.config, self.overfit = folder, config, overfit
        self.log_every, self.eval_every = log_every, eval_every
        self.data = adapt.data_module(data)
        fixed = declared(self.callbacks)
        part = local_part(self.mesh.axis("data"), global_batch_size, fixed.micro_batch_size)
        train = adapt.numbered(self.data.train())
        order = training_order(train, global_batch_size, seed, self.data.shuffle)
        self.num_steps = run_length(steps, epochs, order)

        self.strategy = Strategy(self.mesh, options or Options(), self.device, seed)
        scale = None if fixed.loss_scale is None else LossScale(fixed.loss_scale, self.device)
        self.strategy.prepare(model, task or task_of(model), dtype, scale)
        self.progress = Progress(self.device)
        self.update = make_update(self.strategy, optimizer, weight_decay, schedule, self.num_steps, clip_norm)
        self.feed = make_feed(self.data, train, order, part, self.strategy)
        self.evaluator = make_evaluator(self.data, part, self.strategy, metrics or {})

        self.window, self.metrics = Window(), dict[str, float]()
        self._stop_requested, self._stop_reason, self._failed = stop_requested, "", False
        self.sums: Sums | None = None
        self._listen()

    # --- what callbacks may look at ----------------------------------------------------------------------------------

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
            self.call("on_fit_start")
            self._run()
            if self._failed:
                raise DivergedError(self._stop_reason)
            self.call("on_fit_end")
        except BaseException as error:
            self.call("on_exception", error)
            raise
        finally:
            self.feed.close()
            if self.evaluator is not None:
                self.evaluator.feed.close()
        status = "stopped" if self._stop_reason else "done"
        return Result(status, self._stop_reason, self.progress.step, self.metrics)

    def _run(self) -> None:
        """Every step from where the run stands to its last, or to an agreed stop."""
        progress, strategy = self.progress, self.strategy
        start = Position(progress.epoch, progress.step_in_epoch)
        steps = self.feed.steps(train_positions(self.feed.order, progress.step, start, self.num_steps, self.overfit))
        upcoming = next(steps, None)
        if upcoming is None:
            return
        strategy.count(upcoming)
        strategy.model.train()
        self.sums = self.sums or Sums(len(upcoming.local_counts), self.device)
        self.window = Window()
        ending = False
        while upcoming is not None and not ending:
            step, upcoming = upcoming, self._fetch(steps)
            number = progress.step + 1
            if progress.step_in_epoch == 0:
                self.call("on_train_epoch_start")
            self.call("on_train_step_start")
            if signal := self._stop_requested():
                progress.request(Verdict.STOP, signal)

            local = strategy.forward_backward(step)
            asked = [verdict for judge in self._judges if (verdict := judge(self, local)) is not None]
            measured = self._measure(number)
            report = strategy.finish(local, step, asked, progress.flags(), list(measured.values()), upcoming)
            for judge in self._global_judges:
                if (skip := judge(self, report)) is not None:
                    report.skip = torch.maximum(report.skip, skip)
            self.call("on_before_optimizer_step", report)
            self.update(report)
            for adapt_state in self._adapt:
                adapt_state(self, report)
            self.sums.add(report)
            progress.step = number
            self.window.steps += 1
            self.call("on_train_step_end", report)

            due = self._due(number, last=upcoming is None)
            verdict = progress.settle(report.verdict, drain=bool(due))
            ending = upcoming is not None and verdict is Verdict.STOP
            self._follow(number, report, list(measured), due | _agreed(verdict, ending))

    def _fetch(self, steps: Iterator[Step]) -> Step | None:
        """The next step, built before the current one runs so that its counts can ride along."""
        before = time.perf_counter()
        step = next(steps, None)
        self.window.data_wait_seconds += time.perf_counter() - before
        return step

    def _due(self, number: int, last: bool) -> frozenset[str]:
        """What follows from the step's number alone: of 'log', 'evaluate', 'save' (each ends a run), known without talking."""
        if last:
            return frozenset({"log", "evaluate", "save"})
        due = {"evaluate"} if self.eval_every is not None and number % self.eval_every == 0 else set()
        return frozenset(due.union(*(due_at(self, number) for due_at in self._on["due"])))

    def _follow(self, number: int, report: Report, measured: list[str], due: frozenset[str]) -> None:
        """What is due or was agreed, in this order: log row, end of epoch, evaluation, save."""
        epoch_ends = self.progress.step_in_epoch + 1 == self.feed.order.steps_per_epoch
        logged = "log" in due or self._is_log_point(number)
        row = self._row(report, measured) if logged else {}
        paused = time.perf_counter()
        if epoch_ends and self.sums is not None:
            row["train/epoch_loss"] = self.sums.epoch_loss()
        if "evaluate" in due and self.evaluator is not None:
            row |= self.evaluate()
        if row:
            self.metrics |= row
            self.call("on_log", row)
        if epoch_ends:
            self.call("on_train_epoch_end", row)
        self.progress.finish_step(epoch_ends)
        if "stop" in due:
            self._stop_reason = self._agreed_reason()
        if "save" in due and self._on["on_save_checkpoint"]:
            self.call("on_save_checkpoint", state_of(self))
        if logged:
            self.window = Window()
        else:
            self.window.leave_out(time.perf_counter() - paused)

    def _agreed_reason(self) -> str:
        """Why the run stops, from whichever rank asked; every rank is here."""
        given = collectives.gather_json(self.progress.reasons, self.mesh.axis("world"), self.device)
        stops = [reason for reasons in given for reason in reasons if reason.startswith((Verdict.STOP.name, FAILED))]
        self._failed = any(reason.startswith(FAILED) for reason in stops)
        return stops[-1].partition(": ")[2] if stops else "asked to stop"

    def _is_log_point(self, number: int) -> bool:
        return number == 1 or number == self.num_steps or number % self.log_every == 0

    def _measure(self, number: int) -> dict[str, float]:
        """This rank's values of a log point; nothing otherwise."""
        values: dict[str, float] = {}
        for measure in self._on["measure"] if self._is_log_point(number) else ():
            values |= measure(self)
        return values

    def _row(self, report: Report, measured: list[str]) -> dict[str, float]:
        assert self.sums is not None
        row = {"epoch": float(self.progress.epoch)}
        row |= row_of(report, self.update.rate, self.update.skipped, self.sums.targets_in_window(), measured)
        for derive in self._on["derive"]:
            row |= derive(self, row)
        return row

    def evaluate(self, prefix: str = "val") -> dict[str, float]:
        """Measure the validation split, also with the weights that callbacks offer; the same on every rank."""
        if self.evaluator is None:
            raise DataError("this data has no validation split", "dataset.validation_fraction=0.1")
        self.call("on_validation_start")
        sets: dict[str, Any] = {}
        for weight_sets in self._on["weight_sets"]:
            sets |= weight_sets()
        found = self.evaluator.run(prefix, sets)
        self.call("on_validation_end", found)
        return found

    # --- hooks -----------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Find out who wants to be called when, once: the loop then calls nobody who would do nothing."""
        self._on = {name: self._who(name) for name in dir(Callback) if name in Callback.HOOKS or name in _OFFERS}
        self._judges, self._global_judges, self._adapt = (self._who(name) for name in ("judge", "judge_global", "after_update"))
        contexts = self._who("forward_context")
        self.strategy.module.contexts = [make for make in contexts if not isinstance(make(), nullcontext)]

    def _who(self, name: str) -> list[Callable[..., Any]]:
        """The bound `name` of every callback that defines it."""
        return [getattr(callback, name) for callback in self.callbacks.values() if hasattr(callback, name) and defined(callback, name)]

    def call(self, name: str, *arguments: Any) -> None:
        """Every callback's hook `name`, in their order."""
        for hook in self._on[name]:
            hook(self, *arguments)


_OFFERS = frozenset({"due", "measure", "derive", "weight_sets"})


def _agreed(verdict: Verdict, ending: bool) -> frozenset[str]:
    """What a verdict adds to what is due. A stop before the last step logs and saves, and leaves without an evaluation."""
    if ending:
        return frozenset({"log", "save", "stop"})
    return frozenset({"save"}) if verdict is Verdict.SAVE else frozenset()
