"""Plain data against types: the one checker of the schema's dataclasses and of components' arguments.

Lenient where no meaning is lost (an int for a float, a list for a tuple) and strict elsewhere: 'yes' is no bool,
2.5 is no int, and a key that nobody knows is an error that names the nearest one.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from disttrain.errors import ConfigError

T = TypeVar("T")

NO = object()
"""A value that does not fit (None may)."""

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null", Path: "a path"}


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
    found = fit(value, hint)
    if found is NO:
        remedy = None
        if isinstance(value, str) and (options := list(literals(hint))) and (near := nearest(value, options)):
            remedy = f"{place}={near}"
        raise ConfigError(f"{place}={show(value)} is not allowed: it takes {words(hint)}", remedy)
    return found


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
    near = nearest_key(place, known)
    shown = "<value>" if isinstance(value, (Mapping, list)) else show(value)
    return ConfigError(f"there is no key '{place}'" + (f"; the nearest is '{near}'" if near else ""), f"{near}={shown}" if near else None)


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option most like `word`, if any is like it."""
    found = difflib.get_close_matches(word, list(options), n=1, cutoff=0.55)
    return found[0] if found else None


def nearest_key(place: str, known: Iterable[str]) -> str | None:
    """The dotted key most like `place`: by its last word first, so that `lr` finds `optimizer.lr`."""
    leaf = place.rpartition(".")[2]

    def likeness(key: str) -> float:
        by_leaf = difflib.SequenceMatcher(None, leaf, key.rpartition(".")[2]).ratio()
        return max(by_leaf + 0.2 * difflib.SequenceMatcher(None, place, key).ratio(), 0.0)

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.7 else None


def dotted(values: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """The dotted keys of nested plain data."""
    for name, value in values.items():
        place = f"{where}.{name}" if where else str(name)
        if isinstance(value, Mapping) and value:
            yield from dotted(value, place)
        else:
            yield place
