"""A job from checked config to exit code, as the one process lives it that composed the config.

Alone on a machine it makes the run folder, prepares the data, lets the supervisor run the ranks and writes down
how they ended. Under torchrun and Slurm it is rank 0 and shares config and folder with the others (`join`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from disttrain.config.frozen import freeze
from disttrain.config.schema import Config
from disttrain.launch.describe import describe
from disttrain.launch.environment import Environment, detect, environ, rank_environment, threads_per_rank
from disttrain.launch.local import Supervisor, choose_start_method, import_warm, say
from disttrain.launch.outcome import FAILED, INTERRUPTED, PREEMPTED, USER_ERROR, Outcome
from disttrain.launch.rank import describe as describe_error
from disttrain.launch.rank import load_function
from disttrain.record import RunFolder


@dataclass(frozen=True)
class Job:
    """What is to be run, and where it is recorded. Without any of the three folders it leaves no record."""

    config: Config
    entry: str
    """'module:function' that every rank runs: (config, run folder or None, place) -> JSON values. Its module is
    imported once, before ranks are forked."""
    overrides: Sequence[str] = ()
    """What was typed, for the record."""
    prepare: str | None = None
    """'module:function' that fetches data: (config) -> None, called once a node before its ranks start."""
    outputs: Path | None = None
    """Where a run folder is made."""
    sweep_job: Path | None = None
    """The folder of this job inside a sweep's, to be made."""
    resume: Path | None = None
    """The run folder to go on in."""


def run(job: Job, environment: Environment | None = None) -> Outcome:
    """Run the job, record it, and show once what went wrong, if something did. What goes wrong is not raised."""
    folder: RunFolder | None = None
    try:
        environment = environment or detect()
        environment.check_world(int(job.config.launch.world_size))
        if environment.is_alone:
            folder = open_folder(job)
            outcome = _launch(job, folder)
        else:
            from disttrain.launch.join import lead

            return lead(job, environment)
    except KeyboardInterrupt:
        outcome = Outcome(INTERRUPTED, "interrupted before the ranks started")
    except Exception as error:
        outcome = failed_before(error, folder)
    if folder is not None:
        outcome = close_folder(folder, outcome)
    if outcome.failure is not None or outcome.reason:
        say(str(outcome.failure or outcome.reason))
    if outcome.exit_code in (INTERRUPTED, PREEMPTED) and folder is not None and any(folder.checkpoints.glob("step-*")):
        say(f"it goes on with: python -m disttrain resume={os.path.relpath(folder.path)}")
    return outcome


def _launch(job: Job, folder: RunFolder | None) -> Outcome:
    """Everything between an open run folder and the end of the ranks, on this machine."""
    launch = job.config.launch
    world_size = int(launch.world_size)
    method = choose_start_method(launch.start_method)
    threads = threads_per_rank(launch.threads, world_size, launch.env)
    if folder is not None:
        store_environment(job, folder, start_method=method, threads=threads, launcher="alone")
    with environ(rank_environment(launch.env, threads, launch.interface)):
        if method == "fork":
            import_warm()
            load_function(job.entry)
        if job.prepare is not None:
            load_function(job.prepare)(job.config)
        from disttrain.launch.worker import run_job

        supervisor = Supervisor(
            world_size,
            method,
            threads,
            launch.max_restarts,
            launch.grace_seconds,
            log_file=folder.log_file if folder is not None else None,
        )
        path = folder.path if folder is not None else None
        return supervisor.run(partial(run_job, text=freeze(job.config), folder=path, entry=job.entry))


# --- the record -------------------------------------------------------------------------------------------------


def open_folder(job: Job) -> RunFolder | None:
    """Make the job's run folder, or open the one to go on in, and write down what is about to run."""
    if job.resume is not None:
        folder = RunFolder(job.resume)
    elif job.sweep_job is not None or job.outputs is not None:
        folder = RunFolder.make(job.outputs or Path(), job.sweep_job)
    else:
        return None
    folder.lock()
    changed = folder.store_config(freeze(job.config), job.overrides)
    for key, (before, now) in changed.items():
        if key != "resume":
            say(f"changed since the run began: {key} was {before}, is {now}")
    folder.subfolder("logs")
    folder.write_result(status="running", reason="", exit_code=None, started=_now())
    return folder


def store_environment(job: Job, folder: RunFolder, **launched: Any) -> None:
    """Write environment.json."""
    launch = job.config.launch
    folder.store_environment(describe(world_size=launch.world_size, device=launch.device, backend=launch.backend, **launched))


def close_folder(folder: RunFolder, outcome: Outcome) -> Outcome:
    """Write down how the job ended and let others into the folder. Returns the outcome with the folder in it."""
    said = outcome.result if isinstance(outcome.result, Mapping) else {}
    reason = outcome.reason or said.get("reason", "")
    fields = {**said, "status": outcome.status, "reason": reason, "exit_code": outcome.exit_code, "num_restarts": outcome.num_restarts}
    if outcome.exit_code != USER_ERROR or not folder.take_back():
        folder.write_result(**fields, ended=_now())
    if outcome.failure is not None and outcome.failure.rank is None:
        with folder.log_file(0).open("a", encoding="utf-8") as log:  # no rank was there to write it
            log.write(f"{outcome.failure}\n")
    folder.unlock()
    return replace(outcome, folder=folder.path)


def failed_before(error: Exception, folder: RunFolder | None) -> Outcome:
    """The outcome of a job that failed before its ranks started."""
    failure = describe_error(error, None, folder.log_file(0) if folder is not None else None)
    code = USER_ERROR if failure.is_users else FAILED
    return Outcome(code, f"{failure.kind}: {failure.message}", failure)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
