"""A world that torchrun or Slurm launched: rank 0 tells the others what to run, and each lives its own life.

Rank 0 composes the config and makes the run folder; the others enter no Hydra and get text and path. The launcher
is in charge: it starts, restarts and ends ranks, and no environment variable of its own is changed here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from disttrain.config.frozen import freeze, thaw
from disttrain.config.schema import Config
from disttrain.errors import UserError
from disttrain.launch.environment import Environment, detect, environ, flight_recorder, threads_per_rank
from disttrain.launch.job import Job, close_folder, failed_before, open_folder, store_environment
from disttrain.launch.local import say
from disttrain.launch.meeting import FOLLOW_SECONDS, Meeting
from disttrain.launch.network import interface_towards, loopback
from disttrain.launch.outcome import DONE, FAILED, INTERRUPTED, PREEMPTED, USER_ERROR, Outcome
from disttrain.launch.place import Place
from disttrain.launch.rank import describe as describe_error
from disttrain.launch.rank import log_to, note
from disttrain.launch.signals import STOP_SIGNALS, StopSignals, exit_code_of
from disttrain.record import RunFolder

ARRIVE_SECONDS = 60.0
"""For all ranks of a world that can't train to come, before the launcher is to look who is left."""


def lead(job: Job, environment: Environment) -> Outcome:
    """Rank 0's life: meet the others, make the record, share both, run, write down how it ended."""
    meeting: Meeting | None = None
    folder: RunFolder | None = None
    word: dict[str, Any] | None = None
    try:
        meeting = Meeting(environment, job.config.launch.timeout_seconds)
        meeting.wait_for_all(job.config.launch.timeout_seconds)
        folder = open_folder(job if meeting.folder is None else replace(job, resume=meeting.folder))
        if folder is not None:
            meeting.folder = folder.path
            store_environment(job, folder, launcher=environment.launcher, threads=_threads(job.config, environment))
        word = {"text": freeze(job.config), "entry": job.entry, "prepare": job.prepare, "folder": folder and str(folder.path)}
        meeting.say(word)
    except Exception as error:
        outcome = failed_before(error, folder)
        say(outcome.failure or outcome.reason)
    else:
        outcome = _live(meeting, word)
    if folder is not None:
        outcome = close_folder(folder, outcome)
    if meeting is not None:
        if word is None:  # last of all: the launcher ends this rank once another has left
            meeting.say_last({"error": outcome.reason, "exit_code": outcome.exit_code})
        else:
            meeting.close()
    return outcome


def follow(environment: Environment | None = None) -> Outcome:
    """The life of every other rank: hear from rank 0 what to run, and run it. Rank 0 shows mistakes in the config."""
    try:
        meeting = Meeting(environment or detect(), FOLLOW_SECONDS)
        word = meeting.hear()
    except UserError as error:
        say(str(error))
        return Outcome(USER_ERROR, str(error))
    if "error" in word:
        return Outcome(word["exit_code"], word["error"])
    if "wait" in word:
        return _idle(meeting)
    return _live(meeting, word)


def share_error(environment: Environment, error: UserError) -> None:
    """Rank 0 could not compose: show why, then let the others leave as it does; the launcher ends it once one has."""
    say(str(error))
    with contextlib.suppress(UserError):
        Meeting(environment, FOLLOW_SECONDS).say_last({"error": str(error), "exit_code": USER_ERROR})


def wait_for_another_world(environment: Environment, why: str) -> Outcome:
    """Rank 0 of a world that can't train, while another may come: all ranks stay until the launcher ends them, and show nothing more."""
    try:
        meeting = Meeting(environment, FOLLOW_SECONDS)
        meeting.wait_for_all(ARRIVE_SECONDS)
        meeting.say({"wait": why})
    except UserError as error:
        say(str(error))
        return Outcome(FAILED, str(error))
    say(why)
    return _idle(meeting)


def _idle(meeting: Meeting) -> Outcome:
    """The end of a wait that the launcher did not end: a rank has gone, and leaving makes the launcher look who is left."""
    try:
        meeting.idle()
    except Exception as error:
        return Outcome(FAILED, str(error))


def _live(meeting: Meeting, word: Mapping[str, Any]) -> Outcome:
    """A rank's part of the job, on whatever rank."""
    from disttrain.launch.worker import rank_device, run_job

    config = thaw(word["text"])
    folder = Path(word["folder"]) if word["folder"] is not None else None
    with ExitStack() as stack:
        log_file = _open_log(folder, meeting.environment, stack)
        signals = stack.enter_context(_stop_requests(config.launch.grace_seconds))
        stack.enter_context(environ(_asked_environment(config, meeting.environment)))
        place = _place(meeting, log_file, signals)
        try:
            _set_threads(config, meeting.environment)
            meeting.preflight(config.launch.timeout_seconds, rank_device(config.launch.device, place.local_rank).type)
            meeting.prepare_once(word["prepare"], config)
            result = run_job(place, word["text"], folder, word["entry"])
        except Exception as error:
            return _failed(error, meeting, place, signals)
        asked = signals.name or _stopped_by(result)
        return Outcome(DONE, results=[result]) if asked is None else Outcome(exit_code_of(asked), f"stopped by {asked}", results=[result])


