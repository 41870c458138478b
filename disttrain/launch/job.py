"""A job from checked config to exit code, as the one process lives it that composed the config.

Alone on a machine it makes the run folder, prepares the data, lets the supervisor run the ranks and writes down
how they ended. Under torchrun and Slurm it is rank 0 and shares config and folder with the others (`join`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from disttrain.checkpoint.files import steps_in
from disttrain.config.callbacks import key_of
from disttrain.config.frozen import freeze
from disttrain.config.local_sgd import CHECKPOINT
from disttrain.config.overrides import for_shell
from disttrain.config.schema import Config
from disttrain.config.world import heavy_modules
from disttrain.launch.describe import describe
from disttrain.launch.environment import Environment, detect, environ, rank_environment, threads_per_rank
from disttrain.launch.local import Supervisor, choose_start_method, import_warm, say
from disttrain.launch.outcome import DONE, FAILED, INTERRUPTED, PREEMPTED, USER_ERROR, Outcome
from disttrain.launch.rank import describe as describe_error
from disttrain.launch.rank import load_function
from disttrain.launch.signals import StopAsked, stop_raises, stops_ignored
from disttrain.places import shown
from disttrain.record import RunFolder
from disttrain.secrecy import redacted


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
            with stop_raises():  # until the supervisor listens itself
                folder = open_folder(job)
                outcome = _launch(job, folder)
        else:
            from disttrain.launch.join import lead

            return lead(job, environment)
    except KeyboardInterrupt as asked:
        code = asked.exit_code if isinstance(asked, StopAsked) else INTERRUPTED
        outcome = Outcome(code, f"{asked or 'interrupted'}: before the ranks started")
    except Exception as error:
        outcome = failed_before(error, folder)
    if folder is not None:
        with stops_ignored():  # the end is near enough
            outcome = close_folder(folder, outcome)
    if outcome.failure is not None or outcome.reason:
        say(outcome.failure or outcome.reason)
    if folder is not None and _can_go_on(outcome, folder):
        say(f"it goes on with: python -m disttrain {for_shell('resume', shown(folder.path))}")
    elif folder is not None and outcome.exit_code in (INTERRUPTED, PREEMPTED) and key_of(job.config, CHECKPOINT) is None:
        say("its state was not saved: callbacks has no checkpoint, which saves at a stop")
    return outcome


def _can_go_on(outcome: Outcome, folder: RunFolder) -> bool:
    """Whether a resume as it is may come further: neither done nor refused, no end that it would come to again, and a checkpoint."""
    if outcome.exit_code in (DONE, USER_ERROR) or (outcome.failure is not None and outcome.failure.is_final):
        return False
    try:
        return bool(steps_in(folder.checkpoints))
    except Exception:  # a store that can't be asked may be what ended the run
        return False


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
            import_warm(heavy_modules(job.config.strategy))
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
        if key != "resume" and not key.startswith("predicted"):
            say(f"changed since the run began: {key} was {before}, is {now}")
    folder.subfolder("logs")
    before = folder.result().get("status")
    folder.write_result(status="running", status_before=before, put_aside=False, reason="", exit_code=None, started=_now())
    return folder


def store_environment(job: Job, folder: RunFolder, **launched: Any) -> None:
    """Write environment.json."""
    launch = job.config.launch
    asked = {"interface": launch.interface, "env": {name: str(value) for name, value in launch.env.items()}}
    folder.store_environment(describe(world_size=launch.world_size, device=launch.device, backend=launch.backend, **asked, **launched))


def close_folder(folder: RunFolder, outcome: Outcome) -> Outcome:
    """Write down how the job ended and let others into the folder. Returns the outcome with the folder in it.

    A record that can't be written fails a job that had ended well; what had ended another is told all the same.
    """
    try:
        _write_end(folder, outcome)
    except OSError as error:
        trouble = f"the record in {shown(folder.path)} can't be closed: {error}"
        if outcome.exit_code == DONE:
            outcome = replace(outcome, exit_code=FAILED, reason=trouble)
        else:
            say(trouble)
    folder.unlock()
    return replace(outcome, folder=folder.path)


def _write_end(folder: RunFolder, outcome: Outcome) -> None:
    said = outcome.result if isinstance(outcome.result, Mapping) else {}
    reason = outcome.reason or said.get("reason", "")
    fields = {**said, "status": outcome.status, "reason": reason, "exit_code": outcome.exit_code, "num_restarts": outcome.num_restarts}
    fields["failures"] = [{"rank": one.rank, "kind": one.kind, "message": one.message} for one in outcome.failures]
    is_idle = fields.pop("idle", False)
    if not (is_idle or outcome.exit_code == USER_ERROR) or not folder.take_back():
        folder.write_result(**fields, ended=_now())
    if outcome.failure is not None and outcome.failure.rank is None:
        with folder.log_file(0).open("a", encoding="utf-8") as log:  # no rank was there to write it
            log.write(f"{redacted(str(outcome.failure))}\n")


def failed_before(error: Exception, folder: RunFolder | None) -> Outcome:
    """The outcome of a job that failed before its ranks started."""
    failure = describe_error(error, None, folder.log_file(0) if folder is not None else None)
    code = USER_ERROR if failure.is_users else FAILED
    return Outcome(code, f"{failure.kind}: {failure.message}", failure)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
