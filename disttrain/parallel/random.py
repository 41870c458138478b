"""Random streams of one rank: which ranks draw the same dropout masks.

The default stream is the same within a tensor group, where residual activations are replicated and so must be
their masks. It differs over data ranks, which see other samples, and over context ranks, which see other tokens.
The rank's own stream differs within the tensor group as well: it serves what works on this rank's heads, or,
under sequence parallelism, tokens. Both are seeded anew every step from (seed, step, coordinates), so a resume needs
no saved state; in a pipeline, for every micro-batch of every stage, from its numbers too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

_MASK = (1 << 63) - 1
_STRIDE = 0x9E3779B97F4A7C15


def mix(*numbers: int) -> int:
    """A well-spread 63-bit hash of integers (splitmix64's finaliser, Steele et al. 2014, folded over the numbers)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & _MASK


class Streams:
    """The default stream, shared in the tensor group, and the rank's own."""

    def __init__(self, seed: int, device: torch.device, grad_index: int = 0, tensor_index: int = 0) -> None:
        """The indices are this rank's on the axes `grad` (data x cp) and `tp`."""
        self._bases = mix(seed, grad_index), mix(seed, grad_index, 1 + tensor_index)
        self._seeds = list(self._bases)
        self._generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        self._own_state: Tensor | None = None

    def begin(self, step: int, *part: int) -> None:
        """Seed for one step, or for a part of it: (micro-batch, stage) of a pipeline, whose order of actions then changes no mask."""
        self._seeds = [mix(base + step * _STRIDE, *part) if part else (base + step * _STRIDE) & _MASK for base in self._bases]
        self._generator.manual_seed(self._seeds[0])
        self._own_state = None

    def state(self) -> Tensor:
        """Where the generator that is drawn from now stands."""
        return self._generator.get_state()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Draw from the rank's own stream inside the block."""
        shared_state = self._generator.get_state()
        if self._own_state is None:
            self._generator.manual_seed(self._seeds[1])
        else:
            self._generator.set_state(self._own_state)
        try:
            yield
        finally:
            self._own_state = self._generator.get_state()
            self._generator.set_state(shared_state)

    def again(self) -> AbstractContextManager[None]:
        """A block in which the rank's own stream draws once more from where it stands now; the default stream is the caller's.

        It may be entered again: a backward that runs for inputs and for weights apart computes a recomputed block twice.
        """
        return _Again(self, self._own_state)


class _Again:
    """See `Streams.again`."""

    def __init__(self, streams: Streams, then: Tensor | None) -> None:
        self._streams, self._then = streams, then

    def __enter__(self) -> None:
        self._now, self._streams._own_state = self._streams._own_state, self._then

    def __exit__(self, *raised: object) -> None:
        self._streams._own_state = self._now
