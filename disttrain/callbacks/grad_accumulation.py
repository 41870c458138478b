"""How many samples a rank puts through the model at once."""

from __future__ import annotations

from disttrain.errors import ConfigError
from disttrain.parallel.step import Declaration
from disttrain.train.hooks import StepPolicy


class GradAccumulation(StepPolicy):
    """Cuts a rank's part of the global batch into micro-batches whose gradients add up to one step's.

    Micro-batches a step = global batch / (micro_batch_size x data ranks), or one where a rank's part is smaller. The
    step stays what it was: its gradient is divided by the valid targets of the whole global batch.
    """

    def __init__(self, micro_batch_size: int = 8) -> None:
        """`micro_batch_size` in samples a rank."""
        if micro_batch_size < 1:
            raise ConfigError(
                f"callbacks.grad_accumulation.micro_batch_size is {micro_batch_size}; it is a number of samples, at least 1",
                "callbacks.grad_accumulation.micro_batch_size=8",
            )
        self.micro_batch_size = micro_batch_size

    def declare(self) -> Declaration:
        """The micro-batch size."""
        return Declaration(micro_batch_size=self.micro_batch_size)
