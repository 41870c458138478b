"""Hydra, put to our use: one composition, every key open to it and closed by our schema, every error ours.

Hydra's struct mode would answer an unknown key with the advice to add a plus sign, and would want one for a user's
own class. So every override may add (`++`), and `settle` checks the composed config against the schema and the
signatures of its components. Written against hydra-core 1.3; what is used of its inside: `Hydra` (help, info,
completion), `ConfigLoaderImpl.load_configuration` (public in `ConfigLoader`), `get_args_parser`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import hydra.version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus, run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from disttrain.config import manual, messages, sources, typed
from disttrain.config.check import check_pair
from disttrain.config.components import check_component
from disttrain.config.overrides import close, open_up
from disttrain.config.schema import Config
from disttrain.config.sweeper import Job, JobSweeper, jobs_of
from disttrain.config.trust import check_stored
from disttrain.errors import ConfigError, UserError
from disttrain.places import expanded

COMPONENTS = ("model", "dataset", "optimizer", "scheduler")
KEYED = ("callbacks", "metrics")
GROUPS = ("strategy", *COMPONENTS, "callbacks", "launch", "hardware", "experiment", "debug")
SWEEPER = "disttrain.config.sweeper.JobSweeper"


@dataclass
class Request:
    """What was typed after the verb."""

    overrides: list[str]
    config_name: str = sources.PRIMARY
    folders: list[str] = field(default_factory=list)
    """`-cd`: searched first."""
    arguments: argparse.Namespace = field(default_factory=argparse.Namespace)
    multirun: bool = False
    typed: list[str] = field(default_factory=list)
    """In a resumed run, the overrides of this time only."""
    stored_in: Path | None = None
    """The resumed run's folder; the other overrides are its."""

    def words(self) -> list[str]:
        """What `overrides.yaml` stores: enough to compose the same config again."""
        flags = [] if self.config_name == sources.PRIMARY else [f"--config-name={self.config_name}"]
        return [*flags, *(f"--config-dir={folder}" for folder in self.folders), *self.overrides]


def parser() -> argparse.ArgumentParser:
    """Hydra's own flags, its errors ours."""

    def fail(message: str) -> NoReturn:
        raise ConfigError(f"the command line can't be read: {message}", "python -m disttrain --help")

    theirs = get_args_parser()
    theirs.allow_abbrev = False
    theirs.error = fail  # type: ignore[method-assign]
    return theirs


def parse(words: Sequence[str]) -> Request:
    """Read flags and overrides. ConfigError for flags that do not exist or do not go together."""
    found = parser().parse_intermixed_args(list(words))  # flags may stand between overrides
    if found.experimental_rerun is not None:
        raise ConfigError("a run is not repeated from a pickle, because reading one can run code", "resume=<run folder>")
    chosen = [name for name in ("run", "multirun", "shell_completion", "cfg", "info") if getattr(found, name)]
    if len(chosen) > 1:
        raise ConfigError(f"of --{' and --'.join(chosen)} only one can be done", f"--{chosen[0]}")
    if found.resolve and not found.cfg and not found.help:
        raise ConfigError("--resolve goes with --cfg or --help", "--cfg job --resolve")
    folders = [os.path.abspath(folder) for folder in (found.config_dir, found.config_path) if folder is not None]
    for folder in folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"the config folder {folder} does not exist", "-cd <an existing folder>")
    multirun = found.multirun or "hydra.mode=MULTIRUN" in found.overrides
    return Request(found.overrides, found.config_name or sources.PRIMARY, folders, found, multirun)


