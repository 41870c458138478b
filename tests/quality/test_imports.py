"""Arrows of import run downward only, and heavy packages are imported where they are used."""

from __future__ import annotations

import ast

from tests.quality.source import Source, imports, room, sources

HOUSE = (
    {"disttrain", "__main__", "cli"},
    {"report"},
    {"doctor", "reading"},
    {"plan", "verify"},
    {"build"},
    {"callbacks"},
    {"launch"},
    {"train"},
    {"checkpoint"},
    {"parallel"},
    {"config"},
    {"models", "data"},
    {"record"},
    {"places", "secrecy", "texts"},
    {"errors"},
)
"""Storeys, top first. What stands on one storey doesn't know its neighbours there either, but for the top."""

HEAVY = {"wandb", "torchvision", "torchmetrics", "sklearn", "tensorboard", "rich", "matplotlib", "triton", "IPython"}
"""Seconds of import each, some of them: only inside functions."""

IMPORTED_WHERE_USED = {
    "disttrain.models.metrics": "subclasses torchmetrics; tasks import it at the first evaluation",
    "disttrain.models.resnet": "subclasses torchvision's ResNet; imported by its name in a config only",
    "disttrain.parallel.torch_stages": "subclasses torch.distributed.pipelining's stage; a pipeline imports it at its first step",
}
"""Modules of ours that may import heavy packages at their top, because nobody imports them at theirs."""

HEAVY_TORCH = ("torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.checkpoint", "torch.utils.tensorboard")
WITHOUT_TORCH = {"disttrain", "__main__", "cli", "errors", "places", "secrecy", "texts", "record", "config"}
"""Rooms that `--help` and `--cfg job` enter: torch takes seconds."""

PACKAGE = sources("disttrain")


def storey(name: str) -> int:
    """Number of the storey that holds the room `name`, 0 at the top."""
    found = [number for number, rooms in enumerate(HOUSE) if name in rooms]
    assert found, f"disttrain/{name} has no place in the house: give it one in HOUSE, and in the design"
    return found[0]


def is_allowed(importer: str, imported: str) -> bool:
    """Whether a file in room `importer` may import from room `imported`."""
    return importer == imported or storey(importer) < storey(imported) or storey(importer) == storey(imported) == 0


def targets(source: Source) -> list[tuple[str, int]]:
    """(room, line) of every import from our own package; `from disttrain import errors` is an import of `errors`."""
    known = {other.module for other in PACKAGE}
    found = []
    for item in imports(source):
        if item.module.split(".")[0] != "disttrain":
            continue
        module = item.module if ".".join(item.module.split(".")[:2]) in known else "disttrain"
        found.append((room(module), item.line))
    return found


def test_arrows_run_downward() -> None:
    wrong = [
        f"{source.path}:{line} imports {other}"
        for source in PACKAGE
        for other, line in targets(source)
        if not is_allowed(room(source.module), other)
    ]
    assert not wrong, "\n".join(wrong)


def is_heavy(name: str, importer: str) -> bool:
    """Whether module `importer` may not import `name` at its top."""
    without_torch = room(importer) in WITHOUT_TORCH
    heavy, heavy_torch = (HEAVY, HEAVY_TORCH) if importer not in IMPORTED_WHERE_USED else (set(), ())
    names = heavy | ({"torch"} if without_torch else set())
    return name.split(".")[0] in names or name.startswith((*heavy_torch, *IMPORTED_WHERE_USED))


def test_heavy_packages_are_imported_where_used() -> None:
    wrong = [
        f"{source.path}:{item.line} {item.module}"
        for source in PACKAGE
        for item in imports(source)
        if not item.lazy and is_heavy(item.module, source.module)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_check_sees_every_way_to_import() -> None:
    text = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import disttrain.train
else:
    import disttrain.launch
from .mesh import Mesh
from .. import errors
def f():
    from disttrain.callbacks import wandb
    import_module("disttrain.report")
"""
    source = Source("disttrain/parallel/planted.py")
    source.__dict__["tree"] = ast.parse(text)
    found = {item.module: item.lazy for item in imports(source) if item.module.startswith("disttrain")}
    assert found == {
        "disttrain.launch": False,
        "disttrain.parallel.mesh.Mesh": False,
        "disttrain.errors": False,
        "disttrain.callbacks.wandb": True,
        "disttrain.report": True,
    }
    assert not is_allowed("parallel", "callbacks")
    assert not is_allowed("models", "data")
    assert is_allowed("cli", "build")
    assert is_allowed("verify", "build")
