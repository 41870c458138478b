"""Nine layouts on this machine's real ranks beside what `plan` says: memory, every byte that is said, and the time of a step.

    python experiments/planner/layouts.py            # writes layouts.md beside this file
    python experiments/planner/layouts.py --doctor   # and the time of a step, by what `doctor` measures around each layout

Memory is measured twice: every tensor that an operator makes, and the process's resident pages above what it had before the
model was built, of which the tensors are the most part. Each rank has run a small step before, so that code and pools are there.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from disttrain import build, cli
from disttrain.config.compose import compose, composer, parse
from disttrain.config.schema import Config
from disttrain.data.dataset import Position
from disttrain.launch.environment import detect
from disttrain.launch.local import import_warm
from disttrain.launch.place import Place
from disttrain.launch.world import run_world
from disttrain.parallel.pipeline import Pipeline
from disttrain.plan.constants import Constants
from disttrain.plan.devices import resolve
from disttrain.plan.planned import Plan, make
from disttrain.plan.rehearsal import WARM
from disttrain.plan.settle import settle
from disttrain.plan.tally import Tally, Watch
from disttrain.train.trainer import Trainer

HERE = Path(__file__).resolve().parent
LAYOUTS = {
    "one device": ["strategy=single"],
    "ddp 2": ["strategy=ddp", "launch.world_size=2"],
    "tp 2": ["strategy=tensor_parallel", "launch.world_size=2"],
    "tp 2, sequence parallel": ["strategy=tensor_parallel", "launch.world_size=2", "strategy.sequence_parallel=true"],
    "fsdp 2 (ZeRO-3)": ["strategy=fsdp", "launch.world_size=2"],
    "ZeRO-1 over 2": ["strategy=fsdp", "launch.world_size=2", "strategy.zero=1"],
    "cp 2": ["strategy=context_parallel", "launch.world_size=2"],
    "pp 2": ["strategy=pipeline_parallel", "launch.world_size=2"],
    "pp 2, ddp 2": ["strategy=pipeline_parallel", "launch.world_size=4", "strategy.dp_replicate=2", "strategy.pp=2"],
}
MODEL = ["model.num_layers=6", "model.hidden_size=512", "model.num_heads=8", "model.vocab_size=8192", "model.max_seq_len=256"]
SMALL = ["model.num_layers=2", "model.hidden_size=64", "model.num_heads=8", "model.vocab_size=256", "model.max_seq_len=256"]
SHARED = ["dataset=synthetic", "dataset.kind=tokens", "dataset.context=256", "train.global_batch_size=8", "train.steps=8"]
SHARED += ["callbacks=minimal", "+callbacks.grad_accumulation._target_=disttrain.callbacks.grad_accumulation.GradAccumulation"]
SHARED += ["+callbacks.grad_accumulation.micro_batch_size=2", "launch.device=cpu", "launch.threads=1"]
REPEATS = 5
"""Steps that are timed."""
M_MMAP_THRESHOLD, LARGE = -3, 1 << 16
MIB = 2.0**20


def config_of(model: list[str], layout: list[str], hardware: str) -> Config:
    """The checked config of a layout."""
    vocabulary = next(word.partition("=")[2] for word in model if "vocab_size" in word)
    request = parse([*layout, *model, *SHARED, f"dataset.vocab_size={vocabulary}", f"hardware={hardware}"])
    with composer(request) as app:
        return cli.ready(compose(app, request)[1], detect(), os.getcwd())


def resident(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the most since `forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def forget() -> None:
    """Begin the peak of resident pages anew."""
    Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def built(config: Config, place: Place) -> Iterator[tuple[Trainer, Any]]:
    """A trainer with its optimizer's state, and a step of it."""
    trainer = build.build_trainer(config, None, place)
    trainer.model.train()
    trainer.update.make_state(list(trainer.parameters.values()))
    (step,) = trainer.feed.steps(iter([(0, Position(0, 0))]))
    trainer.strategy.count(step)
    if isinstance(trainer.strategy.runner, Pipeline):
        trainer.strategy.runner.prepare(trainer.strategy.context.cut(step))
    yield trainer, step
    trainer.feed.close()


def take(trainer: Trainer, step: Any) -> None:
    """One step, as the loop takes it."""
    trainer.update(trainer.strategy.finish(trainer.strategy.forward_backward(step), step, following=step))


def held(place: Place, small: Config, config: Config) -> dict[str, Any]:
    """What this rank held and said in a step."""
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, LARGE)  # what is freed goes back to the system at once, which is slow
    with built(small, place) as (trainer, step):
        take(trainer, step)
    del trainer, step
    gc.collect()
    before = resident("VmRSS")
    forget()
    tally = Tally()
    with tally.watching(Watch(tally)), built(config, place) as (trainer, step):
        take(trainer, step)  # the first touches what is only set aside before, as buckets are
        for axis in trainer.mesh.axes():
            axis.traffic.clear()
        tally.forget_peak()
        forget()
        take(trainer, step)
        pages, peak = resident("VmHWM") - before, sum(tally.peak.values())
        said = {axis.name: {kind: list(entry) for kind, entry in axis.traffic.items()} for axis in trainer.mesh.axes() if axis.traffic}
    return {"pages": pages, "tensors": peak, "said": said}


