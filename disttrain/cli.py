"""The command line: a verb, then plain Hydra. Every mistake ends in one message on stderr and exit code 2.

One process composes, checks and freezes the config and starts the ranks. Under torchrun and srun that is rank 0;
the others never enter Hydra. No torch is imported here before a run really starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain.config.typed import nearest
from disttrain.errors import ConfigError, UserError
from disttrain.launch.outcome import INTERRUPTED, UNREAD, USER_ERROR, WorldError
from disttrain.launch.signals import StopAsked, stop_raises
from disttrain.launch.streams import settle_streams
from disttrain.places import current_folder, not_made
from disttrain.reading.verb import main as read_run
from disttrain.reading.verb import names_folder
from disttrain.secrecy import not_for_all_to_write

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

    from disttrain.config.compose import Request
    from disttrain.config.schema import Config
    from disttrain.launch.environment import Environment
    from disttrain.launch.outcome import Outcome

COMPOSING = ("train", "verify", "plan", "doctor")
READING = ("generate", "evaluate")
"""Verbs that take a finished run's folder."""
REPORT = "report"
"""The verb that takes folders of runs and sweeps, as many as there are."""
ENTRY = "disttrain.build:train"
SHOWING = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
"""Flags that print instead of run: rank 0 does, the others have nothing to do."""
PREPARE = "disttrain.build:prepare"


