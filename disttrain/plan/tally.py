"""Every allocation of a dry run, counted: what is alive, of which kind, and the most that ever was."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("weights", "gradients", "optimizer", "gathered", "activations")
"""What memory is for: `gathered` are whole weights of a shared-out unit while it computes, `activations` all that is not named."""


class Tally:
    """Watches the memory behind every tensor that an operator makes, from the first that sees it to the last that lets it go.

    Of kind `now` is what is made; `rename` says later what it was for. Bytes are those asked for, as an allocator's blocks
    and a process's own memory are not.
    """

    def __init__(self) -> None:
        self.now = "activations"
        self.alive: Counter[str] = Counter()
        """Bytes by kind."""
        self.answers = False
        """Whether who reads a number gets one (`answering`)."""
        self.num_allocations = 0
        self.peak: Counter[str] = Counter()
        """`alive` when there was most in all."""
        self._most = self._total = 0
        self._known: dict[int, tuple[str, int, Any]] = {}

    def see(self, made: Any) -> None:
        """Note what an operator has made: a tensor, some, or none."""
        if isinstance(made, Tensor):
            self._see(made)
        elif isinstance(made, (tuple, list)):
            for one in made:
                if isinstance(one, Tensor):
                    self._see(one)

    def forget_peak(self) -> None:
        """Begin anew: the most is what is alive."""
        self._most, self.peak = self._total, self.alive.copy()

    def rename(self, tensors: Iterable[Tensor], kind: str) -> None:
        """What is behind `tensors` is of this kind."""
        for tensor in (getattr(tensor, "_local_tensor", tensor) for tensor in tensors):
            key = tensor.untyped_storage()._cdata
            self._see(tensor)
            before, size, alive = self._known[key]
            self._known[key] = kind, size, alive
            self.alive[before] -= size
            self.alive[kind] += size

    def follow(self, model: nn.Module) -> None:
        """Gradients of `model` are named as they come, those of whole weights too that sharding puts in the place of its parts."""
        known: set[int] = set()

        def listen(module: nn.Module, inputs: Any) -> None:
            for parameter in module.parameters():
                if parameter.requires_grad and id(parameter) not in known and not hasattr(parameter, "_local_tensor"):
                    known.add(id(parameter))
                    if self._known.get(parameter.untyped_storage()._cdata, ("weights",))[0] != "weights":
                        self.rename([parameter], "gathered")
                    parameter.register_post_accumulate_grad_hook(lambda one: self.rename([one.grad], "gradients"))

        for module in model.modules():
            module.register_forward_pre_hook(listen)

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """What is made inside is of this kind."""
        before, self.now = self.now, kind
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Inside, a number that is read is 1, and a truth False: a schedule's factor, and that an update is not skipped."""
        self.answers = True
        try:
            yield
        finally:
            self.answers = False

    @contextmanager
    def watching(self, mode: AbstractContextManager[Any]) -> Iterator[Tally]:
        """Count inside what `mode` (`Fakes` or `Watch`) sees. Memory that changes its size, as FSDP2's whole weights do, is `gathered`."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            self._resized(storage)
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        try:
            with mode:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = self.now, storage.nbytes(), weakref.ref(storage, lambda _: self._gone(key))
        self.num_allocations += 1
        self._grown(self.now, storage.nbytes())

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            return
        kind, before, alive = self._known[storage._cdata]
        self._known[storage._cdata] = "gathered", storage.nbytes(), alive
        self.num_allocations += storage.nbytes() > before
        self._grown(kind, -before)
        self._grown("gathered", storage.nbytes())

    def _gone(self, key: int) -> None:
        kind, size, _ = self._known.pop(key)
        self._grown(kind, -size)

    def _grown(self, kind: str, size: int) -> None:
        self.alive[kind] += size
        self._total += size
        if self._total > self._most:
            self._most, self.peak = self._total, self.alive.copy()


class Fakes(FakeTensorMode):
    """Tensors made inside have no values, and are counted."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self._tally = tally
        self._is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on shapes, and note what it made. Shapes are worked out by other operators, which no kernel runs."""
        if self._is_inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if self._tally.answers and func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 1
        if not func._schema.returns:  # a fused update: it changes values alone, and has no form without them
            return None
        self._is_inside = True
        try:
            made = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._is_inside = False
        self._tally.see(made)
        return made


class Watch(TorchDispatchMode):
    """Tensors made inside are real, and counted."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and note what it made. What is cut over a mesh has no memory but that of its local part."""
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        self._tally.see(made)
        return made
