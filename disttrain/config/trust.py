"""What a run folder may make the program do: nothing that was not typed again, or is not plainly a component.

A config that was read from a run folder is data, perhaps somebody else's. Before anything that it names is imported,
each `_target_` in it is looked at by its name and place; a user's own class is then imported, from an installed package
or the current folder but never from the run folder itself, and must be a subclass of what its place expects. Hydra's own
part of the config, and environment variables that could load code, are not taken from a run folder at all.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from disttrain.config.components import IN_ITS_FOLDER, TORCH_OPTIMIZERS, find, is_class_of_ours
from disttrain.config.overrides import key_of
from disttrain.errors import CheckpointError, ConfigError
from disttrain.secrecy import REDACTED

EXPECTED: Mapping[str, tuple[str, ...]] = {
    "model": ("torch.nn.Module",),
    "dataset": ("disttrain.data.module.DataModule", "torch.utils.data.Dataset"),
    "optimizer": ("torch.optim.Optimizer",),
    "scheduler": ("disttrain.train.optimizer.Schedule", "torch.optim.lr_scheduler.LRScheduler"),
    "callbacks": ("disttrain.train.hooks.Callback",),
    "metrics": ("torchmetrics.Metric",),
    "model.task": ("disttrain.models.task.Task", "torch.nn.Module"),
}
"""By place: classes that what is named there derives from, or protocols that it fulfils."""
PROTOCOLS: Mapping[str, frozenset[str]] = {
    "disttrain.train.optimizer.Schedule": frozenset({"__call__"}),
    "disttrain.models.task.Task": frozenset({"losses", "counts", "metrics"}),
}
ROOMS: Mapping[str, tuple[str, ...]] = {
    "model": ("models",),
    "dataset": ("data",),
    "optimizer": ("train", "parallel"),
    "scheduler": ("train",),
    "callbacks": ("callbacks",),
    "metrics": ("models",),
}
"""By place: rooms of this package whose classes may stand there."""
HYDRAS_OWN = ("hydra._internal.core_plugins.", "hydra_plugins.", "disttrain.config.sweeper.")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_HARMLESS_VARIABLE = re.compile(r"(NCCL|GLOO|OMP|MKL|KMP|CUDA|TORCH|UCX|TOKENIZERS)_\w+")


def check_words(words: Sequence[str], folders: Sequence[str], run: Path) -> None:
    """Refuse stored overrides that set a part of Hydra itself, which could start anything, and config folders from elsewhere."""
    for word in words:
        if re.match(r"hydra\b", key_of(word)):
            raise CheckpointError(f"the stored run sets '{word}', which is Hydra's own", f"leave it out of overrides.yaml, or type {word}")
    for folder in folders:
        place = Path(folder).resolve()
        if not place.is_relative_to(Path.cwd().resolve()) or place.is_relative_to(run.resolve()):
            raise CheckpointError(f"the stored run's config folder {folder} is not in the current folder", f"-cd {folder}, if you trust it")


def without_secrets(words: Sequence[str]) -> list[str]:
    """Stored overrides but those whose value was a secret, which was never stored; says which."""
    for word in words:
        if REDACTED in word:
            print(f"disttrain: a secret was not stored with the run; type it again if it is needed: {word}", file=sys.stderr, flush=True)
    return [word for word in words if REDACTED not in word]


def check_stored(values: Mapping[str, Any], typed_now: Sequence[str], run: Path) -> None:
    """Refuse what the config `values` of the stored run in the folder `run` names to be called, unless typed this time.

    Imports no class before its name and place are sound. CheckpointError for the first that is not.
    """
    for place, target in _targets(values, ""):
        if not any(target in word for word in typed_now) and (reason := _reason(place, target, run)):
            message = f"the stored run asks for {place}._target_={target}, {reason}"
            raise CheckpointError(message, f"{place}._target_={target}, if you trust it")
    launch = values.get("launch")
    env = launch.get("env") if isinstance(launch, Mapping) else None
    for name, value in (env or {}).items():
        harmless = _HARMLESS_VARIABLE.fullmatch(str(name)) and "/" not in str(value)
        if not harmless and not any(str(name) in word for word in typed_now):
            raise CheckpointError(
                f"the stored run sets the environment variable {name}, which may load code", f"launch.env.{name}=<value>, if you trust it"
            )


def _reason(place: str, target: str, run: Path) -> str | None:
    """Why `target` is refused at `place`; None if it is not. CheckpointError if its module is not there."""
    group = place.partition(".")[0]
    if place == "hydra" or group == "hydra":
        return None if target.startswith(HYDRAS_OWN) else "which is no part of Hydra"
    if not _NAME.fullmatch(target):
        return "which is no name of a class"
    if target in TORCH_OPTIMIZERS:
        return None if group == "optimizer" else "which is an optimizer"
    if target.startswith("disttrain."):
        rooms = ROOMS.get(group, ())
        fits = target.split(".")[1] in rooms and is_class_of_ours(target)
        return None if fits else f"which is no class of disttrain's for {group}"
    if _lies_in(run, target):
        return "whose module lies in the run folder"
    try:
        found = find(target, place)
    except ConfigError as error:
        if isinstance(error.__cause__, ImportError):
            gone = f"the stored run asks for {place}._target_={target}, which can't be imported: {error.__cause__}"
            raise CheckpointError(gone, IN_ITS_FOLDER) from error
        return f"which cannot be used: {error.message}"
    expected = EXPECTED.get(place) or EXPECTED.get(group if _is_direct(place) else "") or sum(EXPECTED.values(), ())
    if inspect.isclass(found) and any(_fits(found, base) for base in expected):
        return None
    return f"which is no {' or '.join(sorted({base.rpartition('.')[2] for base in expected}))}"


def _is_direct(place: str) -> bool:
    """Whether a component stands at `place` itself: `model`, `callbacks.mine`; not what is nested in one."""
    return "." not in place or (place.split(".")[0] in ("callbacks", "metrics") and place.count(".") == 1)


def _fits(found: type, base: str) -> bool:
    if base in PROTOCOLS:  # these are no base classes, and many things can be called: the user's own code only
        own = Path(sys.modules[found.__module__].__file__ or "/").resolve().is_relative_to(Path.cwd().resolve())
        return own and all(any(name in vars(one) for one in found.__mro__[:-1]) for name in PROTOCOLS[base])
    module, _, name = base.rpartition(".")
    try:
        return issubclass(found, getattr(importlib.import_module(module), name))
    except ImportError:
        return False


def _lies_in(run: Path, target: str) -> bool:
    """Whether Python would look for the module of `target` inside the folder `run`."""
    parts = target.split(".")[:-1]
    inside = run.resolve()
    for entry in sys.path:
        for length in range(1, len(parts) + 1):
            place = Path(entry or ".").joinpath(*parts[:length])
            for candidate in (place, place.with_name(f"{place.name}.py")):
                if candidate.exists() and candidate.resolve().is_relative_to(inside):
                    return True
    return False


def _targets(values: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """(dotted place, target) of everything that names a class, in lists too."""
    for name, value in values.items():
        place = f"{where}.{name}" if where else str(name)
        if name == "_target_":
            yield where, str(value)
        for number, one in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(one, Mapping):
                yield from _targets(one, f"{place}.{number}" if isinstance(value, list) else place)