class Loader(ConfigLoaderImpl):
    """Hydra's loader, with overrides that may add keys; what it says of them is as they were typed."""

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose. ConfigError, ours, for whatever Hydra objects to."""
        sources.register()
        try:
            opened = [self._open(word) for word in overrides]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Hydra warns of what is an error to us or no concern of the user's
                composed = super().load_configuration(config_name, opened, run_mode, from_shell, validate_sweep_overrides)
        except Exception as error:
            raise messages.translate(error, overrides, self) from error
        task = [close(word) for word in task_words(composed)]
        options = composed.hydra.job.config.override_dirname
        with open_dict(composed.hydra):
            composed.hydra.overrides.task = task
            composed.hydra.job.override_dirname = get_overrides_dirname(
                OverridesParser.create().parse_overrides(task),
                kv_sep=options.kv_sep,
                item_sep=options.item_sep,
                exclude_keys=options.exclude_keys,
            )
        return composed

    def _open(self, word: str) -> str:
        (parsed,) = OverridesParser.create().parse_overrides([word])
        key = parsed.key_or_group
        if parsed.is_hydra_override() or parsed.package is not None or self.repository.group_exists(key):
            return word
        return open_up(word)


def task_words(composed: DictConfig) -> list[str]:
    """The overrides that a composed config came from, Hydra's own left out; what they interpolate is not resolved."""
    words: Any = OmegaConf.to_container(composed.hydra.overrides.task, resolve=False)
    return list(words)


@contextmanager
def composer(request: Request) -> Iterator[Hydra]:
    """Hydra for one request; its global state is as it was before when this ends."""
    hydra.version.setbase("1.3")
    node = {"_target_": SWEEPER, "max_batch_size": None, "params": None}
    ConfigStore.instance().store(group="hydra/sweeper", name="disttrain", node=node, provider="disttrain")
    _register_resolvers()
    before = GlobalHydra.instance().hydra
    config_before = HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        app = Hydra(task_name="disttrain", config_loader=Loader(sources.search_path(request.folders)))
        GlobalHydra.instance().initialize(app)
        yield app
    finally:
        GlobalHydra.instance().hydra = before
        HydraConfig.instance().cfg = config_before


