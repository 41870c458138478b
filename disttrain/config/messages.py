"""Hydra's and OmegaConf's errors in our words: what was found, what is allowed, which override mends it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from disttrain.config.overrides import for_shell, key_of
from disttrain.config.typed import alike, dotted, nearest, nearest_key
from disttrain.errors import ConfigError, UserError


def translate(error: Exception, overrides: Sequence[str], loader: ConfigLoaderImpl) -> UserError:
    """The error that composing `overrides` raised, as one of ours."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if isinstance(error, MissingConfigException):
        return _no_such_choice(error, loader)
    text = str(error)
    if found := re.search(r"Ambiguous value for argument '(.*)'|Sweep parameters '(.*)' requires", text):
        word = (found[1] or found[2]).lstrip("+")
        key, _, value = word.partition("=")
        return ConfigError(f"{word} names several values: -m (--multirun) runs one job for each, brackets make a list", f"-m {key}={value}")
    if found := re.search(r"Could not delete (?:from config\. )?(?:The value of )?'([^']*)'", text):
        return _nothing_to_delete(found[1], loader)
    if found := re.search(r"Config group override (?:deletion value )?must be", text):
        return _choice_by_name(next(word for word in overrides if _misses_a_name(word, loader)), loader)
    if isinstance(error.__cause__ or error, yaml.YAMLError):
        return ConfigError(f"a config file can't be read: {_one_line(str(error.__cause__ or error))}")
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
    word = next((word for word in overrides if re.sub(r"^\+*", "", word) in text), None)
    reason = _one_line(str(cause) if cause is not None else text)
    return ConfigError(reason if word is None or word in reason else f"{word}: {reason}")


def elsewhere(error: UserError, run: Path, typed: Sequence[str]) -> UserError:
    """The error of a resumed run; for a choice that isn't here, with the folder above the run that has own choices, if it is another."""
    own = (folder for folder in run.parents if any((folder / name).is_dir() for name in ("conf", "experiments")))
    home = next(own, Path.cwd())
    if not isinstance(error.__cause__, MissingConfigException) or home == Path.cwd():
        return error
    words = [for_shell("resume", str(run)) if key_of(word) == "resume" else shlex.quote(word) for word in typed]
    found = f"{error.message} (own choices are looked for in the current folder, and the run lies in {home}, which has some)"
    return ConfigError(found, f"cd {shlex.quote(str(home))} && python -m disttrain {' '.join(words)}")


def unresolved(error: Exception) -> ConfigError:
    """The error that resolving a composed config raised."""
    key = str(getattr(error, "full_key", "") or "")
    if isinstance(error, MissingMandatoryValue):
        place = key or (re.search(r"value: (\S+)", str(error)) or [None, "a key"])[1]
        example = "my_package.MyClass" if str(place).endswith("_target_") else "<value>"
        return ConfigError(f"{place} has no value and needs one", f"{place}={example}")
    if found := re.search(r"Interpolation key '([^']*)' not found", str(error)):
        return ConfigError(f"{key} takes the value of '{found[1]}', which does not exist in this config", f"{key}=<value>")
    return ConfigError(f"{key or 'the config'} can't be resolved: {_one_line(str(error))}", f"{key}=<value>" if key else None)


def _unreadable(word: str) -> ConfigError:
    if "=" not in word:
        return ConfigError(f"'{word}' is not an override: overrides read key=value, ~key deletes one", f"{word.strip() or 'key'}=<value>")
    key, _, value = word.partition("=")
    quoted = "<value>" if set(value) & set("'\"\\$`") else value
    message = f"{word} can't be read: a value with spaces, commas, brackets, quotes or colons needs quotes of its own"
    return ConfigError(message, f"\"{key}='{quoted}'\"")


def _no_such_choice(error: MissingConfigException, loader: ConfigLoaderImpl) -> ConfigError:
    missing = str(error.missing_cfg_file or "")
    group, _, name = missing.rpartition("/")
    if not group:
        options = [*loader.repository.get_group_options(""), "disttrain"]
        near = nearest(name, options)
        return ConfigError(f"there is no primary config '{name}.yaml'", f"-cn {near or 'disttrain'}")
    if missing == "hardware/here":
        return ConfigError("hardware=here is this machine as doctor measures it, and it has not yet", "python -m disttrain doctor")
    options = list(error.options or loader.repository.get_group_options(group))
    near = " or ".join(alike(name, options)) or "<one of these>"
    allowed = ", ".join(options) if options else "nothing here"
    return ConfigError(f"{group}={name}: there is no such choice; {group} can be {allowed}", f"{group}={near}")


def _misses_a_name(word: str, loader: ConfigLoaderImpl) -> bool:
    (parsed,) = OverridesParser.create().parse_overrides([word])
    return loader.repository.group_exists(parsed.key_or_group) and not isinstance(parsed.value(), (str, list))


def _choice_by_name(word: str, loader: ConfigLoaderImpl) -> ConfigError:
    group = key_of(word)
    options = loader.repository.get_group_options(group)
    return ConfigError(f"{word}: {group} is chosen by name; it can be {', '.join(options)}", f"{group}={options[0]}" if options else None)


def _nothing_to_delete(key: str, loader: ConfigLoaderImpl) -> ConfigError:
    """Name the key nearest to one that can't be deleted, among those of the default config."""
    from hydra.types import RunMode

    composed: Any = loader.load_configuration("disttrain", [], RunMode.RUN)
    sections = {name: value for name, value in composed.items_ex(resolve=False) if name != "hydra"}
    known = [*(f"callbacks.{name}" for name in composed.get("callbacks") or ()), *dotted(sections)]
    near = nearest_key(key, known)
    remedy = f"leave out ~{key}: your choice of groups has no such key" if near == key else f"~{near}" if near else None
    return ConfigError(f"~{key}: there is no such key to delete", remedy)


def _one_line(text: str) -> str:
    """The first lines of an error that say what is wrong, without the places in code that follow."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    places = re.compile(r"(full_key|object_type|reference_type)[:=]|To append to your|Set the environment")
    kept = [line for line in lines if not places.match(line)]
    return "; ".join(kept[:3]) or "unknown error"
