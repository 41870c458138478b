"""Data parallelism: every rank holds the whole model (or its tensor shard) and sees its slice of the global batch.

What is cut: the batch. What moves: the gradients, all-reduced once a step, 2(n-1)/n of the parameters' bytes, in
buckets that leave while the last micro-batch's backward goes on (Li et al. 2020, arXiv:2006.15704, section 3.2).

The reducer is our own. Buckets are fixed when it is made and leave in that order always, so a fresh process sums
in the same order as one that has run for days, and a resume is bit-exact; torch's DistributedDataParallel
re-orders them after its first backward. It sums, so no weight need be multiplied by the number of ranks; its
bytes are counted like all others; and it needs no import of torch's compiler, a second on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from disttrain.errors import ConfigError
from disttrain.parallel import collectives
from disttrain.parallel.compress import Compressor, Sending
from disttrain.parallel.mesh import Axis

MEBIBYTE = 1 << 20
FIRST_BUCKET = 1 * MEBIBYTE
"""Bytes of the bucket that leaves first: small, so that the axis is busy early."""


class GradientSync(Protocol):
    """How gradients cross the ranks that see different samples. Afterwards they are sums over those ranks."""

    def arm(self) -> None:
        """The backward that follows is the step's last."""

    def finish(self) -> None:
        """Every backward of the step is over: complete the sums."""


class _Bucket:
    """Gradients that travel together: one flat buffer, of which each gradient becomes a view."""

    def __init__(self, parameters: list[nn.Parameter], names: Mapping[int, str]) -> None:
        self.parameters = parameters
        self.flat = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
        parts = self.flat.split([p.numel() for p in parameters])
        self.views = {id(p): part.view_as(p) for p, part in zip(parameters, parts, strict=True)}
        self.by_name = {names[id(p)]: self.views[id(p)] for p in parameters}
        self.missing: set[int] = set()
        self.pending: Sending | None = None

    def take(self, parameter: Tensor) -> None:
        """Make the parameter's gradient, if it has one, its view of the buffer."""
        view = self.views[id(parameter)]
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view


class Reducer:
    """Sums gradients over an axis in place, buckets leaving as the last backward of a step fills them."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        axis: Axis,
        bucket_size: float,
        find_unused: bool,
        compressor: Compressor | None = None,
    ) -> None:
        """`parameters` in the order of forward; `bucket_size` in MiB; `find_unused`: parameters may be left out of a step.

        `compressor`: what sums the buckets instead of a plain all-reduce.
        """
        self.axis = axis
        self.find_unused = find_unused
        self.compressor = compressor
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._buckets = [_Bucket(group, self._names) for group in _grouped(list(parameters.values())[::-1], int(bucket_size * MEBIBYTE))]
        self._bucket_of = {id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._next = len(self._buckets)
        self._armed = False
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def buffers(self) -> list[Tensor]:
        """The memory that gradients lie in."""
        return [bucket.flat for bucket in self._buckets]

    def arm(self) -> None:
        """The backward that follows is the step's last: send each bucket as it fills."""
        self._next = 0
        self._armed = True
        for bucket in self._buckets:
            bucket.missing = set(bucket.views)

    def finish(self) -> None:
        """Send what the backward did not fill, and wait for all. ConfigError names parameters that took no part, unless they may."""
        self._armed = False
        self._fill_unused()
        self._collect()
        while self._next < len(self._buckets):
            self._send(self._buckets[self._next])
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None

    def _collect(self) -> None:
        """Put gradients into their buckets that no hook has seen: a backward for weights alone sets `.grad` by hand."""
        for bucket in self._buckets[self._next :]:
            for parameter in bucket.parameters:
                bucket.take(parameter)

    def _arrived(self, parameter: Tensor) -> None:
        """After a gradient was accumulated: keep it in its bucket; send that, and those after it, once they are full."""
        bucket = self._bucket_of[id(parameter)]
        bucket.take(parameter)
        if not self._armed:
            return
        if id(parameter) not in bucket.missing:
            raise ConfigError(
                f"the gradient of '{self._names[id(parameter)]}' came twice in one backward, after it may have been sent to other ranks",
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in the model",
            )
        bucket.missing.discard(id(parameter))
        # where some may be left out, ranks agree first on which: see `_fill_unused`
        while not self.find_unused and self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send(self._buckets[self._next])

    def _send(self, bucket: _Bucket) -> None:
        if self.compressor is None:
            bucket.pending = collectives.start_all_reduce(bucket.flat, self.axis)
        else:
            bucket.pending = self.compressor.start(bucket.flat, bucket.by_name)
        self._next += 1

    def _fill_unused(self) -> None:
        """Zeros for a parameter that took no part here but did on another rank. Nothing for one that did nowhere: one host read a step."""
        parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        unused = [parameter for parameter in parameters if parameter.grad is None]
        if not self.find_unused:
            if unused:
                names = ", ".join(sorted(self._names[id(parameter)] for parameter in unused))
                raise ConfigError(
                    f"these parameters took no part in the loss of a step, so ranks would wait for their gradients: {names}",
                    "strategy.find_unused_parameters=true, or freeze them with requires_grad_(False)",
                )
            return
        used = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=self._buckets[0].flat.device)
        anywhere = collectives.all_reduce_(used, self.axis, "max").tolist()
        for parameter, is_used in zip(parameters, anywhere, strict=True):
            if parameter.grad is None:
                view = self._bucket_of[id(parameter)].views[id(parameter)].zero_()
                parameter.grad = view if is_used else None


def _grouped(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Consecutive parameters of one type, up to `bucket_bytes` a group; the first group is small."""
    groups: list[list[nn.Parameter]] = []
    room, dtype = 0, None
    for parameter in parameters:
        if parameter.nbytes > room or parameter.dtype != dtype:
            groups.append([])
            room = min(FIRST_BUCKET, bucket_bytes) if len(groups) == 1 else bucket_bytes
            dtype = parameter.dtype
        groups[-1].append(parameter)
        room -= parameter.nbytes
    return groups
