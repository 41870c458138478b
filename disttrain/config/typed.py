"""Plain data against types: the one checker of the schema's dataclasses and of components' arguments.

Lenient where no meaning is lost (an int for a float, a list for a tuple) and strict elsewhere: 'yes' is no bool,
2.5 is no int, and a key that nobody knows is an error that names the nearest one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from disttrain.errors import ConfigError

T = TypeVar("T")

NO = object()
"""A value that does not fit (None may)."""

_TRUTH = {"yes": True, "on": True, "y": True, "1": True, "no": False, "off": False, "n": False, "0": False, "none": False}
_ALSO_CALLED = {
    "learning_rate": "lr",
    "batch_size": "global_batch_size",
    "max_steps": "steps",
    "num_steps": "steps",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "nproc_per_node": "world_size",
    "num_gpus": "world_size",
    "gpus": "world_size",
    "devices": "world_size",
    "gradient_clip_val": "clip_norm",
    "max_grad_norm": "clip_norm",
}
"""What keys are called elsewhere."""

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
    Path: "a path",
    Any: "a value",
}


def build(kind: type[T], values: Mapping[str, Any], where: str = "", known: Iterable[str] = ()) -> T:
    """A dataclass `kind` from plain data, `where` being its dotted place; ConfigError for unknown keys and wrong types.

    `known` are further dotted keys (those of components) that a suggestion may name.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    made: dict[str, Any] = {}
    for name, value in values.items():
        place = f"{where}.{name}" if where else str(name)
        if name not in fields:
            raise unknown(place, value, known)
        hint = hints[name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{place} is a section with keys of its own and can't be {show(value)}", f"{place}.<key>=<value>")
            made[name] = build(hint, value, place, known)
        else:
            made[name] = check(value, hint, place)
    return kind(**made)


def check(value: Any, hint: Any, place: str) -> Any:
    """`value` as `hint` wants it; ConfigError if it is of another type."""
    if get_origin(hint) in (dict, Mapping) and isinstance(value, Mapping):
        for name, item in value.items():
            check(item, get_args(hint)[1], f"{place}.{name}")
    found = fit(value, hint)
    if found is NO:
        raise ConfigError(f"{place}={show(value)} is not allowed: it takes {words(hint)}", f"{place}={_instead(value, hint)}")
    return found


def _instead(value: Any, hint: Any) -> str:
    """What to type instead of a value that does not fit: one that is near, if there is one, else what kind of value it is."""
    options = list(literals(hint))
    if isinstance(value, str) and options:
        return nearest(value, options) or f"<{words(hint)}>"
    if get_origin(hint) in (dict, Mapping):
        return f"{{<name>: <{words(get_args(hint)[1])}>}}"
    kinds = set(get_args(hint)) or {hint}
    if bool in kinds and str(value).lower() in _TRUTH:
        return show(_TRUTH[str(value).lower()])
    if int in kinds and isinstance(value, float) and math.isfinite(value):
        return str(round(value))
    if not isinstance(value, (list, dict)) and fit([value], hint) is not NO and fit([value], hint) == [value]:
        return f"[{show(value)}]"
    if (str in kinds or Path in kinds) and isinstance(value, (bool, int, float)):
        return f"\"'{show(value)}'\""
    return f"<{words(hint)}>"


def fit(value: Any, hint: Any) -> Any:
    """`value` converted to `hint`, or NO. A hint that says nothing (Any, a class of somebody's) takes all."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        fits = (fit(value, option) for option in sorted(args, key=lambda option: option is not type(value)))
        return next((found for found in fits if found is not NO), NO)
    if origin is Literal:
        return next((option for option in args if option == value and type(option) is type(value)), NO)
    if origin in (list, Sequence, tuple, Iterable):
        if not isinstance(value, (list, tuple)):
            return NO
        kinds = args if origin is tuple and args and args[-1] is not Ellipsis else (args[0] if args else Any,) * len(value)
        return NO if len(kinds) != len(value) else _all([fit(item, kind) for item, kind in zip(value, kinds, strict=True)])
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            return NO
        items = [fit(item, args[1]) for item in value.values()]
        return NO if _all(items) is NO else dict(zip(map(str, value), items, strict=True))
    if hint in (list, dict):
        return value if isinstance(value, hint) else NO
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path:
        return value if isinstance(value, str) else NO
    if hint in (int, float, str, bool, type(None)):
        return value if type(value) is hint else NO
    return value


def _all(items: list[Any]) -> Any:
    return NO if any(item is NO for item in items) else items


def literals(hint: Any) -> Iterator[str]:
    """The texts that `hint` allows by name."""
    if get_origin(hint) is Literal:
        yield from (option for option in get_args(hint) if isinstance(option, str))
    for option in get_args(hint):
        yield from literals(option)


def words(hint: Any) -> str:
    """What a hint takes, for a person."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(words(option) for option in args)
    if origin is Literal:
        return " or ".join(show(option) for option in args)
    if origin in (list, Sequence, tuple, Iterable):
        return f"a list of {words(args[0]).removeprefix('a ')}s" if args else "a list"
    if origin in (dict, Mapping):
        return "a mapping"
    return _WORDS.get(hint, str(getattr(hint, "__name__", hint)))


def show(value: Any) -> str:
    """A value as one types it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) and value else repr(value)


def unknown(place: str, value: Any, known: Iterable[str]) -> ConfigError:
    """The error for a key that nobody reads, with the nearest one that somebody does."""
    known = list(known)
    near = nearest_key(place, known)
    if near is not None:
        shown = "<value>" if isinstance(value, (Mapping, list)) else show(value)
        return ConfigError(f"there is no key '{place}'; the nearest is '{near}'", f"{near}={shown}")
    section = place.rpartition(".")[0]
    beside = [key.rpartition(".")[2] for key in known if section and key.rpartition(".")[0] == section]
    if not beside:
        return ConfigError(f"there is no key '{place}'", "python -m disttrain --cfg job")
    return ConfigError(f"there is no key '{place}'; {section} has {', '.join(beside)}", f"{section}.<one of these>={show(value)}")


def alike(word: str, options: Iterable[str]) -> list[str]:
    """All options that begin with `word`, as llama3_8b does with llama; else the one most like it, if any is."""
    options = list(options)
    near = nearest(word, options)
    return [option for option in options if word and option.startswith(word)] or ([near] if near else [])


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option most like `word`, if any is like it."""
    found = difflib.get_close_matches(word, list(options), n=1, cutoff=0.55)
    return found[0] if found else None


def nearest_key(place: str, known: Iterable[str]) -> str | None:
    """The dotted key most like `place`: by its last part first, so that `lr` finds `optimizer.lr`.

    None if no last part is spelt nearly so, or holds these words: a key of another meaning helps nobody.
    """
    leaf = place.rpartition(".")[2]
    leaf = _ALSO_CALLED.get(leaf, leaf)

    def by_leaf(key: str) -> float:
        return difflib.SequenceMatcher(None, leaf, key.rpartition(".")[2]).ratio()

    def is_close(key: str) -> bool:
        return by_leaf(key) >= 0.7 or set(leaf.split("_")) <= set(key.rpartition(".")[2].split("_"))

    close = filter(is_close, known)
    return max(close, key=lambda key: by_leaf(key) + 0.2 * difflib.SequenceMatcher(None, place, key).ratio(), default=None)


def dotted(values: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """The dotted keys of nested plain data."""
    for name, value in values.items():
        place = f"{where}.{name}" if where else str(name)
        if isinstance(value, Mapping) and value:
            yield from dotted(value, place)
        else:
            yield place
