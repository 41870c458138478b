"""The dry run: one rank of any world really builds the model, lays it out and takes a step, on tensors without memory.

Torch's fake process group stands in for the other ranks and fake tensors for the values. Shapes, types and the order of
everything are those of a real run, because what runs is the program's own code; only numbers are missing, and nobody reads them.
Counted are every collective, by the ledger of `parallel.collectives`, and every allocation, by `Tally`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain import build
from disttrain.config.check import micro_batch_of
from disttrain.config.schema import Config
from disttrain.models.task import task_of
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.pipeline import Entering, Pipeline
from disttrain.parallel.shard import device_mesh
from disttrain.parallel.step import Batch, Step
from disttrain.parallel.strategy import Strategy
from disttrain.parallel.update import LossScale, Update
from disttrain.plan.tally import Fakes, Tally
from disttrain.train.assembly import local_part, make_strategy, make_update
from disttrain.train.hooks import StepPolicy, declared

CPU = torch.device("cpu")


@dataclass
class Counts:
    """What one rank held, and said, in one step."""

    rank: int
    micro_batches: int
    parameters: int
    """Elements of the rank's own."""
    traffic: dict[str, dict[str, list[float]]]
    """{axis: {collective: [calls, bytes of the whole tensors]}}, as the ledger has it."""
    peak: dict[str, int]
    """Bytes by kind when there was most in all (`tally.KINDS`)."""
    rest: dict[str, int]
    """Bytes by kind between steps."""
    allocations: int


class OneRank(Mesh):
    """The mesh of one rank, without the groups that it is not in: of a large world they are many, and nobody asks for them."""

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        return super()._group(ranks) if self.rank in ranks else None


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Inside, this process is one rank of a world that isn't there: its collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if size == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(config: Config, rank: int, num_micro: int, entering: Entering | None = None) -> Counts:
    """Take one step of `num_micro` micro-batches as `rank`, after the optimizer's state was made.

    `entering`: what a pipeline's stage before this rank's hands on (`leaving`); rank 0 needs none.
    """
    tally = Tally()
    with _laid_out(config, rank, tally) as strategy:
        part = local_part(strategy.mesh.axis("data"), config.train.global_batch_size, micro_batch_of(config))
        schedule, steps = build.build_schedule(config), 1  # the last step of local SGD is a sync
        update = make_update(strategy, *build.optimizer_of(config), schedule, steps, config.train.clip_norm, part)
        with tally.making("optimizer"):
            update.make_state(list(strategy.parameters.values()))
        return _step(strategy, update, tally, _made_up(strategy, config, num_micro), entering)


def leaving(config: Config) -> Entering:
    """What the first stage of a pipeline hands to the second. All borders of a model of equal blocks are alike."""
    with _laid_out(config, 0, Tally()) as strategy:
        assert isinstance(strategy.runner, Pipeline), "there is one stage"
        step = strategy.context.cut(_made_up(strategy, config, 1))
        stage = strategy.runner.own[0]
        with torch.no_grad():
            found = stage(step.micro[0].inputs)
        return tuple(found.shape), found.dtype


@contextmanager
def _laid_out(config: Config, rank: int, tally: Tally) -> Iterator[Strategy]:
    """The config's model laid out for `rank` of its world; inside, tensors have no values and are counted."""
    policies = {key: made for key, made in build.build_callbacks(config).items() if isinstance(made, StepPolicy)}
    fixed = declared(policies)
    model = build.build_model(config)
    with fake_world(rank, int(config.launch.world_size)), ExitStack() as stack:
        mesh = OneRank(build.degrees_of(config), rank)
        if config.strategy.dp_shard > 1 and config.strategy.zero:
            device_mesh(mesh, CPU.type)  # its ranks are numbers that are read
        stack.enter_context(tally.watching(Fakes(tally)))
        strategy = make_strategy(mesh, build.options_of(config), CPU, config.seed)
        scale = None if fixed.loss_scale is None else LossScale(fixed.loss_scale, strategy.update_device)
        strategy.prepare(model, task_of(model), build.DTYPES[config.train.dtype], scale, draws=False)
        tally.rename(strategy.parameters.values(), "weights")
        strategy.module.contexts = [policy.forward_context for policy in policies.values()]
        yield strategy


def _made_up(strategy: Strategy, config: Config, num_micro: int) -> Step:
    """A step of tokens, all of them valid."""
    size = _micro_batch(config)
    length = int(config.dataset.get("context") or config.model["max_seq_len"])

    def tokens() -> Tensor:
        return torch.zeros(size, length, dtype=torch.int64)

    micro = [Batch(tokens(), tokens(), None, torch.arange(size)) for _ in range(num_micro)]
    counts = {term: float(size * length * num_micro) for term in strategy.task.counts(micro[0].targets)}
    return Step(0, micro, counts)


def _micro_batch(config: Config) -> int:
    """Samples of a micro-batch on one data rank."""
    local = config.train.global_batch_size // (config.strategy.dp_replicate * config.strategy.dp_shard)
    return min(micro_batch_of(config) or local, local)


def _step(strategy: Strategy, update: Update, tally: Tally, step: Step, entering: Entering | None) -> Counts:
    """One step as the loop takes it; what comes before the first one only is left out of what is counted."""
    strategy.count(step)
    strategy.model.train()
    if isinstance(strategy.runner, Pipeline):
        strategy.runner.prepare(strategy.context.cut(step), entering)
    tally.follow(strategy.model)
    tally.forget_peak()
    axes = strategy.mesh.axes()
    for axis in axes:
        axis.traffic.clear()
    report = strategy.finish(strategy.forward_backward(step), step, following=step)
    tally.rename((p.grad for p in strategy.parameters.values() if p.grad is not None), "gradients")
    with tally.answering():  # an optimizer that runs on the host reads its rate
        update(report)
    return Counts(
        strategy.mesh.rank,
        len(step.micro),
        sum(parameter.numel() for parameter in strategy.parameters.values()),
        {axis.name: {kind: _share(entry, axis.name, strategy) for kind, entry in axis.traffic.items()} for axis in axes if axis.traffic},
        dict(tally.peak),
        dict(tally.alive),
        tally.num_allocations,
    )


def _share(entry: list[int], axis: str, strategy: Strategy) -> list[float]:
    """A step's share of what replicas that train by themselves say at the one in `sync_every` that was taken."""
    steps = strategy.options.sync_every if strategy.apart.size > 1 and axis == strategy.apart.name else 1
    return [number / steps for number in entry]
