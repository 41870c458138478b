"""Which arguments a component's class takes, without importing it where it is ours.

The signature is read from the source of disttrain's own classes: importing them would import torch, and a
table beside them would drift. torch's optimizers, which can't be read so, stand in a table that a test compares
with torch. A user's own class is imported and asked.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional, Union

from disttrain.config import typed
from disttrain.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent
GIVEN_BY_BUILD = frozenset({"params", "whole", "num_steps", "optimizer", "self"})
"""Arguments that the run fills in: an optimizer's parameters and whole matrices, a schedule's length, a torch scheduler's optimizer."""

_BETAS = tuple[float, float]
TORCH_OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "torch.optim.AdamW": {"lr": float, "betas": _BETAS, "eps": float, "weight_decay": float, "amsgrad": bool},
    "torch.optim.Adam": {"lr": float, "betas": _BETAS, "eps": float, "weight_decay": float, "amsgrad": bool},
    "torch.optim.SGD": {"lr": float, "momentum": float, "dampening": float, "weight_decay": float, "nesterov": bool},
}

WHOLE_MATRIX: Mapping[str, str] = {
    "muon": "orthogonalises whole matrices",
    "adafactor": "takes means over whole rows and columns",
    "shampoo": "preconditions whole matrices",
    "soap": "preconditions whole matrices",
    "lbfgs": "takes products over all parameters",
    "lamb": "scales by norms of whole matrices",
    "lars": "scales by norms of whole matrices",
}
"""Optimizers whose update of an element depends on more than that element, by part of the class's name: what they do."""

TAKES: Mapping[str, str] = {
    "disttrain.models.gpt.GPT": "tokens",
    "disttrain.models.cnn.SimpleCNN": "images",
    "disttrain.models.resnet.ResNet18": "images",
    "disttrain.models.block.TransformerBlock": "vectors",
}
GIVES: Mapping[str, str] = {
    "disttrain.data.text.PythonStdlib": "tokens",
    "disttrain.data.text.TextFiles": "tokens",
    "disttrain.data.images.Digits": "images",
    "disttrain.data.images.FashionMNIST": "images",
    "disttrain.data.synthetic.Synthetic": "vectors",
}
"""What a shipped model takes and a shipped dataset gives; a user's own are not asked."""

WITHOUT_BLOCKS = frozenset({"disttrain.models.cnn.SimpleCNN", "disttrain.models.resnet.ResNet18"})
"""Shipped models in which no block repeats."""

CHOICES_FOR = {"tokens": "python_stdlib", "images": "digits", "vectors": "synthetic"}
_NAMES = {"Any": Any, "Literal": Literal, "Optional": Optional, "Union": Union, "Path": Path, "Sequence": Sequence, "Mapping": Mapping}
_NAMES |= {kind.__name__: kind for kind in (int, float, bool, str, list, dict, tuple)}
_NAMES |= {"Iterable": Iterable, "typing": typing}


@dataclass(frozen=True)
class Parameter:
    """One argument of a component's class."""

    hint: Any = Any
    required: bool = False


@dataclass(frozen=True)
class Signature:
    """The arguments of a component's class; `open` if it takes any keyword."""

    parameters: Mapping[str, Parameter]
    open: bool = False


def check_component(values: Any, place: str) -> dict[str, Any]:
    """A component (`_target_` and arguments) at the dotted `place`, its arguments checked against its class."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{place} names a class with '_target_' and its arguments; {typed.show(values)} is neither", f"{place}=custom")
    target = values.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise ConfigError(f"{place} does not say which class it is", f"{place}._target_=my_package.MyClass")
    signature = signature_of(target, place)
    checked: dict[str, Any] = {"_target_": target}
    known = [f"{place}.{name}" for name in signature.parameters if name not in GIVEN_BY_BUILD]
    for name, value in values.items():
        if name == "_target_":
            continue
        parameter = signature.parameters.get(name)
        inner = f"{place}.{name}"
        if parameter is None and not signature.open:
            error = typed.unknown(inner, value, known)
            raise ConfigError(f"{error.message} ({target}{'' if known else ' takes no arguments'})", error.remedy)
        if isinstance(value, Mapping) and "_target_" in value:
            checked[name] = check_component(value, inner)
        else:
            checked[name] = typed.check(value, parameter.hint if parameter else Any, inner)
    for name, parameter in signature.parameters.items():
        if parameter.required and name not in checked and name not in GIVEN_BY_BUILD:
            raise ConfigError(f"{target} needs '{name}', which {place} does not give", f"{place}.{name}=<{typed.words(parameter.hint)}>")
    return checked


def needs_whole(names: Iterable[str]) -> str | None:
    """Why an optimizer whose class and bases have these names can't update parts of a matrix; None if it can."""
    return next((why for name in names for part, why in WHOLE_MATRIX.items() if part in name.lower()), None)


