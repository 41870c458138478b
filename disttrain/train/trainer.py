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
from disttrain.errors import DataError, DivergedError
from disttrain.models.task import Task, loss_names, task_of
from disttrain.parallel.agreement import first_looks
from disttrain.parallel.layout import Layout
from disttrain.parallel.mesh import Mesh, found_device, found_mesh
from disttrain.parallel.options import Options
from disttrain.parallel.step import Report, Step, Verdict
from disttrain.parallel.update import LossScale
from disttrain.record import RunFolder, followed_by
from disttrain.train.assembly import check, local_part, make_evaluator, make_feed, make_strategy, make_update, run_length, training_order
from disttrain.train.batch import train_positions
from disttrain.train.evaluate import unless_stopped
from disttrain.train.hooks import Callback, by_name, declared, defined
from disttrain.train.optimizer import Constant, Schedule
from disttrain.train.progress import Progress, Result, diverged, follows
from disttrain.train.rows import Sums, Window, row_of
from disttrain.train.state import roll_back, state_of

if TYPE_CHECKING:
    from disttrain.config.schema import Config


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
        callbacks: by key, or in order. metrics: torchmetrics by name, beside the task's. steps or epochs: one of both.
        global_batch_size: samples a step, whatever the layout. stop_requested: name of a signal that asks to stop, asked every step.
        """
        check(steps, epochs, global_batch_size, clip_norm, log_every, eval_every)
        self.mesh = mesh or found_mesh()
        self.device = device or found_device()
        self.callbacks = dict(callbacks) if isinstance(callbacks, Mapping) else by_name(callbacks)
        self.folder, self.config, self.overfit, self.log_every, self.eval_every = folder, config, overfit, log_every, eval_every
        self.data = adapt.data_module(data)
        fixed = declared(self.callbacks)
        part = local_part(self.mesh.axis("data"), global_batch_size, fixed.micro_batch_size)
        train = adapt.numbered(self.data.train())
        order = training_order(train, global_batch_size, seed, self.data.shuffle, part.takes)
        self.num_steps = run_length(steps, epochs, order)

        self.strategy = make_strategy(self.mesh, options or Options(), self.device, seed)
        scale = None if fixed.loss_scale is None else LossScale(fixed.loss_scale, self.strategy.update_device)
        self.strategy.prepare(model, task or task_of(model), dtype, scale)
        self.progress = Progress(self.device)
        self.update = make_update(self.strategy, optimizer, weight_decay, schedule, self.num_steps, clip_norm, part)
        self.feed = make_feed(self.data, train, order, part, self.strategy)
        self.evaluator = make_evaluator(self.data, part, self.strategy, metrics or {})

        self.window, self.metrics = Window(), dict[str, float]()
        self.step: Step | None = None  # under way, or the last
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

    @property
    def listeners(self) -> Mapping[str, list[Callable[..., Any]]]:
        """Who is called at each hook, in order; a stopwatch may put others in their places."""
        return self._on | {"judge": self._judges, "judge_global": self._global_judges, "after_update": self._adapt}

    # --- the loop -------------------------------------------------------------------------------------------------------

    def fit(self) -> Result:
        """Train. Raises what went wrong on this rank, after telling the callbacks."""
        try:
            self.call("on_fit_start")
            self._run()
            lost = None if self._stop_reason else diverged(self.metrics)
            if self._failed or lost:
                raise DivergedError(lost or self._stop_reason)
            self.call("on_fit_end")
        except BaseException as error:
            self.call("on_exception", error)
            raise
        finally:
            self.feed.close()
            if self.evaluator is not None:
                self.evaluator.feed.close()
        return Result("stopped" if self._stop_reason else "done", self._stop_reason, self.progress.step, self.metrics)

    def _run(self) -> None:
        """Every step from where the run stands to its last, or to an agreed stop."""
        progress, strategy = self.progress, self.strategy
        if progress.owes_evaluation and self.evaluator is not None:
            progress.owes_evaluation = False
            self._log(self.evaluate())
        start = Position(progress.epoch, progress.step_in_epoch)
        steps = self.feed.steps(train_positions(self.feed.order, progress.step, start, self.num_steps, self.overfit))
        upcoming = next(steps, None)
        if upcoming is None:
            return
        strategy.count(upcoming)
        strategy.model.train()
        self.sums = self.sums or Sums(len(upcoming.local_counts), self.device, strategy.apart)
        self.loss_names = loss_names(tuple(upcoming.local_counts), self.task)
        self.window, ending = Window(), False
        while upcoming is not None and not ending:
            self.step = step = upcoming
            upcoming = self._fetch(steps)
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
                if (found := judge(self, report)) is not None:
                    report.fold(found)
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
            self._follow(number, report, list(measured), due | follows(verdict, ending))
            ending = bool(self._stop_reason)

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
        return self.update.ready(number, frozenset(due.union(*(due_at(self, number) for due_at in self._on["due"]))))

    def _follow(self, number: int, report: Report, measured: list[str], due: frozenset[str]) -> None:
        """What is due or was agreed, in this order: log row, roll-back, end of epoch, evaluation, save."""
        epoch_ends = self.progress.step_in_epoch + 1 == self.feed.order.steps_per_epoch
        logged = "log" in due or self.is_log_point(number)
        if not (due or logged or epoch_ends):
            return self.progress.finish_step(epoch_ends)
        with self.mesh.uncounted():
            row = self._row(report, measured) if logged else {}
            paused = time.perf_counter()
            self._pause(row, due, epoch_ends)
        self.window = Window() if logged else self.window.leave_out(time.perf_counter() - paused)

    def _pause(self, row: dict[str, float], due: frozenset[str], epoch_ends: bool) -> None:
        """What stands between two steps and is no part of either."""
        if "roll_back" in due:
            roll_back(self)
        if epoch_ends and self.sums is not None:
            row["train/epoch_loss"] = self.sums.epoch_loss()
        if "evaluate" in due and self.evaluator is not None:
            row |= (found := unless_stopped(self.evaluate, self._stop_requested, self.progress))
            due |= frozenset() if found else {"save", "stop"}
        self._log(row)
        if epoch_ends:
            self.call("on_train_epoch_end", row)
        self.progress.finish_step(epoch_ends)
        if "stop" in due:
            self._stop_reason, self._failed = self.progress.agreed_reason(self.mesh.axis("world"))
        if "save" in due and self._on["on_save_checkpoint"]:
            self.call("on_save_checkpoint", state_of(self))

    def _log(self, row: dict[str, float]) -> None:
        self.metrics = followed_by(self.metrics, row)
        if row:
            self.call("on_log", row)

    def is_log_point(self, number: int) -> bool:
        """Whether the step of that number, from 1, has a row."""
        return number == 1 or number == self.num_steps or number % self.log_every == 0

    def _measure(self, number: int) -> dict[str, float]:
        """This rank's values of a log point; nothing otherwise."""
        asked = self._on["measure"] if self.is_log_point(number) else ()
        return {name: value for measure in asked for name, value in measure(self).items()}

    def _row(self, report: Report, measured: list[str]) -> dict[str, float]:
        assert self.sums is not None
        numbers = row_of(*self.update.shown(report), self.sums.targets_in_window(), measured, self.loss_names)
        row = {"epoch": float(self.progress.epoch), **numbers}
        for derive in self._on["derive"]:
            row |= derive(self, row)
        return row

    def evaluate(self, prefix: str = "val", is_stopped: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Measure the validation split, also with the weights that callbacks offer; the same on every rank."""
        if self.evaluator is None:
            remedy = "dataset.validation_fraction=0.1 for data that disttrain cuts itself; a `validation` of your own for the rest"
            raise DataError("this data has no validation split", remedy)
        self.call("on_validation_start")
        sets = {name: weights for offer in self._on["weight_sets"] for name, weights in offer().items()}
        found = self.evaluator.run(prefix, sets, is_stopped)
        self.call("on_validation_end", found)
        return found

    # --- hooks -----------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Find out who wants to be called when, once: the loop then calls nobody who would do nothing."""
        self._on = {name: self._who(name) for name in dir(Callback) if name in Callback.HOOKS or name in _OFFERS}
        self._judges, self._global_judges, self._adapt = (self._who(name) for name in ("judge", "judge_global", "after_update"))
        self._on["on_before_optimizer_step"] += first_looks(self.parameters, self.layouts, self.mesh.axis("tp"))
        self.strategy.module.contexts = [make for make in self._who("forward_context") if not isinstance(make(), nullcontext)]

    def _who(self, name: str) -> list[Callable[..., Any]]:
        """The bound `name` of every callback that defines it."""
        return [getattr(callback, name) for callback in self.callbacks.values() if hasattr(callback, name) and defined(callback, name)]

    def call(self, name: str, *arguments: Any) -> None:
        """Every callback's hook `name`, in their order."""
        for hook in self._on[name]:
            hook(self, *arguments)


_OFFERS = frozenset({"due", "measure", "derive", "weight_sets"})