@dataclass(frozen=True)
class Result:
    """How a run that Python started has ended."""

    status: str
    """`done`, `failed`, `interrupted` or `preempted`."""
    exit_code: int
    reason: str
    folder: Path | None
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of each metric."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code and raises nothing that a user can cause."""
    try:
        here = current_folder()
        if argv is None:
            settle_streams()
            argv = sys.argv[1:]
            if not {"", here} & set(sys.path):
                sys.path.insert(0, here)  # an installed script looks beside itself only; own classes lie here
        with not_for_all_to_write():
            return _main(list(argv))
    except UserError as error:
        print(f"disttrain: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    except WorldError as error:
        from disttrain.launch.local import say

        say(error.outcome.failure or error.outcome.reason)
        return error.outcome.exit_code
    except KeyboardInterrupt as asked:
        print(f"disttrain: stopped by {asked or 'SIGINT'}", file=sys.stderr, flush=True)
        return asked.exit_code if isinstance(asked, StopAsked) else INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python says so once more, at its exit
        return UNREAD


def run(overrides: Sequence[str] = ()) -> Result:
    """Train as `python -m disttrain <overrides>` would, from Python or a notebook.

    Raises UserError (mostly its kin ConfigError) for mistakes. A run that fails has said why, and its result says so too.
    """
    from disttrain.config.compose import compose, composer, parse
    from disttrain.config.stored import with_stored
    from disttrain.launch.environment import detect

    if isinstance(overrides, str) or not all(isinstance(word, str) for word in overrides):
        words = overrides.split() if isinstance(overrides, str) else [str(word) for word in overrides]
        raise ConfigError("run() takes a list of overrides, each a text", f"run({words})")
    if overrides and (verb := split_verb(overrides)[0]) != "train":
        raise ConfigError(f"run() trains; '{verb}' is a verb of the command line", f"python -m disttrain {' '.join(overrides)}")
    request = parse(split_verb(overrides)[1])
    if request.multirun:
        raise ConfigError("run() runs one job; several are a loop over run(), or -m on the command line")
    request = with_stored(request)
    with not_for_all_to_write(), composer(request) as app:
        outcome = _train(app, request, *compose(app, request), detect())
    if outcome.exit_code == USER_ERROR:
        raise ConfigError(outcome.failure.message if outcome.failure is not None else outcome.reason)
    said = outcome.result if isinstance(outcome.result, dict) else {}
    return Result(outcome.status, outcome.exit_code, outcome.reason or said.get("reason", ""), outcome.folder, said.get("metrics", {}))


def _main(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        from disttrain import __version__

        print(f"disttrain {__version__}")
        return 0
    verb, words = split_verb(words)
    if verb in (*READING, REPORT) and {"-h", "--help"} & set(words):
        from disttrain.config.manual import usage

        print(usage(verb))
        return 0
    if verb in READING or (verb == "doctor" and names_folder(words)):
        return read_run(verb, words)
    if verb == "doctor" and set(words) <= {"doctor.json=true", "doctor.json=false"}:
        from disttrain.doctor.machine import main as machine

        return machine(as_json="doctor.json=true" in words)
    if verb == REPORT:
        from disttrain.report.verb import main as report

        return report(words)
    from disttrain.launch.environment import detect

    environment = detect()
    if environment.is_alone:
        with stop_raises():  # where no run listens itself: before there is one, between those of a sweep
            return _compose_and_run(verb, words, environment)
    from disttrain.launch.join import follow, share_error

    if environment.rank > 0:
        return 0 if SHOWING & {word.split("=")[0] for word in words} else follow(environment).exit_code
    try:
        return _compose_and_run(verb, words, environment)
    except UserError as error:
        share_error(environment, error)
        return USER_ERROR


def split_verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """The verb and the rest; `train` if no word stands where a verb would."""
    first = words[0] if words else ""
    if not first or first.startswith(("-", "~", "+")) or "=" in first:
        return "train", list(words)
    if first not in (verbs := (*COMPOSING, *READING, REPORT)):
        near = nearest(first, verbs)
        raise ConfigError(f"there is no verb '{first}'; the verbs are {', '.join(verbs)}", f"python -m disttrain {near or '--help'}")
    return first, list(words[1:])


def _compose_and_run(verb: str, words: list[str], environment: Environment) -> int:
    from disttrain.config import show
    from disttrain.config.compose import compose, composer, parse
    from disttrain.config.stored import with_stored

    request = with_stored(parse(words))
    if verb == "plan":
        from disttrain.plan import verb as plan

        request.overrides, parameters = plan.take_parameters(request.overrides)
    with composer(request) as app:
        if show.wanted(request):
            return show.show(app, request)
        if request.multirun:
            return _sweep(verb, app, request, environment)
        composed, config = compose(app, request)
        if verb == "plan":
            return plan.main(config, parameters, request.overrides)
        if verb in ("verify", "doctor"):
            if not environment.is_alone:
                raise ConfigError(f"{verb} starts its own ranks, so {environment.launcher} can't", f"python -m disttrain {verb} ...")
            from disttrain.launch.local import import_warm

            import_warm()
            config = ready(config, environment, os.getcwd(), request)
            if verb == "doctor":
                from disttrain.doctor import verb as doctor

                return doctor.main(config, partial(_again, app, request, environment))
            from disttrain.verify import verb as verify

            return verify.main(config, request.overrides)
        return _train(app, request, composed, config, environment).exit_code


def _again(app: Hydra, request: Request, environment: Environment, words: Sequence[str]) -> Config:
    """The checked config of the same command with further overrides behind it."""
    from disttrain.config.compose import compose

    further = replace(request, overrides=[*request.overrides, *words])
    return ready(compose(app, further)[1], environment, os.getcwd(), further)


# --- from a settled config to a running job -----------------------------------------------------------------------


def ready(config: Config, environment: Environment, cwd: str, request: Request | None = None, trains: bool = False) -> Config:
    """A settled config, checked; paths are against `cwd`, or as the run had them that goes on. If it `trains`, it has its plan and fits."""
    from disttrain.config.check import check
    from disttrain.config.deepspeed import must_be_installed
    from disttrain.config.overrides import find_weights, named_in, saved_at
    from disttrain.config.paths import anchored
    from disttrain.config.stored import before
    from disttrain.launch.environment import threads_per_rank

    earlier = before(request)
    config = check(anchored(config, cwd, earlier), None if environment.is_alone else environment.world_size)
    must_be_installed(config)
    if config.init_from is not None and (earlier is None or saved_at(earlier.run) is None):
        find_weights(config.init_from)
    here = int(config.launch.world_size) if environment.is_alone else environment.local_world_size
    threads = threads_per_rank(config.launch.threads, here, config.launch.env)
    config.launch = replace(config.launch, threads=threads, nodes=environment.check_nodes(config.launch.nodes))
    config.resume = named_in(config.resume, None if earlier is None else earlier.run)
    if trains:
        from disttrain.plan.before import foresee

        config = foresee(config)
    return config


@dataclass
class Task:
    """What Hydra calls with a composed config, in this process or in one of a sweep's launcher."""

    environment: Environment
    request: Request

    def __call__(self, composed: DictConfig) -> Outcome:
        """Train; a failure is in the outcome and has been told."""
        from hydra.core.hydra_config import HydraConfig

        from disttrain.config.compose import settle, task_words
        from disttrain.launch import job

        whole: Any = HydraConfig.instance().cfg
        config = ready(settle(composed), self.environment, whole.hydra.runtime.cwd, self.request, trains=True)
        folder = Path(whole.hydra.runtime.output_dir)
        overrides = replace(self.request, overrides=task_words(whole)).words()
        where: dict[str, Any] = {"sweep_job": folder} if self.request.stored_in is None else {"resume": self.request.stored_in}
        outcome = job.run(job.Job(config, ENTRY, overrides, PREPARE, **where), self.environment)
        if outcome.folder != folder and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()  # a restart under torchrun goes on in the folder of the start before
        return outcome


def _train(app: Hydra, request: Request, composed: DictConfig, config: Config, environment: Environment) -> Outcome:
    from disttrain.config.compose import run_one
    from disttrain.launch import elastic

    try:
        ready(config, environment, os.getcwd(), request, trains=True)  # a mistake is told before any folder is made
    except UserError as error:
        waited = elastic.wait_if_another_fits(environment, error, lambda world: ready(config, world, os.getcwd(), request))
        if waited is None:
            raise
        return waited
    if (words := elastic.warning(environment)) is not None:
        print(f"disttrain: {words}", file=sys.stderr, flush=True)
    with _folders():
        outcome: Outcome = run_one(app, request, composed, Task(environment, request), request.stored_in)
    return outcome


@contextmanager
def _folders() -> Iterator[None]:
    """What the system says when Hydra makes a job's folder, in our words; a job itself raises nothing."""
    try:
        yield
    except OSError as error:
        raise not_made(error) from error


def _sweep(verb: str, app: Hydra, request: Request, environment: Environment) -> int:
    from disttrain.config.compose import run_sweep
    from disttrain.config.sweeper import exit_code, summary

    if verb != "train":
        raise ConfigError(f"-m runs several trainings; '{verb}' takes one config at a time", "leave out -m")
    if not environment.is_alone:
        raise ConfigError(f"-m under {environment.launcher} would start every sweep once a rank", "python -m disttrain -m ..., without it")
    cwd = os.getcwd()
    with _folders():
        jobs = run_sweep(app, request, Task(environment, request), lambda config: ready(config, environment, cwd, trains=True))
    if jobs:
        print(summary(jobs), flush=True)
    return exit_code(jobs)
