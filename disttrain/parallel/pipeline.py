"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass through the ranks one behind the other.

What is cut: the depth of the model, into S = p v stages, v on each of the p ranks of the axis `pp` (`stages.py`). What
each rank holds: weights, gradients and optimizer state of its stages alone, and the activations of the micro-batches
under way. What moves: at each of the S - 1 borders, a micro-batch's residual stream forward (b t d numbers) and its
gradient backward, from rank to rank, nothing where both stages lie on one: 2 m n b t d numbers a step over all ranks,
with n borders between ranks. Weights never move; where the embedding is tied to the head, their gradient is summed
over the first and the last rank once a step (axis `ends`).

What it costs: a rank waits while the pipeline fills and drains, the bubble. With m micro-batches, F = I = W the times of a
rank's forward, backward for inputs and backward for weights, the share of a step that is waited:

    gpipe                     (p-1) / (m + p-1)        all forwards, then all backwards: m micro-batches' activations
    1f1b                      (p-1) / (m + p-1)        the same wait, at most p micro-batches' activations
    interleaved_1f1b          (p-1) / (v m + p-1)      v small stages a rank: fills faster, v times the messages
    interleaved_zero_bubble   (p-1) / (3 v m + p-1)    weights' backward waits and fills the drain
    zbv, dualpipev            (p-1) / (6 m + p-1)      two stages a rank, down and up again: rank 0 starts and ends

Papers stand in config/schedules.py; the order of actions is torch.distributed.pipelining's, and
experiments/pipeline_bubble measures it. Evaluation and generation are a plain chain of forwards, one micro-batch behind the other.

The step's micro-batches are on every rank, so no target is ever sent: a stage looks up what it needs by the micro-batch's number, and
the schedule is handed numbers. Torch allocates a buffer for every micro-batch and border, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from disttrain.config.schedules import SCHEDULES, needs, takes
from disttrain.errors import ConfigError, UserError
from disttrain.models.micro_batch import MicroBatch, running
from disttrain.parallel import collectives
from disttrain.parallel.clock import Action
from disttrain.parallel.data import GradientSync
from disttrain.parallel.loop import LossModule, Seen, weighted
from disttrain.parallel.mesh import Axis
from disttrain.parallel.random import Streams
from disttrain.parallel.stages import StageModule, Stages
from disttrain.parallel.step import Local, Step
from disttrain.parallel.watch import acting

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Types that may cross a border, by number."""
MOST_DIMS = 6
Entering = tuple[Sequence[int], torch.dtype]
"""Shape and type of what one stage hands to the next."""


class _Now:
    """The step under way."""

    def __init__(self, step: Step, weights: Sequence[Tensor | float]) -> None:
        self.step = step
        self.weights = dict(zip(step.local_counts, weights, strict=True))
        self.micro = [MicroBatch(batch.valid, self.weights) for batch in step.micro]
        self.terms: list[Mapping[str, Tensor]] = [{}] * len(step.micro)
        """The task's per-sample sums of each micro-batch, where the last stage is."""

    def sums(self, device: torch.device) -> list[Tensor]:
        """Loss sums by micro-batch and term: what arose on this rank, and zeros."""
        zero = {"": torch.zeros(1, dtype=torch.float64, device=device)}
        return [x for micro, terms in zip(self.micro, self.terms, strict=True) for x in micro.sums_with(terms or zero, self.weights)]


