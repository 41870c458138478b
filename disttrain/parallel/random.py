"""Random streams of one rank: which ranks draw the same dropout masks.

The default stream is the same within a tensor group and differs over data ranks: residual activations there
are replicated, and so must be their masks. The rank's own stream differs within the tensor group as well: it
serves what works on this rank's heads, or, under sequence parallelism, tokens. Both are seeded anew every
step from (seed, step, coordinates), so a resume needs no saved state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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

    def __init__(self, seed: int, device: torch.device, data_index: int = 0, tensor_index: int = 0) -> None:
        """The indices are this rank's on the axes `data` and `tp`."""
        self._base = mix(seed, data_index)
        self._own_base = mix(seed, data_index, 1 + tensor_index)
        self._generator = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        self._own_state: Tensor | None = None
        self._step = 0

    def begin(self, step: int) -> None:
        """Seed for one step."""
        self._step = step
        self._generator.manual_seed((self._base + step * _STRIDE) & _MASK)
        self._own_state = None

    def state(self) -> Tensor:
        """Where the generator that is drawn from now stands."""
        return self._generator.get_state()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Draw from the rank's own stream inside the block."""
        shared_state = self._generator.get_state()
        if self._own_state is None:
            self._generator.manual_seed((self._own_base + self._step * _STRIDE) & _MASK)
        else:
            self._generator.set_state(self._own_state)
        try:
            yield
        finally:
            self._own_state = self._generator.get_state()
            self._generator.set_state(shared_state)
