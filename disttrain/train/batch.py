"""Fills the Step: this rank's slice of each global batch, in micro-batches of one shape, ahead of its use.

The global batch is cut into micro-batches first and each of those over the data axis, so that micro-batch i of all
data ranks together is micro-batch i of one device that runs as many: what sees a micro-batch (BatchNorm) then sees the
same samples in every layout. Ranks of one tensor group take the same. Where an epoch runs out, rows are void: they
repeat some sample, and count for nothing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from disttrain.data.dataset import VOID, Order, Position
from disttrain.data.workers import BatchSource, Request
from disttrain.models.task import Task
from disttrain.parallel.mesh import Axis
from disttrain.parallel.step import Batch, Step, map_tensors


@dataclass(frozen=True)
class Slice:
    """Which rows of a global batch a rank takes, and in what micro-batches."""

    axis: Axis
    global_batch_size: int
    micro_batch_size: int

    @property
    def local_batch_size(self) -> int:
        """Rows of this rank."""
        return self.global_batch_size // self.axis.size

    @property
    def num_micro(self) -> int:
        """Micro-batches a step."""
        return self.local_batch_size // self.micro_batch_size

    def takes(self, global_batch_size: int) -> bool:
        """Whether a batch of that size is as many whole micro-batches on every rank; a part that is smaller than one is one."""
        local, rest = divmod(global_batch_size, self.axis.size)
        micro = min(self.micro_batch_size, local)
        return rest == 0 and micro > 0 and local % micro == 0

    def rows(self, of_batch: Tensor) -> Tensor:
        """This rank's part of [global_batch_size] numbers: its share of each micro-batch, in order."""
        return of_batch.view(self.num_micro, self.axis.size, self.micro_batch_size)[:, self.axis.index].flatten()

    def num_samples(self, in_batch: int) -> int:
        """How many of a batch's samples, of which the first `in_batch` are no void ones, this rank holds; they are its first."""
        whole, rest = divmod(in_batch, self.axis.size * self.micro_batch_size)
        in_last = max(0, min(self.micro_batch_size, rest - self.axis.index * self.micro_batch_size))
        return whole * self.micro_batch_size + in_last


@dataclass(frozen=True)
class _Asked:
    """One step's part of a request: its number, rows (VOID where there is none), and samples with their seeds."""

    number: int
    rows: Tensor
    num_samples: int
    samples: Tensor
    seeds: Tensor


class Feed:
    """Steps of one split, in order, from any position."""

    def __init__(
        self,
        source: BatchSource,
        order: Order,
        part: Slice,
        task: Task,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        together: int = 1,
        prefetch: int = 0,
        pin_memory: bool = False,
    ) -> None:
        """`source` turns requests into (inputs, targets), in order; floating-point ones become `dtype`, the weights' type.

        `together` steps are built by one call of the data set; `prefetch` steps are built ahead in a thread.
        """
        self.together = together
        self.dtype = dtype
        self.order = order
        self.part = part
        self.task = task
        self.device = device
        self.prefetch = prefetch
        self.pin_memory = pin_memory and device.type == "cuda"
        self._source = source

    def steps(self, positions: Iterator[tuple[int, Position]]) -> Iterator[Step]:
        """The steps (number, position) asked for, on the device, copies begun one step before a step is handed out."""
        host = self._host_steps(positions)
        if self.prefetch:
            host = _ahead(host, self.prefetch)
        return _on_cuda(host, self.device) if self.device.type == "cuda" else host

    @property
    def fingerprint(self) -> str:
        """Of the data, and how much of it there is."""
        return f"{self._source.dataset.fingerprint}-{len(self._source.dataset)}"

    def close(self) -> None:
        """End the processes that build batches, if there are any."""
        self._source.close()

    def _host_steps(self, positions: Iterator[tuple[int, Position]]) -> Iterator[Step]:
        asked: queue.SimpleQueue[list[_Asked]] = queue.SimpleQueue()

        def requests() -> Iterator[Request]:
            while group := [self._ask(*position) for position in islice(positions, self.together)]:
                asked.put(group)
                yield torch.cat([one.samples for one in group]), torch.cat([one.seeds for one in group])

        for inputs, targets in self._source.iterate(requests()):
            group = asked.get()
            inputs, targets = map_tensors(self._ready, inputs), map_tensors(self._ready, targets)
            counts = {term: count.double() for term, count in self.task.counts(targets).items()}
            for place, one in enumerate(group):
                cut = slice(place * len(one.rows), (place + 1) * len(one.rows))
                yield self._step(one, _rows(inputs, cut), _rows(targets, cut), {term: count[cut] for term, count in counts.items()})

    def _ask(self, number: int, position: Position) -> _Asked:
        """What this rank needs for one step. Void rows come last and repeat some sample of the batch."""
        rows = self.part.rows(self.order.global_batch(position))
        num_samples = self.part.num_samples(self.order.num_samples(position))
        samples = rows if num_samples == len(rows) else torch.where(rows == VOID, rows.max().clamp(min=0), rows)
        return _Asked(number, rows, num_samples, samples, self.part.rows(self.order.seeds(position)))

    def _step(self, asked: _Asked, inputs: Any, targets: Any, counts: Mapping[str, Tensor]) -> Step:
        """Count valid targets, then cut the local batch into micro-batches."""
        rows = asked.rows
        real = None if asked.num_samples == len(rows) else rows != VOID
        local_counts = {term: float((count if real is None else count * real).sum()) for term, count in counts.items()}
        size = self.part.micro_batch_size
        if size == self.part.local_batch_size:
            return Step(asked.number, [Batch(inputs, targets, real, rows)], local_counts)
        cuts = [slice(start, start + size) for start in range(0, self.part.local_batch_size, size)]
        micro = [Batch(_rows(inputs, cut), _rows(targets, cut), None if real is None else real[cut], rows[cut]) for cut in cuts]
        return Step(asked.number, micro, local_counts)

    def _ready(self, x: Tensor) -> Tensor:
        """In the weights' type, and page-locked where that serves."""
        if x.is_floating_point() and x.dtype != self.dtype:
            x = x.to(self.dtype)
        return x.pin_memory() if self.pin_memory else x