def timed(place: Place, config: Config) -> float:
    """Seconds of a step, the median of some after the first."""
    seconds = []
    with built(config, place) as (trainer, step):
        for _ in range(1 + REPEATS):
            started = time.perf_counter()
            take(trainer, step)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def planned_by_doctor(name: str) -> float:
    """Seconds of a step by what `doctor` finds here now: it writes the preset `here` into this folder."""
    subprocess.run([sys.executable, "-m", "disttrain", "doctor"], check=True, stdout=subprocess.DEVNULL)
    found = plan_of(config_of(MODEL, LAYOUTS[name], "here")).seconds
    assert found is not None
    return found.step


def plan_of(config: Config) -> Plan:
    """By the closed form."""
    settled = settle(config)
    assert not settled.notes, settled.notes
    return make(settled.case, resolve(config.hardware, settled.case.layout.world), Constants())


def time_of_step(name: str) -> str:
    """Planned and measured. This machine's speed changes by the minute, so doctor looks at it before and after."""
    planned = [planned_by_doctor(name)]
    config = config_of(MODEL, LAYOUTS[name], "here")
    measured = max(run_world(timed, int(config.launch.world_size), (config,), timeout_seconds=600, warm=WARM))
    planned.append(planned_by_doctor(name))
    mean = statistics.fmean(planned)
    return f"{mean:.2f} ({planned[0]:.2f}, {planned[1]:.2f}), {measured:.2f} ({100 * (mean / measured - 1):+.0f}%)"


def row(name: str, with_time: bool) -> str:
    """A line of the table: the fullest rank of a layout."""
    small, config = config_of(SMALL, LAYOUTS[name], "cpu"), config_of(MODEL, LAYOUTS[name], "cpu")
    plan, world = plan_of(config), int(config.launch.world_size)
    cells = [time_of_step(name)] if with_time else []
    ranks = run_world(held, world, (small, config), timeout_seconds=600, warm=WARM)
    same, all_of = equal(plan, ranks)
    fullest = max(ranks, key=lambda rank: rank["tensors"])
    cells.insert(0, f"{same} of {all_of}")
    for what in ("pages", "tensors"):
        cells.insert(0, f"{fullest[what] / MIB:.1f} ({100 * (plan.peak_bytes / fullest[what] - 1):+.1f}%)")
    return f"| {name} | {world} | {plan.peak_bytes / MIB:.1f} | {' | '.join(cells)} |"


def equal(plan: Plan, ranks: list[dict[str, Any]]) -> tuple[int, int]:
    """(entries of all ranks' ledgers that the formula has, calls and bytes; all entries on either side)."""
    same = all_of = 0
    for number, rank in enumerate(ranks):
        stage = number // (len(ranks) // plan.case.layout.pp)
        said = {(axis, kind): entry for axis, kinds in plan.traffic[stage].items() for kind, entry in kinds.items()}
        seen = {(axis, kind): tuple(entry) for axis, kinds in rank["said"].items() for kind, entry in kinds.items()}
        all_of += len(said.keys() | seen.keys())
        same += sum(seen.get(key) == tuple(map(round, entry)) for key, entry in said.items())
    return same, all_of


def main() -> None:
    """Run all, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doctor", action="store_true", help="measure, and set the time of a step beside its plan")
    asked = parser.parse_args()
    import_warm(WARM)  # ranks are forked
    lines = [
        "# Nine layouts of a GPT-2 of 23 M parameters on this machine, planned and run",
        "",
        f"`python experiments/planner/layouts.py` makes this page (torch {torch.__version__}, float32, four micro-batches or fewer).",
        "MiB of the fullest rank at its fullest: by the formula; of all tensors that operators made; of resident pages above what",
        "the process had before. In brackets how far the formula is off. The ledger: entries (axis, collective) whose calls and bytes are",
        "the formula's, over all ranks. The time of a step: planned, the mean of what `doctor` led to just before and",
        "just after; measured, the median of five.",
        "",
        "| layout | ranks | formula | tensors | pages | ledger |" + (" step: planned, measured, s |" if asked.doctor else ""),
        "|---|---|---|---|---|---|" + ("---|" if asked.doctor else ""),
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # where `doctor` puts its preset
        for name in LAYOUTS:
            lines.append(row(name, asked.doctor))
            print(lines[-1], flush=True)
    (HERE / "layouts.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