class Pipeline:
    """Runs a step's micro-batches through the stages of one line of ranks."""

    def __init__(
        self,
        module: LossModule,
        stages: Stages,
        own: Mapping[int, StageModule],
        schedule: str,
        axis: Axis,
        syncs: Sequence[GradientSync],
        streams: Streams,
        device: torch.device,
    ) -> None:
        """`module`: what is left of the model on this rank; `own`: its stages, by number; `axis`: `pp`."""
        self.module, self.stages, self.schedule, self.axis = module, stages, schedule, axis
        self.syncs, self.streams, self.device = syncs, streams, device
        self.own = own
        self.actions: list[Action] = []
        """What this rank did in the last step, in order."""
        self._run: Callable[[], None] | None = None
        self._now: _Now | None = None

    # --- training ----------------------------------------------------------------------------------------------------

    def train(self, step: Step, weights: Sequence[Tensor | float]) -> Local:
        """Both directions, in the schedule's order. A rank reports sums of terms that arise on it, and zeros for others."""
        run = self._run or self.prepare(step)
        self._now = now = _Now(step, weights)
        self.actions.clear()
        try:
            run()
        except RuntimeError as error:
            if isinstance(error.__cause__, (UserError, ValueError)):
                raise error.__cause__ from None  # torch wraps what a stage raised
            raise
        finally:
            self._now = None
        for sync in self.syncs:
            sync.arm()  # every backward is over: `finish` sends all
        return Local(now.sums(self.device), len(weights))

    def prepare(self, step: Step, entering: Entering | None = None) -> Callable[[], None]:
        """Torch's schedule over this rank's stages, made once. ConfigError for a number of micro-batches that it doesn't take.

        `entering`: what comes from other ranks' stages, where there is nobody to say it (plan's dry run).
        """
        from disttrain.parallel.torch_stages import CountedStage, make_schedule

        num_micro, last = len(step.micro), self.stages.last
        if not takes(self.schedule, num_micro, self.axis.size):
            raise ConfigError(
                f"strategy.schedule={self.schedule} takes {needs(self.schedule, self.axis.size)}; there are {num_micro}",
                "callbacks.grad_accumulation.micro_batch_size=1",
            )
        stages = [
            CountedStage(self.own[number], number, last + 1, border, self.device, self.axis, self._forward, self._working)
            for number, border in self._borders(step, entering).items()
        ]
        self._run = make_schedule(SCHEDULES[self.schedule].torch_name, stages, num_micro)
        return self._run

    def _forward(self, stage: int, micro: int, x: Any) -> Tensor:
        """What crosses to the next stage; of the last one, the loss. Random draws are this stage's and micro-batch's own."""
        assert self._now is not None
        step = self._now.step
        batch = step.micro[micro]
        self.streams.begin(step.number, micro, stage)
        y = self.own[stage](batch.inputs if stage == 0 else x)
        if stage < self.stages.last:
            return _own(y, x)
        self._now.terms[micro] = terms = self.module.losses(y, batch.targets)
        return weighted(list(terms.values()), [self._now.weights[term] for term in terms], batch.valid)

    def _working(self, action: str, stage: int, micro: int) -> AbstractContextManager[Any]:
        """Around every action: note it, and let modules know the micro-batch."""
        assert self._now is not None
        self.actions.append((action, stage, micro))
        return acting((action, stage, micro), running(self._now.micro[micro]))

    @torch.no_grad()
    def _borders(self, step: Step, entering: Entering | None) -> dict[int, tuple[Tensor, Tensor]]:
        """What enters and leaves each stage here, on the meta device.

        Seen once, as the first micro-batch passes through without being learned from, so no type (autocast) and no shape
        (sequence parallelism) is guessed.
        """
        seen: dict[int, tuple[Any, Any]] = {}
        model = self.module.model
        model.eval()
        self._chain(step.micro[0].inputs, lambda stage, x, y: seen.update({stage: (x, y)}), entering)
        model.train()
        number = torch.empty(1, dtype=torch.int64, device="meta")
        return {
            stage: (_like(x) if stage > 0 else number, _like(y) if stage < self.stages.last else number.float())
            for stage, (x, y) in seen.items()
        }

    # --- beside training -----------------------------------------------------------------------------------------------

    def evaluate(self, step: Step) -> tuple[Tensor, Seen]:
        """See `Runner`. Nothing is seen where the last stage isn't; sums are those of terms that arise here."""
        seen: Seen = []
        now = _Now(step, [0.0] * len(step.local_counts))
        for index, batch in enumerate(step.micro):
            with running(now.micro[index]):
                outputs = self._chain(batch.inputs)
                if outputs is not None:
                    now.terms[index] = self.module.losses(outputs, batch.targets)
                    seen.append((outputs, batch.targets, batch.valid))
        return torch.stack(now.sums(self.device)).view(len(step.micro), -1).sum(0), seen

    def outputs(self, inputs: Any) -> Any:
        """See `Runner`: outputs, a tensor, on every rank of the pipeline, all of which must call."""
        outputs = self._chain(inputs)
        source = self.stages.holders[-1]
        header = _header(outputs, self.device) if outputs is not None else torch.zeros(MOST_DIMS + 2, dtype=torch.int64, device=self.device)
        shape, dtype = _read(collectives.broadcast(header, self.axis, source))
        whole = outputs if outputs is not None else torch.empty(shape, dtype=dtype, device=self.device)
        return collectives.broadcast(whole, self.axis, source)

    def _chain(
        self, inputs: Any, note: Callable[[int, Any, Any], None] = lambda stage, x, y: None, entering: Entering | None = None
    ) -> Any:
        """Forward of one micro-batch through every stage: outputs where the last one is, else None. `note` sees what passes here."""
        x = inputs
        for stage, holder in enumerate(self.stages.holders):
            if holder != self.axis.index:
                continue
            before = self.stages.holders[stage - 1] if stage else holder
            if before != holder:
                shape, dtype = entering or _read(collectives.receive((MOST_DIMS + 2,), torch.int64, self.device, self.axis, before))
                x = collectives.receive(shape, dtype, self.device, self.axis, before)
            y = self.own[stage](x)
            note(stage, x, y)
            after = self.stages.holders[stage + 1] if stage < self.stages.last else holder
            if stage < self.stages.last:
                header = _header(y, self.device)
                if after != holder:
                    collectives.send(header, self.axis, after)
                    collectives.send(y, self.axis, after)
            x = y
        return x if self.stages.last in self.own else None


def _header(y: Any, device: torch.device) -> Tensor:
    """Type and shape of what crosses a border. ConfigError for anything but one tensor of numbers."""
    if not isinstance(y, Tensor) or y.dtype not in DTYPES or y.dim() > MOST_DIMS:
        what = f"a {type(y).__name__}" if not isinstance(y, Tensor) else f"a tensor of {y.dtype} with {y.dim()} dimensions"
        raise ConfigError(f"between pipeline stages passes one floating-point tensor; a stage of this model returns {what}", "strategy=ddp")
    numbers = [DTYPES.index(y.dtype), y.dim(), *y.shape]
    return torch.tensor(numbers + [0] * (MOST_DIMS + 2 - len(numbers)), device=device)


def _read(header: Tensor) -> tuple[list[int], torch.dtype]:
    kind, dims, *shape = header.tolist()
    return shape[:dims], DTYPES[kind]


def _own(y: Tensor, x: Any) -> Tensor:
    """`y` as torch wants a stage's output: memory of its own, which it may detach in place, and part of a graph."""
    if not y.requires_grad:  # nothing before it is trained: backward ends here
        return y.detach().requires_grad_()
    return y.clone() if y is x or y._base is not None else y


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=True)