def _stopped_by(result: Any) -> str | None:
    """The signal that all ranks have stopped for, though only one of them may have got it: a machine that is drained, not all."""
    reason = result.get("reason") if isinstance(result, Mapping) else None
    return reason if reason in {number.name for number in STOP_SIGNALS} else None


def _failed(error: Exception, meeting: Meeting, place: Place, signals: StopSignals) -> Outcome:
    """Tell cause from consequence: the first rank that failed shows it, the others follow it out."""
    failure = describe_error(error, place.rank, place.log_file)
    note(failure)
    _tell_torchrun(error)
    if signals.name is not None and meeting.first_failure() is None:
        return Outcome(signals.exit_code, f"{signals.name}: left without saving, since a rank had gone ({failure.kind})")
    code = USER_ERROR if failure.is_users else FAILED
    is_first = meeting.claim(failure)
    if is_first is None:
        failure = replace(failure, message=f"{meeting.lost()}: {failure.message.splitlines()[0]}")
    elif is_first:
        failure = failure.waiting_for(meeting.absent(), meeting.hosts)
    else:
        return Outcome(code, meeting.first_failure() or f"{failure.kind}: {failure.message}")
    say(failure)
    return Outcome(code, f"rank {failure.rank}: {failure.kind}: {failure.message}", failure)


def _tell_torchrun(error: Exception) -> None:
    """Let torchrun's own summary name the exception too."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _place(meeting: Meeting, log_file: Path | None, signals: StopSignals) -> Place:
    world = meeting.environment
    return Place(
        rank=world.rank,
        world_size=world.world_size,
        local_rank=world.local_rank,
        local_world_size=world.local_world_size,
        launcher=world.launcher,
        make_store=meeting.group_store if world.world_size > 1 else None,
        stop_requested=lambda: signals.name,
        log_file=log_file,
        attempt=meeting.attempt,
    )


def _open_log(folder: Path | None, world: Environment, stack: ExitStack) -> Path | None:
    """Let this rank log into the run folder; a host that does not see the lead's makes one of that name for its logs."""
    if folder is None:
        return None
    path = RunFolder(folder).log_file(world.rank)
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        say(f"rank {world.rank}: this host does not see rank 0's run folder; logs of its ranks are in {path.parent}")
    log_to(stack.enter_context(path.open("a", encoding="utf-8", buffering=1)), show=world.rank == 0)
    return path


def _asked_environment(config: Config, world: Environment) -> dict[str, str]:
    """What the config asks for by name, NCCL's flight recorder, and gloo's interface; the rest of the environment is the launcher's.

    On one machine that is loopback, over several the one that leads to where they meet. A user's own choice stays.
    """
    values = flight_recorder() | {name: str(value) for name, value in config.launch.env.items()}
    if config.launch.interface != "auto":
        return values | {"GLOO_SOCKET_IFNAME": config.launch.interface, "NCCL_SOCKET_IFNAME": config.launch.interface}
    if "GLOO_SOCKET_IFNAME" not in os.environ | values:
        found = interface_towards(world.address) if world.on_several_machines else loopback()
        values |= {"GLOO_SOCKET_IFNAME": found} if found is not None else {}
    return values


def _threads(config: Config, world: Environment) -> int:
    return threads_per_rank(config.launch.threads, world.local_world_size, config.launch.env)


def _set_threads(config: Config, world: Environment) -> None:
    import torch

    torch.set_num_threads(_threads(config, world))


@contextmanager
def _stop_requests(grace_seconds: float) -> Iterator[StopSignals]:
    """A signal asks for a stop at the end of the step, and leaves so much time for it.

    torchrun sends SIGTERM also when another rank has died, and then no step may ever end. Python's handlers don't
    run while this rank waits in a collective, so a thread is woken by the signal itself and ends the process.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    left = threading.Event()

    def leave_in_time() -> None:
        while (number := os.read(reading, 1)[0]) not in STOP_SIGNALS:
            if number == 0:
                return
        if not left.wait(grace_seconds):
            os._exit(INTERRUPTED if number == signal.SIGINT else PREEMPTED)

    watcher = threading.Thread(target=leave_in_time, daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        with StopSignals(lambda number: None) as signals:
            yield signals
    finally:
        signal.set_wakeup_fd(before)
        left.set()
        os.write(writing, b"\0")
        watcher.join()
        os.close(reading)
        os.close(writing)
