"""How far the run is, for the person who watches."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer

_log = logging.getLogger(__name__)

_SHOWN = ("train/loss", "train/epoch_loss", "val/loss", "perf/tokens_per_second", "perf/samples_per_second")


class ProgressBar(Callback):
    """A bar on a terminal, a line a log point elsewhere; rank 0 only, and always the true global numbers.

    The bar's own thread looks at the step's number twice a second, so a step costs nothing.
    """

    def __init__(self, refresh_per_second: float = 2.0) -> None:
        """`refresh_per_second`: how often the bar is drawn."""
        self.refresh_per_second = refresh_per_second
        self._bar: Any = None
        self._last: dict[str, float] = {}
        self._warned = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """Open the bar where there is a terminal."""
        if trainer.is_lead and sys.stderr.isatty():
            self._bar = _bar(trainer, self.refresh_per_second)
            self._bar.start()

    def on_log(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        """Show the newest numbers."""
        if not trainer.is_lead:
            return
        if not self._warned and not math.isfinite(row.get("train/loss", 0.0)):
            self._warned = True
            _log.warning("warning: at step %d the loss is not finite; such updates are skipped", trainer.progress.step)
        self._last |= {name: row[name] for name in (*_SHOWN, "perf/step_seconds") if name in row}
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], numbers=_numbers(self._last))
        else:
            step, total = trainer.progress.step, trainer.num_steps
            left = (total - step) * self._last.get("perf/step_seconds", 0.0)
            with contextlib.suppress(BrokenPipeError):  # who read along has gone, and the run goes on
                print(f"step {step:>{len(str(total))}}/{total}  {_numbers(row)}  {_duration(left)} left", flush=True)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Give the terminal back."""
        self._close()

    def on_fit_end(self, trainer: Trainer) -> None:
        """Leave the finished bar on the screen."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar(trainer: Trainer, refresh_per_second: float) -> Any:
    """A rich bar that reads the step's number whenever it draws itself."""
    from rich import progress
    from rich.console import Console

    class Bar(progress.Progress):
        def get_renderables(self) -> Any:
            if self.task_ids:
                self.update(self.task_ids[0], completed=trainer.progress.step)
            yield from super().get_renderables()

    columns = (
        progress.TextColumn("step {task.completed}/{task.total}"),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[numbers]}"),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
    )
    bar = Bar(*columns, console=Console(stderr=True), refresh_per_second=refresh_per_second)
    bar.add_task("steps", total=trainer.num_steps, completed=trainer.progress.step, numbers="")
    return bar


def _numbers(values: Mapping[str, float]) -> str:
    """'loss 2.345  val/loss 2.4  12.3k tokens/s'."""
    parts = []
    for name in _SHOWN:
        if name in values:
            group, _, short = name.partition("/")
            if group == "perf":
                parts.append(f"{_short(values[name])} {short.removesuffix('_per_second')}/s")
            else:
                parts.append(f"{short if group == 'train' else name} {values[name]:.4g}")
    if "perf/tokens_per_second" in values and "perf/samples_per_second" in values:
        parts.pop()  # tokens say it already
    return "  ".join(parts)


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
