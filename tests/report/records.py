"""Run folders as a sweep of twelve leaves them, without the training: what is in them is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

from disttrain.config.frozen import freeze
from disttrain.record import RunFolder
from disttrain.texts import write_json
from tests import tiny

STRATEGIES = {"ddp": {"dp": 2}, "fsdp": {"shard": 2}, "tensor_parallel": {"tp": 2}, "pipeline_parallel": {"pp": 2, "micro_batch_size": 2}}
RATES = (1e-3, 3e-3, 1e-2)
FAILED, REFUSED = 8, 11
EVIL = "</script><script>document.title='broken'</script>"
"""What a run may have printed."""


def sweep(folder: Path, steps: int = 60) -> Path:
    """Twelve jobs, four strategies by three rates: one failed on rank 1, one was refused before it began."""
    jobs = []
    for number, (strategy, lr) in enumerate((strategy, lr) for strategy in STRATEGIES for lr in RATES):
        words = ["model=tiny_gpt", f"strategy={strategy}", f"optimizer.lr={lr}"]
        code = {FAILED: 1, REFUSED: 2}.get(number, 0)
        jobs.append({"job": str(number), "overrides": words, "exit_code": code, "reason": "no good" if code else ""})
        if number == REFUSED:
            _refused(folder / str(number))
        else:
            job(folder / str(number), strategy, lr, words, steps, fails=number == FAILED)
    write_json(folder / "sweep.json", jobs)
    return folder


def job(path: Path, strategy: str, lr: float, words: list[str], steps: int = 60, fails: bool = False) -> Path:
    """One run on two ranks."""
    config = tiny.config(**STRATEGIES[strategy], optimizer=tiny.ADAMW | {"lr": lr}, strategy={"name": strategy})
    config.predicted = {"perf/step_seconds": 0.02, "comm/grad/all_reduce_bytes": 4096.0}
    folder = RunFolder.make(path.parent, path)
    folder.store_config(freeze(config), words)
    folder.store_environment({"python": "3.12.1", "host": "here", "git": {"commit": "abc", "diff": EVIL}})
    last = steps // 2 if fails else steps
    for step in range(1, last + 1):
        seconds = 0.02 + 0.001 * (step % 5)
        row = {"train/loss": 6.0 * math.exp(-40 * lr * step / steps), "train/targets": 128.0, "train/lr": lr, "memory/peak_bytes": 4e8}
        row |= {"perf/step_seconds": seconds, "perf/tokens_per_second": 128 / seconds, "perf/elapsed_seconds": 0.03 * step}
        row |= {"comm/grad/all_reduce_bytes": 4096.0, "memory/peak_bytes_max": 4.1e8, "perf/step_seconds_min": seconds}
        folder.append({"step": step, **row} | ({"val/loss": row["train/loss"] + 0.1} if step % 20 == 0 else {}))
    folder.close()
    for rank in range(2):
        folder.store_of_rank(rank, rank_record(rank, strategy == "pipeline_parallel", last))
    metrics = {key: number for row in folder.read() for key, number in row.items() if key != "step"}
    if fails:
        failure = {"rank": 1, "kind": "RuntimeError", "message": f"a link is gone {EVIL}"}
        folder.write_result(status="failed", reason=failure["message"], exit_code=1, failures=[failure], num_restarts=0)
        folder.log_file(1).parent.mkdir()
        folder.log_file(1).write_text(f"Traceback\nRuntimeError: a link is gone {EVIL}\n")
    else:
        measured = {"perf/step_seconds": metrics["perf/step_seconds"], "comm/grad/all_reduce_bytes": 4096.0}
        folder.write_result(
            status="done", reason="", exit_code=0, step=last, metrics=metrics, measured=measured, predicted=config.predicted
        )
        folder.write_result(started="2026-11-30T12:00:00+00:00", ended="2026-11-30T12:01:10+00:00")
    return path


def rank_record(rank: int, is_pipeline: bool, steps: int) -> dict[str, object]:
    """Step times around 20 ms; a pipeline's step of two micro-batches, in which rank 1 waits for rank 0's forward."""
    spans = [["F", 0, 0, 0.0, 0.01], ["B", 0, 0, 0.01, 0.03], ["reduce", -1, -1, 0.03, 0.031], ["update", -1, -1, 0.031, 0.032]]
    if is_pipeline:
        both = ([(0.0, 0.01), (0.04, 0.06), (0.01, 0.02), (0.06, 0.08)], [(0.01, 0.02), (0.02, 0.04), (0.04, 0.05), (0.05, 0.07)])[rank]
        spans = [[kind, rank, micro, *at] for (kind, micro), at in zip((("F", 0), ("B", 0), ("F", 1), ("B", 1)), both, strict=True)]
    return {
        "rank": rank,
        "at": {"pp": rank} if is_pipeline else {"dp_replicate": rank},
        "step_seconds": {"ratio": 1.02, "first": 0.5, "counts": {"-198": steps // 2, "-190": steps // 2 - 2, "-150": 1}},
        "timeline": {"step": 3, "origin": 1.0e9, "spans": spans},
    }


def _refused(path: Path) -> None:
    """A job that the check refused: no config, a result and the message."""
    (path / "logs").mkdir(parents=True)
    reason = "strategy.tp=3 does not divide model.num_heads=4\n  try: strategy.tp=2"
    (path / "logs" / "rank-0.log").write_text(reason)
    (path / "result.json").write_text(json.dumps({"status": "user_error", "exit_code": 2, "reason": reason}))