def _register_resolvers() -> None:
    OmegaConf.register_new_resolver("short_id", lambda: secrets.token_hex(2), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("disttrain_keys", manual.keys, replace=True)


def settle(composed: DictConfig) -> Config:
    """A composed config, without Hydra's own part, as typed plain data, everything resolved once and for all.

    Raises ConfigError for unknown keys, wrong types, missing values and interpolations that lead nowhere.
    """
    values = _resolved(composed)
    known = [key for key in typed.dotted(_known(values)) if not key.endswith("_target_")]
    known += GROUPS
    config = typed.build(Config, values, known=known)
    for name in COMPONENTS:
        setattr(config, name, check_component(getattr(config, name), name))
    for name in KEYED:
        keyed = getattr(config, name)
        for key, value in keyed.items():
            if isinstance(value, Mapping) and "_target_" not in value:
                raise _not_chosen(name, key, list(keyed))
        setattr(config, name, {key: check_component(value, f"{name}.{key}") for key, value in keyed.items() if value is not None})
    return config


def _resolved(composed: DictConfig) -> dict[str, Any]:
    raw: Any = OmegaConf.to_container(OmegaConf.masked_copy(composed, ["model", "dataset"]), resolve=False)
    pair = [typed.check(raw.get(name) or {}, dict[str, Any], name) for name in ("model", "dataset")]
    check_pair(*pair)  # or an interpolation between the two would fail first
    values: dict[str, Any] = {}
    try:
        for key in composed:
            if key != "hydra":
                value = composed[key]
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
                values[str(key)] = value
    except OmegaConfBaseException as error:
        raise messages.unresolved(error) from error
    return values


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Every key that could have been meant: the schema's, and those of the chosen components."""
    import dataclasses

    defaults = dataclasses.asdict(Config())
    return defaults | {name: values.get(name) or {} for name in (*COMPONENTS, *KEYED)}


def _not_chosen(group: str, key: str, keyed: list[str]) -> ConfigError:
    options = [file.stem for file in (sources.package_folder("conf") / group).glob("*.yaml")]
    near = key if key in options else typed.nearest(key, [*keyed, *options])
    if near in keyed and near != key:
        return ConfigError(f"there is no '{group}.{key}'; the nearest is '{group}.{near}'", f"{group}.{near}.<key>=<value>")
    if near is None:
        return ConfigError(f"{group}.{key} does not say which class it is", f"{group}.{key}._target_=my_package.MyClass")
    chosen = ", ".join(name for name in keyed if name != key) or "none"
    return ConfigError(f"'{group}.{key}' is not among the chosen {group} ({chosen})", f"{group}=[default,{near}]")


def compose(app: Hydra, request: Request) -> tuple[DictConfig, Config]:
    """One run: everything with Hydra's own part, and the settled config."""
    try:
        composed = app.config_loader.load_configuration(request.config_name, request.overrides, RunMode.RUN)
    except UserError as error:
        raise (error if request.stored_in is None else messages.elsewhere(error, request.stored_in, request.typed)) from error
    if request.stored_in is not None:
        raw: Any = OmegaConf.to_container(composed, resolve=False)
        check_stored(raw, request.typed, request.stored_in)  # before anything that it names is imported
    return composed, enter(composed, "hydra.run.dir")


def enter(composed: DictConfig, *folder_keys: str) -> Config:
    """Make `${hydra:...}` of a composed config work and settle what is not Hydra's. Output goes to the folders of these keys, joined."""
    if (beside := composed.hydra.output_subdir) is not None:
        found = f"hydra.output_subdir={beside}: a run folder holds config.yaml and overrides.yaml itself, without secrets"
        raise ConfigError(found, "hydra.output_subdir=null")
    HydraConfig.instance().set_config(composed)
    try:
        folder = os.path.join(*(str(OmegaConf.select(composed, key)) for key in folder_keys))
    except OmegaConfBaseException as error:
        raise messages.unresolved(error) from error
    with read_write(composed.hydra), open_dict(composed.hydra):
        composed.hydra.runtime.output_dir = os.path.abspath(os.path.expanduser(folder))
    return settle(composed)


def run_one(app: Hydra, request: Request, composed: DictConfig, task: Callable[[DictConfig], Any], folder: Path | None = None) -> Any:
    """Run `task` as Hydra runs a job: output folder (`folder` if given), environment, callbacks, working folder."""
    with read_write(composed.hydra):
        composed.hydra.run.dir = str(folder or expanded(str(composed.hydra.run.dir)))
        composed.hydra.mode = RunMode.RUN
    callbacks = Callbacks(composed)
    callbacks.on_run_start(config=composed, config_name=request.config_name)
    returned = run_job(
        hydra_context=HydraContext(app.config_loader, callbacks),
        task_function=task,
        config=composed,
        job_dir_key="hydra.run.dir",
        job_subdir_key=None,
    )
    callbacks.on_run_end(config=composed, config_name=request.config_name, job_return=returned)
    if returned.status is JobStatus.FAILED:
        raise returned._return_value  # `return_value` would print first
    return returned.return_value


def run_sweep(app: Hydra, request: Request, task: Callable[[DictConfig], Any], validate: Callable[[Config], Any]) -> list[Job]:
    """Run the grid of overrides; returns the jobs. With a sweeper that is not ours, jobs are as its launcher tells."""
    words = [*request.overrides, "hydra.mode=MULTIRUN"]
    master = app.config_loader.load_configuration(request.config_name, words, RunMode.MULTIRUN)
    with read_write(master.hydra):
        master.hydra.sweep.dir = os.path.expanduser(str(master.hydra.sweep.dir))
    context = HydraContext(app.config_loader, Callbacks(master))
    context.callbacks.on_multirun_start(config=master, config_name=request.config_name)
    arguments = task_words(master)
    if master.hydra.sweeper.get("_target_") == SWEEPER:

        def enter_job(composed: DictConfig) -> None:
            validate(enter(composed, "hydra.sweep.dir", "hydra.sweep.subdir"))

        jobs = JobSweeper(context, task, master, enter_job).sweep(arguments)
    else:
        theirs = Plugins.instance().instantiate_sweeper(hydra_context=context, task_function=task, config=master)
        jobs = jobs_of(theirs.sweep(arguments))
    context.callbacks.on_multirun_end(config=master, config_name=request.config_name)
    return jobs
