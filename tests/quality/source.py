"""The package's own source, parsed: what the house rules are checked on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Source:
    """One Python file, by its path relative to the clone."""

    path: str

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """Dotted name: `disttrain.parallel.mesh`; a package's is that of its folder."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def sources(*folders: str) -> list[Source]:
    """Every Python file under `folders`, in order of path."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [Source(str(path.relative_to(ROOT))) for path in sorted(found)]


def room(module: str) -> str:
    """`disttrain.parallel.mesh` lies in room `parallel`; the package itself is `disttrain`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class Import:
    """One imported name. `module` is dotted; `lazy` inside a function, so not run at import."""

    module: str
    line: int
    lazy: bool


def imports(source: Source) -> Iterator[Import]:
    """Everything that `source` can import when it runs: at the top, in functions and by `import_module` of a plain string."""
    for node in source.tree.body:
        yield from _imports(node, source, lazy=False)


def _imports(node: ast.AST, source: Source, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, source)
        yield from (Import(f"{base}.{alias.name}", node.lineno, lazy) for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        yield from (Import(arg.value, node.lineno, lazy) for arg in node.args[:1] if isinstance(arg, ast.Constant))
    skip_body = isinstance(node, ast.If) and _is_type_checking(node.test)
    lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in node.orelse if skip_body else ast.iter_child_nodes(node):
        yield from _imports(child, source, lazy)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _absolute(node: ast.ImportFrom, source: Source) -> str:
    if node.level == 0:
        return node.module or ""
    is_package = source.path.endswith("__init__.py")
    parts = source.module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])
