"""Who looks on while this rank talks to others and acts in a pipeline: a seam that costs next to nothing while nobody does.

`moving` stands around every collective that `collectives.py` makes, `acting` around every action of a pipeline's schedule,
`passing` around each direction of a micro-batch where there is no pipeline.
A `Watcher` between `watch` and `unwatch` is told of each, in the thread that makes it: to time it, to name it in a trace, to
check it. What FSDP2 and torch's pipelines send by themselves is counted by its axis (`Axis.count`) and not seen here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

from torch import Tensor

from disttrain.parallel.clock import Action
from disttrain.parallel.mesh import Axis


class Watcher:
    """Is told what happens. Every hook does nothing unless it is defined; none may talk to other ranks."""

    def begins(self, call: Call) -> None:
        """A collective is about to be made; `call.tensor` is what goes in or, in a gather, what will come out."""

    def ends(self, call: Call) -> None:
        """The host has the collective behind it; one that is under way (`call.overlaps`) may not be over."""

    def waits(self, call: Call) -> None:
        """The host is about to wait for one that was under way."""

    def done(self, call: Call) -> None:
        """It has waited. On a GPU the stream waits, and the host goes on."""

    def acts(self, action: Action) -> None:
        """A pipeline's action begins."""

    def acted(self, action: Action) -> None:
        """It is over."""

    def passes(self, direction: str, micro: int) -> None:
        """The forward or the backward of a micro-batch begins."""

    def passed(self, direction: str, micro: int) -> None:
        """It is over."""


_watchers: list[Watcher] = []


def watch(watcher: Watcher) -> None:
    """Tell `watcher` from now on, after those who watch already."""
    _watchers.append(watcher)


def unwatch(watcher: Watcher) -> None:
    """Tell `watcher` no longer; nothing happens where it isn't told."""
    if watcher in _watchers:
        _watchers.remove(watcher)


class Call:
    """One collective over `axis`. `notes` is where watchers keep what they know of it, by themselves."""

    __slots__ = ("axis", "collective", "notes", "num_bytes", "overlaps", "tensor", "work")

    def __init__(self, axis: Axis, collective: str, tensor: Tensor, overlaps: bool) -> None:
        self.axis, self.collective, self.overlaps = axis, collective, overlaps
        self.tensor: Tensor | None = tensor
        self.num_bytes = tensor.nbytes
        self.notes: dict[int, Any] = {}
        self.work: Any = None

    def __enter__(self) -> Call:
        for watcher in _watchers:
            watcher.begins(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.tensor = None
        for watcher in _watchers:
            watcher.ends(self)

    def under_way(self, work: Any) -> Any:
        """`work`, what torch returned, which those who watch may ask when it was over."""
        self.work = work
        return work

    def waiting(self) -> AbstractContextManager[Any]:
        """Entered around the wait for one that is under way."""
        return _Waiting(self)


class _Waiting:
    def __init__(self, call: Call) -> None:
        self.call = call

    def __enter__(self) -> None:
        for watcher in _watchers:
            watcher.waits(self.call)

    def __exit__(self, *raised: object) -> None:
        for watcher in _watchers:
            watcher.done(self.call)


class _Unwatched:
    """A collective that nobody looks at."""

    __slots__ = ()

    def __enter__(self) -> _Unwatched:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def under_way(self, work: Any) -> Any:
        return work

    def waiting(self) -> _Unwatched:
        return self


UNWATCHED = _Unwatched()
AnyCall = Call | _Unwatched


def moving(axis: Axis, collective: str, x: Tensor, overlaps: bool = False, uncounted: int = 0) -> AnyCall:
    """Count one `collective` of the whole tensor `x`, `uncounted` bytes less, over `axis`, and stand around it.

    `overlaps`: it will be under way when the call returns; whoever waits for it enters `waiting()` around that.
    """
    axis.count(collective, x.nbytes - uncounted)
    return Call(axis, collective, x, overlaps) if _watchers else UNWATCHED


class _Acting:
    def __init__(self, action: Action, inside: AbstractContextManager[Any]) -> None:
        self.action, self.inside = action, inside

    def __enter__(self) -> Any:
        for watcher in _watchers:
            watcher.acts(self.action)
        return self.inside.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        try:
            return self.inside.__exit__(kind, error, trace)
        finally:
            for watcher in _watchers:
                watcher.acted(self.action)


def acting(action: Action, inside: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """`inside`, entered around a pipeline's action, seen by those who watch."""
    return _Acting(action, inside) if _watchers else inside


@contextmanager
def _passing(direction: str, micro: int) -> Iterator[None]:
    for watcher in _watchers:
        watcher.passes(direction, micro)
    try:
        yield
    finally:
        for watcher in _watchers:
            watcher.passed(direction, micro)


def passing(direction: str, micro: int) -> AbstractContextManager[Any]:
    """Stand around the forward or the backward of micro-batch `micro`."""
    return _passing(direction, micro) if _watchers else UNWATCHED
