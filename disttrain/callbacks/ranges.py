"""What happens on a rank, as named ranges of torch's profiler or of NVTX (which nsys shows)."""

from __future__ import annotations

import threading

import torch

from disttrain.callbacks.trace import Span
from disttrain.parallel.clock import Action
from disttrain.parallel.watch import Call, Watcher

ACTIONS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}


class Ranges(Watcher):
    """Opens a range for each thing that it is told of. They nest by thread; what is under way has one for its call and one for its wait."""

    def __init__(self, tool: str) -> None:
        """`tool`: torch or nvtx."""
        self.tool = tool
        self._open = threading.local()

    def begin(self, span: Span) -> None:
        """Open a range."""
        if self.tool == "nvtx":
            torch.cuda.nvtx.range_push(span.title)
            return
        if not hasattr(self._open, "ranges"):
            self._open.ranges = []
        opened = torch.profiler.record_function(span.mark())
        opened.__enter__()
        self._open.ranges.append(opened)

    def end(self) -> None:
        """Close the one opened last on this thread; nothing happens where it was opened before there was a watcher."""
        if self.tool == "nvtx":
            torch.cuda.nvtx.range_pop()
        elif getattr(self._open, "ranges", None):
            self._open.ranges.pop().__exit__(None, None, None)

    def begins(self, call: Call) -> None:
        """See `Watcher`."""
        self.begin(Span("collective", f"{call.collective} over {call.axis.name}", call.axis.name, call.num_bytes))

    def ends(self, call: Call) -> None:
        """See `Watcher`."""
        self.end()

    def waits(self, call: Call) -> None:
        """See `Watcher`."""
        self.begin(Span("wait", f"wait: {call.collective} over {call.axis.name}", call.axis.name))

    def done(self, call: Call) -> None:
        """See `Watcher`."""
        self.end()

    def acts(self, action: Action) -> None:
        """See `Watcher`."""
        kind, stage, micro = action
        self.begin(Span("action", f"{ACTIONS[kind]} of stage {stage}, micro-batch {micro}"))

    def acted(self, action: Action) -> None:
        """See `Watcher`."""
        self.end()

    def passes(self, direction: str, micro: int) -> None:
        """See `Watcher`."""
        self.begin(Span("micro-batch", f"{direction} of micro-batch {micro}"))

    def passed(self, direction: str, micro: int) -> None:
        """See `Watcher`."""
        self.end()
