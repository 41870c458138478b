"""The command line: a verb, then plain Hydra. Every mistake ends in one message on stderr and exit code 2.

One process composes, checks and freezes the config and starts the ranks. Under torchrun and srun that is rank 0;
the others never enter Hydra. No torch is imported here before a run really starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain.config.typed import nearest
from disttrain.errors import ConfigError, UserError

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

    from disttrain.config.compose import Request
    from disttrain.config.schema import Config
    from disttrain.launch.environment import Environment
    from disttrain.launch.outcome import Outcome

COMPOSING = ("train", "verify")
READING = ("generate", "evaluate")
"""Verbs that take a finished run's folder."""
ENTRY = "disttrain.build:train"
SHOWING = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
"""Flags that print instead of run: rank 0 does, the others have nothing to do."""
PREPARE = "disttrain.build:prepare_data"
USER_ERROR, INTERRUPTED = 2, 130


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
    if argv is None:
        argv = sys.argv[1:]
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # an installed script looks beside itself only; own classes lie here
    try:
        return _main(list(argv))
    except UserError as error:
        print(f"disttrain: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def run(overrides: Sequence[str] = ()) -> Result:
    """Train as `python -m disttrain <overrides>` would, from Python or a notebook.

    Raises UserError (mostly its kin ConfigError) for mistakes. A run that fails has said why, and its result says so too.
    """
    from disttrain.config.compose import compose, composer, parse
    from disttrain.launch.environment import detect

    request = parse(overrides)
    if request.multirun:
        raise ConfigError("run() runs one job; several are a loop over run(), or -m on the command line")
    request, resumed = _with_stored(request)
    with composer(request) as app:
        outcome = _train(app, request, *compose(app, request), detect(), resumed)
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
    if verb in READING:
        return _read_run(verb, words)
    from disttrain.launch.environment import detect

    environment = detect()
    if environment.is_alone:
        return _compose_and_run(verb, words, environment)
    from disttrain.launch.join import follow, share_error

    if environment.rank > 0:
        return 0 if SHOWING & {word.split("=")[0] for word in words} else follow(environment).exit_code
    try:
        return _compose_and_run(verb, words, environment)
    except UserError as error:
        share_error(environment, error)
        raise


def split_verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """The verb and the rest; `train` if no word stands where a verb would."""
    first = words[0] if words else ""
    if not first or first.startswith(("-", "~", "+")) or "=" in first:
        return "train", list(words)
    verbs = (*COMPOSING, *READING)
    if first not in verbs:
        near = nearest(first, verbs)
        raise ConfigError(f"there is no verb '{first}'; the verbs are {', '.join(verbs)}", f"python -m disttrain {near or '--help'}")
    return first, list(words[1:])


def _read_run(verb: str, words: list[str]) -> int:
    """`generate RUN ...` and `evaluate RUN ...`."""
    folder = Path(words[0]).expanduser() if words and "=" not in words[0] and not words[0].startswith("-") else None
    if folder is None:
        raise ConfigError(f"'{verb}' needs the folder of a run", f"python -m disttrain {verb} outputs/<date>/<time>-<id>")
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", f"python -m disttrain {verb} outputs/<date>/<time>-<id>")
    import importlib

    main_of_verb: Callable[[Path, list[str]], int] = importlib.import_module(f"disttrain.reading.{verb}").main
    return main_of_verb(folder, words[1:])


def _compose_and_run(verb: str, words: list[str], environment: Environment) -> int:
    from disttrain.config import show
    from disttrain.config.compose import compose, composer, parse

    request, resumed = _with_stored(parse(words))
    with composer(request) as app:
        if show.wanted(request):
            return show.show(app, request)
        if request.multirun:
            return _sweep(verb, app, request, environment, resumed)
        composed, config = compose(app, request)
        if verb == "verify":
            if not environment.is_alone:
                raise ConfigError(f"verify starts its own ranks, so {environment.launcher} can't", "python -m disttrain verify ...")
            from disttrain.launch.local import import_warm

            import_warm()
            from disttrain.verify import verb as verify

            return verify.main(ready(config, environment, os.getcwd()), request.overrides)
        return _train(app, request, composed, config, environment, resumed).exit_code


# --- from a settled config to a running job -----------------------------------------------------------------------


def ready(config: Config, environment: Environment, cwd: str, resumed: Path | None = None) -> Config:
    """A settled config checked against the world and the machine, its paths taken against the folder `cwd`."""
    from disttrain.config.check import anchored, check
    from disttrain.launch.environment import threads_per_rank

    config = anchored(check(config, None if environment.is_alone else environment.world_size), cwd)
    here = int(config.launch.world_size) if environment.is_alone else environment.local_world_size
    config.launch = replace(config.launch, threads=threads_per_rank(config.launch.threads, here, config.launch.env))
    if config.resume == "auto":
        config.resume = None if resumed is None else str(resumed)
    return config


@dataclass
class Task:
    """What Hydra calls with a composed config, in this process or in one of a sweep's launcher."""

    environment: Environment
    request: Request
    resumed: Path | None = None

    def __call__(self, composed: DictConfig) -> Outcome:
        """Train; a failure is in the outcome and has been told."""
        from hydra.core.hydra_config import HydraConfig

        from disttrain.config.compose import settle, task_words
        from disttrain.launch import job

        whole: Any = HydraConfig.instance().cfg
        hydra = whole.hydra
        config = ready(settle(composed), self.environment, hydra.runtime.cwd, self.resumed)
        folder = Path(hydra.runtime.output_dir)
        overrides = replace(self.request, overrides=task_words(whole)).words()
        where: dict[str, Any] = {"resume": self.resumed} if self.resumed is not None else {"sweep_job": folder}
        outcome = job.run(job.Job(config, ENTRY, overrides, PREPARE, **where), self.environment)
        if outcome.folder != folder and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()  # a restart under torchrun goes on in the folder of the start before
        return outcome


def _train(app: Hydra, request: Request, composed: DictConfig, config: Config, environment: Environment, resumed: Path | None) -> Outcome:
    from disttrain.config.compose import run_one

    ready(config, environment, os.getcwd(), resumed)  # a mistake is told before any folder is made
    outcome: Outcome = run_one(app, request, composed, Task(environment, request, resumed), resumed)
    return outcome


def _sweep(verb: str, app: Hydra, request: Request, environment: Environment, resumed: Path | None) -> int:
    from disttrain.config.compose import run_sweep
    from disttrain.config.sweeper import exit_code, summary

    if verb != "train":
        raise ConfigError(f"-m runs several trainings; '{verb}' takes one config at a time", "leave out -m")
    if not environment.is_alone:
        raise ConfigError(f"-m under {environment.launcher} would start every sweep once a rank", "python -m disttrain -m ..., without it")
    if resumed is not None:
        raise ConfigError("-m with resume= would let several jobs write into one run folder", "leave out -m or resume=")
    cwd = os.getcwd()
    jobs = run_sweep(app, request, Task(environment, request), lambda config: ready(config, environment, cwd))
    if jobs:
        print(summary(jobs), flush=True)
    return exit_code(jobs)


def _with_stored(request: Request) -> tuple[Request, Path | None]:
    """With `resume=`, the stored words of that run in front of those typed, and its folder."""
    from disttrain.config.compose import compose, composer, parse
    from disttrain.config.overrides import find_run, merge, value_of
    from disttrain.record import RunFolder

    wanted = value_of(request.overrides, "resume")
    if wanted is None:
        return request, None
    outputs, name = Path(), ""
    if wanted == "auto":
        with composer(request) as app:
            _, config = compose(app, replace(request, overrides=merge(request.overrides, ["resume=null"])))
        outputs, name = Path(config.paths.outputs).expanduser(), config.run_name
    run = find_run(wanted, outputs, name)
    if run is None:
        print(f"resume=auto: no run named '{name}' under {outputs}, so this is its first", file=sys.stderr, flush=True)
        return replace(request, overrides=merge(request.overrides, ["resume=null"])), None
    stored = parse(RunFolder(run).overrides())
    whole = replace(
        request,
        overrides=merge(stored.overrides, request.overrides),
        config_name=request.config_name if request.arguments.config_name else stored.config_name,
        folders=request.folders or stored.folders,
        typed=request.overrides,
    )
    return whole, run
