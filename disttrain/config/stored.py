"""What a run was started with, under what is typed to go on with it."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from hydra.types import RunMode

from disttrain.config.compose import Request, compose, composer, parse
from disttrain.config.overrides import CHOSEN_WHOLE, Choices, find_run, fitting, key_of, merge, value_of
from disttrain.config.paths import PATHS, Before
from disttrain.config.schema import PathsConfig
from disttrain.config.trust import check_words, without_secrets
from disttrain.errors import ConfigError, UserError
from disttrain.places import expanded, is_remote, shown
from disttrain.record import RunFolder

CHOOSING = (*CHOSEN_WHOLE, "callbacks", "experiment", "debug")
"""What, typed at a resume, may choose other groups than the run was started with."""


def with_stored(request: Request) -> Request:
    """With `resume=`, the stored words of that run in front of those typed. ConfigError for several jobs."""
    wanted = value_of(request.overrides, "resume")
    if wanted is None:
        return request
    if request.multirun:
        raise ConfigError("-m with resume= would let several jobs write into one run folder", "leave out -m or resume=")
    outputs, name = expanded(value_of(request.overrides, "paths.outputs") or PathsConfig().outputs), ""
    if wanted == "auto":
        with composer(request) as app:
            _, config = compose(app, replace(request, overrides=merge(request.overrides, ["resume=null"])))
        outputs, name = expanded(config.paths.outputs), config.run_name
    run = find_run(wanted, outputs, name)
    if run is None:
        why = f"no run named '{name}' under {outputs} has a checkpoint"
        print(f"disttrain: resume=auto: {why}, so this begins anew", file=sys.stderr, flush=True)
        return replace(request, overrides=merge(request.overrides, ["resume=null"]))
    _must_be_there(RunFolder(run))
    words = RunFolder(run).overrides()
    stored = parse([word for word in words if not request.folders or not word.startswith("--config-dir=")])
    check_words(stored.overrides, stored.folders, run)
    stored.overrides = without_secrets(stored.overrides)
    whole = replace(
        request,
        overrides=merge(stored.overrides, request.overrides),
        config_name=request.config_name if request.arguments.config_name else stored.config_name,
        folders=request.folders or stored.folders,
        typed=request.overrides,
        stored_in=run,
    )
    is_chosen = any(key_of(word) in CHOOSING for word in request.overrides)
    choices = (_choices(stored), _choices(whole)) if is_chosen else (None, None)
    kept, left_out = fitting(stored.overrides, request.overrides, *choices)
    if left_out:
        print(f"disttrain: left out of what the run was started with: {' '.join(left_out)}", file=sys.stderr, flush=True)
    return replace(whole, overrides=merge(kept, request.overrides))


def _choices(request: Request) -> Choices | None:
    """What the overrides choose, whatever keys they set; None if that can't be composed."""
    chosen = [word for word in request.overrides if "." not in key_of(word)]
    try:
        with composer(request) as app:
            composed = app.config_loader.load_configuration(request.config_name, chosen, RunMode.RUN)
    except UserError:
        return None
    return Choices(dict(composed.hydra.runtime.choices), frozenset(map(str, composed.get("callbacks") or ())))


def before(request: Request | None) -> Before | None:
    """The run that goes on, if one does, and the paths that its words meant; what is typed now is meant here."""
    if request is None or request.stored_in is None:
        return None
    typed = {key_of(word) for word in request.typed}
    if "paths.data" in typed:
        typed.add("dataset.data_dir")  # which takes its value
    folder = RunFolder(request.stored_in)
    values = folder.config_values() if (folder.path / "config.yaml").exists() else {}
    return Before(request.stored_in, {key: _listed(values, key) for key in PATHS if key not in typed})


def _listed(values: Any, key: str) -> list[str]:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return [str(one) for one in (values if isinstance(values, list) else [values]) if one is not None]


def _must_be_there(run: RunFolder) -> None:
    """ConfigError if the folder outside of the run's own in which it keeps its checkpoints is gone, or not mounted."""
    place = run.checkpoints
    if run.keeps_elsewhere and not is_remote(place) and not place.is_dir():
        raise ConfigError(f"{shown(run.path)} keeps its checkpoints at {place}, and there is no such folder", "the same, once it is there")
