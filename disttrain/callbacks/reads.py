"""Reads of tensors on the host (`.item()`, `bool(x)`, ...), by the line that makes them. On a GPU each waits for all queued work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__format__")
_OURS = str(Path(__file__).resolve().parents[1])
_TORCHS = str(Path(torch.__file__).resolve().parent)


class Reads:
    """{'file.py:line': [reads, seconds]} of code that is neither ours nor torch's."""

    def __init__(self) -> None:
        self.by_line: dict[str, list[float]] = {}

    @contextmanager
    def seen(self, is_wanted: Callable[[], bool]) -> Iterator[None]:
        """Count while inside, what `is_wanted` at its moment."""
        before = {name: vars(torch.Tensor)[name] for name in READS if name in vars(torch.Tensor)}
        for name in READS:
            setattr(torch.Tensor, name, self._spy(name, is_wanted))
        try:
            yield
        finally:
            for name in READS:
                if name in before:
                    setattr(torch.Tensor, name, before[name])
                else:
                    delattr(torch.Tensor, name)  # what it hid is inherited

    def _spy(self, name: str, is_wanted: Callable[[], bool]) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            frame = sys._getframe(1)
            file = frame.f_code.co_filename
            if file.startswith((_OURS, _TORCHS)) or not is_wanted():
                return original(tensor, *arguments, **keywords)
            before = time.perf_counter()
            value = original(tensor, *arguments, **keywords)
            entry = self.by_line.setdefault(f"{Path(file).name}:{frame.f_lineno}", [0.0, 0.0])
            entry[0] += 1
            entry[1] += time.perf_counter() - before
            return value

        return read
