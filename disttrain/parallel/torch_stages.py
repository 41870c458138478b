"""torch.distributed.pipelining's stage, which notes what it does and counts what it sends; and its schedules over such stages.

The module is imported where a schedule is made: torch.distributed.pipelining takes seconds, because it imports torch's compiler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import RESHARD, UNSHARD, PipelineScheduleSingle, _PipelineScheduleRuntime, get_schedule_class

from disttrain.parallel.mesh import Axis

Border = tuple[Tensor, Tensor]
"""What enters a stage and what leaves it, on the meta device."""


class CountedStage(PipelineStage):
    """One stage of this rank. Shapes are given, so torch neither infers them nor sends (pickled) descriptions of them."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        num_stages: int,
        border: Border,
        device: torch.device,
        axis: Axis,
        run: Callable[[int, int, Any], Tensor],
        working: Callable[[str, int, int], AbstractContextManager[Any]],
    ) -> None:
        """`module` holds the weights; `run(stage, micro-batch, input)` is its forward.

        `working(kind, stage, micro-batch)` is entered around each action.
        """
        entering, leaving = border
        super().__init__(module, number, num_stages, device, (entering,), (leaving,), group=axis.group)
        self._axis, self._run, self._working = axis, run, working
        self._micro = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Forward of one micro-batch."""
        self._micro = fwd_chunk_id
        with self._working("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        """The forward itself."""
        return self._run(self.stage_index, self._micro, args[0])

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> Any:
        """Backward of one micro-batch, whole or for inputs."""
        with self._working("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Backward of one micro-batch for weights."""
        with self._working("W", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_send_ops(self, *args: Any) -> list[Any]:
        """Sends of activations."""
        return self._counted("send", super().get_fwd_send_ops(*args))

    def get_bwd_send_ops(self, *args: Any) -> list[Any]:
        """Sends of gradients."""
        return self._counted("send", super().get_bwd_send_ops(*args))

    def get_fwd_recv_ops(self, *args: Any) -> list[Any]:
        """Receipts of activations."""
        return self._counted("receive", super().get_fwd_recv_ops(*args))

    def get_bwd_recv_ops(self, *args: Any) -> list[Any]:
        """Receipts of gradients."""
        return self._counted("receive", super().get_bwd_recv_ops(*args))

    def _counted(self, kind: str, operations: list[Any]) -> list[Any]:
        for operation in operations:
            if kind == "send":  # gloo sends the memory under a strided tensor
                operation.tensor = operation.tensor.contiguous()
            self._axis.count(kind, operation.tensor.nbytes)
        return operations


def make_schedule(name: str, stages: Sequence[CountedStage], num_micro: int) -> Callable[[], None]:
    """A function that runs one step in the order of torch's schedule `name`. The last stage's forward returns the loss."""
    logging.getLogger("torch.distributed.pipelining.schedules").disabled = True  # at an error, pages: the whole order of actions
    kind = get_schedule_class(name)
    alone = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(stages[0] if alone else list(stages), n_microbatches=num_micro, loss_fn=lambda loss, _: loss, scale_grads=False)
    if isinstance(schedule, _PipelineScheduleRuntime):
        order = schedule.pipeline_order_with_comms
        order |= {rank: _gathered_once(actions) for rank, actions in order.items()}
    numbers = torch.arange(num_micro)  # torch wants something to split; stages look up what they need
    inputs = [numbers] if any(stage.is_first for stage in stages) else []
    target = numbers if any(stage.is_last for stage in stages) else None

    def step() -> None:
        schedule.step(*inputs, target=target, return_outputs=False)

    return step


def _gathered_once(actions: Sequence[Any]) -> list[Any]:
    """A rank's actions with one gathering and one release of each stage's weights, which ZeRO-1 keeps whole in between.

    torch keeps three stages whole at a time; with more a rank it would gather them again and again.
    """
    gathered: set[int] = set()
    released = {action.stage_index: index for index, action in enumerate(actions) if action.computation_type is RESHARD}
    kept = []
    for index, action in enumerate(actions):
        stage = action.stage_index
        if action.computation_type is UNSHARD:
            if stage in gathered:
                continue
            gathered.add(stage)
        if action.computation_type is not RESHARD or released[stage] == index:
            kept.append(action)
    return kept
