"""What the checks believe of classes, against the classes themselves; and keys that nobody reads."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import disttrain
from disttrain.config import components
from disttrain.config.schema import Config
from disttrain.config.sources import package_folder
from disttrain.errors import ConfigError

Make = Callable[..., Config]
PACKAGE = Path(disttrain.__file__).parent
CONF = package_folder("conf")


def shipped() -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, component) of every component in conf/."""
    for file in sorted(CONF.rglob("*.yaml")):
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        for component in [values, *(value for value in values.values() if isinstance(value, dict))]:
            if component.get("_target_", "???") != "???":
                yield str(file.relative_to(CONF)), component


SHIPPED = list(shipped())


def locate(target: str) -> Any:
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("file", "component"), SHIPPED, ids=[f"{file}:{one['_target_']}" for file, one in SHIPPED])
def test_every_key_of_a_component_is_an_argument_of_its_class(file: str, component: dict[str, Any]) -> None:
    real = inspect.signature(locate(component["_target_"])).parameters
    assert set(component) - {"_target_"} <= set(real)
    believed = components.signature_of(component["_target_"], file)
    assert set(believed.parameters) <= set(real)
    if component["_target_"].startswith("disttrain."):
        required = {name for name, parameter in believed.parameters.items() if parameter.required}
        assert required == {name for name, parameter in real.items() if parameter.default is parameter.empty}


def test_kinds_are_as_the_datasets_state_them() -> None:
    assert {target: locate(target).kind for target in components.GIVES} == dict(components.GIVES)


@pytest.mark.parametrize("target", sorted(components.WITHOUT_BLOCKS))
def test_models_without_blocks_name_none(target: str) -> None:
    assert locate(target)().parts().repeated == ()


@pytest.mark.parametrize("target", ["os.system", "subprocess.Popen", "builtins.eval"])
def test_what_python_itself_offers_is_no_component(settled: Make, target: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(target)):
        settled("dataset=synthetic", "model=custom", f"model._target_={target}")


# --- dead keys ----------------------------------------------------------------------------------------------------

READ_BY_CHECKS = {
    "strategy.dp_shard", "strategy.cp", "strategy.pp", "strategy.ep", "strategy.tp", "strategy.dp_replicate",  # made a mesh by name
    "launch.nodes",
}  # fmt: skip
"""Keys whose only reader is the check itself."""


def keys(kind: Any = Config, where: str = "") -> Iterator[str]:
    for field in dataclasses.fields(kind):
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(default):
            yield from keys(type(default), f"{field.name}.")
        else:
            yield where + field.name


def reads(tree: ast.AST) -> Iterator[str]:
    """`section.key` for attributes read through `<anything>.section` or a name bound to it; `key` for those of a config."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id.endswith("Config"):
            bound[node.arg] = node.annotation.id.removesuffix("Config").lower() or "config"
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Attribute, ast.Tuple)):
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for target, value in zip(targets, values, strict=False):
                if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
                    bound[target.id] = value.attr
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            through = (
                owner.attr if isinstance(owner, ast.Attribute) else bound.get(owner.id, owner.id) if isinstance(owner, ast.Name) else ""
            )
            yield f"{through}.{node.attr}"


def test_every_key_is_read_by_somebody() -> None:
    read = set()
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name != "config":
            read |= set(reads(ast.parse(file.read_text(encoding="utf-8"))))
    for file in CONF.rglob("*.yaml"):
        read |= set(re.findall(r"\$\{([a-z_.]+)\}", file.read_text(encoding="utf-8")))
    read |= {f"strategy.{name.removeprefix('options.')}" for name in read if name.startswith("options.")}
    read |= {name.removeprefix("config.") for name in read if name.startswith("config.")}
    assert set(keys()) - read - READ_BY_CHECKS == set()
