"""What Hydra prints instead of running: `--help`, `--cfg`, `--info`, shell completion."""

from __future__ import annotations

import copy
import logging
import os
import string
from collections.abc import Iterator, Mapping
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig, OmegaConf

from disttrain.config.compose import Request, compose, parser
from disttrain.errors import ConfigError


def wanted(request: Request) -> bool:
    """Whether any of it was asked for."""
    asked = request.arguments
    return bool(asked.help or asked.hydra_help or asked.cfg or asked.info or asked.shell_completion)


def show(app: Hydra, request: Request) -> int:
    """Print it; returns the exit code 0. ConfigError if the overrides are wrong."""
    asked, name, overrides = request.arguments, request.config_name, request.overrides
    if asked.shell_completion:
        _complete(app, request)
        return 0
    composed, _ = compose(app, request)
    if asked.help:
        print(string.Template(composed.hydra.help.template).substitute(_Parts(app, composed)))
    elif asked.hydra_help:
        app.hydra_help(config_name=name, args_parser=parser(), args=asked)
    elif asked.cfg:
        if asked.package not in (None, "_global_") and OmegaConf.select(composed, asked.package) is None:
            raise ConfigError(f"--package {asked.package}: there is no such part of the config", "--package model")
        app.show_cfg(config_name=name, overrides=overrides, cfg_type=asked.cfg, package=asked.package, resolve=asked.resolve)
    else:
        root = logging.getLogger()
        handlers, level = list(root.handlers), root.level
        app.show_info(asked.info, config_name=name, overrides=overrides)
        root.handlers, root.level = handlers, level  # Hydra adds one of its own
    return 0


class _Parts(Mapping[str, str]):
    """What a help template may name, as Hydra offers it; each is made only if it is named (its own help takes half a second)."""

    def __init__(self, app: Hydra, composed: DictConfig) -> None:
        self.makers = {
            "APP_CONFIG_GROUPS": lambda: _groups(app),
            "HYDRA_CONFIG_GROUPS": lambda: app.format_config_groups(lambda group: group.startswith("hydra")),
            "FLAGS_HELP": lambda: app.format_args_help(parser()),
            "CONFIG": lambda: OmegaConf.to_yaml(app.get_sanitized_cfg(copy.deepcopy(composed), "job")),
        }

    def __getitem__(self, name: str) -> str:
        return self.makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.makers)

    def __len__(self) -> int:
        return len(self.makers)


def _groups(app: Hydra) -> str:
    """One line a group: its choices."""
    loader: Any = app.config_loader
    repository = loader.repository
    names = [name for name in repository.get_group_options("", ObjectType.GROUP) if name != "hydra"]
    return "\n".join(f"  {name}: {', '.join(repository.get_group_options(name))}" for name in names)


def _complete(app: Hydra, request: Request) -> None:
    """Hydra completes overrides; a verb in front of them would be taken for one."""
    line = os.environ.get("COMP_LINE", "")
    program, _, rest = line.partition(" ")
    first, space, after = rest.partition(" ")
    if space and first and "=" not in first and not first.startswith(("-", "~", "+")):
        os.environ["COMP_LINE"] = f"{program} {after}"
    try:
        app.shell_completion(config_name=request.config_name, overrides=request.overrides)
    except ValueError as error:
        raise ConfigError(f"--shell-completion: {error}", 'eval "$(disttrain -sc install=bash)"') from error
    finally:
        if line:
            os.environ["COMP_LINE"] = line