def is_class_of_ours(target: str) -> bool:
    """Whether `target` is a class of this package, found without importing it."""
    module, _, name = target.rpartition(".")
    return _read(module, name) is not None


@functools.cache
def signature_of(target: str, place: str) -> Signature:
    """The signature of `target`; ConfigError if there is no such class, naming `place`."""
    if target in TORCH_OPTIMIZERS:
        return Signature({name: Parameter(hint) for name, hint in TORCH_OPTIMIZERS[target].items()})
    module, _, name = target.rpartition(".")
    if module.split(".")[0] == "disttrain":
        found = _read(module, name)
        if found is None:
            tree = _source(module)
            near = typed.nearest(name, [node.name for node in tree.body if isinstance(node, ast.ClassDef)] if tree else [])
            instead = f"{module}.{near}" if near else "my_package.MyClass"
            raise ConfigError(f"{place}._target_={target}: {module} has no class {name}", f"{place}._target_={instead}")
        return found
    return _inspect(find(target, place))


IN_ITS_FOLDER = "run this in the folder that holds its module, or with PYTHONPATH=<that folder>"
"""What mends a class of a run's that can't be imported: the run was started elsewhere."""


def find(target: str, place: str) -> Callable[..., Any]:
    """Import a user's own class. What the standard library offers is no component."""
    module, _, name = target.rpartition(".")
    if module.split(".")[0] in sys.stdlib_module_names:
        raise ConfigError(f"{place}._target_={target} is part of Python and can't be a component", f"{place}._target_=my_package.MyClass")
    without_torch = "torch" not in sys.modules
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(
            f"{place}._target_={target} can't be imported: {error} (modules are looked for in the current folder too)",
            f"{place}._target_=my_package.MyClass",
        ) from error
    except AttributeError as error:
        near = typed.nearest(name, [key for key, value in vars(sys.modules[module]).items() if callable(value)])
        raise ConfigError(f"{place}._target_={target}: {module} has no {name}", f"{place}._target_={module}.{near or '<class>'}") from error
    if not callable(found):
        raise ConfigError(f"{place}._target_={target} is neither a class nor a function", f"{place}._target_=my_package.MyClass")
    if without_torch and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # before it computes: ranks can be forked only from a process without its threads
    return found  # type: ignore[no-any-return]


def _inspect(found: Callable[..., Any]) -> Signature:
    try:
        signature = inspect.signature(found)
    except ValueError:  # written in C without a signature
        return Signature({}, open=True)
    hints: Mapping[str, Any] = {}
    try:
        hints = typing.get_type_hints(found.__init__ if inspect.isclass(found) else found)
    except (NameError, TypeError, AttributeError):  # hints that only a type checker can resolve
        hints = {}
    named = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    parameters = {p.name: Parameter(hints.get(p.name, Any), p.default is p.empty) for p in named}
    return Signature(parameters, any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()))


@functools.cache
def _source(module: str) -> ast.Module | None:
    parts = module.split(".")[1:]
    for path in (PACKAGE.joinpath(*parts).with_suffix(".py"), PACKAGE.joinpath(*parts, "__init__.py")):
        if path.is_file():
            return ast.parse(path.read_text(encoding="utf-8"))
    return None


def _read(module: str, name: str) -> Signature | None:
    """The signature of a class of this package from its source: its __init__, its dataclass fields, or its base's."""
    tree = _source(module)
    if tree is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("disttrain"):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _read(node.module or "", alias.name)
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _read_class(module, node)
    return None


def _read_class(module: str, node: ast.ClassDef) -> Signature:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _read_arguments(item.args)
    bases = [_read(module, base.id) for base in node.bases if isinstance(base, ast.Name)]
    inherited = next((base for base in bases if base is not None), Signature({}))
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        own = [item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)]
        fields = {ast.unparse(item.target): Parameter(_hint(item.annotation), item.value is None) for item in own}
        return Signature({**inherited.parameters, **fields}, inherited.open)
    return inherited


def _read_arguments(arguments: ast.arguments) -> Signature:
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    parameters = {a.arg: Parameter(_hint(a.annotation), i < num_required) for i, a in enumerate(positional) if a.arg != "self"}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters[argument.arg] = Parameter(_hint(argument.annotation), default is None)
    return Signature(parameters, arguments.kwarg is not None)


def _hint(annotation: ast.expr | None) -> Any:
    """An annotation as a type, if it is made of plain ones; else Any."""
    if annotation is None:
        return Any
    try:
        return eval(ast.unparse(annotation), {"__builtins__": {}}, dict(_NAMES))  # our own source, not a config's
    except (NameError, TypeError, AttributeError, SyntaxError):
        return Any