def train_positions(order: Order, start_step: int, start: Position, num_steps: int, fixed: bool = False) -> Iterator[tuple[int, Position]]:
    """(step number, position) of the steps start_step .. num_steps - 1; `fixed` repeats the first batch of all."""
    position = start
    for number in range(start_step, num_steps):
        yield number, Position() if fixed else position
        last = position.step + 1 == order.steps_per_epoch
        position = Position(position.epoch + 1, 0) if last else Position(position.epoch, position.step + 1)


def split_positions(order: Order) -> Iterator[tuple[int, Position]]:
    """Every batch of a split once, for evaluation."""
    for step in range(order.steps_per_epoch):
        yield step, Position(0, step)


def _rows(tree: Any, cut: slice) -> Any:
    """Some rows of every tensor."""
    return map_tensors(lambda x: x[cut], tree)


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _ahead(steps: Iterator[Step], depth: int) -> Iterator[Step]:
    """Build up to `depth` steps ahead in a thread; its errors are raised here. The thread ends with the consumer."""
    built: queue.Queue[Step | _Failed | None] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(item: Step | _Failed | None) -> bool:
        while not stop.is_set():
            try:
                built.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def build() -> None:
        try:
            for step in steps:
                if not put(step):
                    return
            put(None)
        except BaseException as error:  # handed to the consumer, which raises it
            put(_Failed(error))

    thread = threading.Thread(target=build, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := built.get()) is not None:
            if isinstance(item, _Failed):
                raise item.error
            yield item
    finally:
        stop.set()
        thread.join()


def _on_cuda(steps: Iterator[Step], device: torch.device) -> Iterator[Step]:
    """Copy each step on a stream of its own while the one before is in use."""
    stream = torch.cuda.Stream(device)
    pending: Step | None = None

    def move(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=True)

    for step in steps:
        with torch.cuda.stream(stream):
            for batch in step.micro:
                batch.inputs, batch.targets = map_tensors(move, batch.inputs), map_tensors(move, batch.targets)
                batch.valid = None if batch.valid is None else move(batch.valid)
        if pending is not None:
            yield _claim(pending, stream)
        pending = step
    if pending is not None:
        yield _claim(pending, stream)


def _claim(step: Step, stream: torch.cuda.Stream) -> Step:
    """Order the compute stream after the copies of `step`, and keep its memory until that stream is done with it."""
    compute = torch.cuda.current_stream()
    compute.wait_stream(stream)

    def keep(x: Tensor) -> Tensor:
        x.record_stream(compute)
        return x

    for batch in step.micro:
        map_tensors(keep, (batch.inputs, batch.targets, batch.valid))
    return step
