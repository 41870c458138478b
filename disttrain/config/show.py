"""What Hydra prints instead of running: `--help`, `--cfg`, `--info`, shell completion."""

from __future__ import annotations

import logging
import os

from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf

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
        app.app_help(config_name=name, args_parser=parser(), args=asked)
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
