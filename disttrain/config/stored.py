"""What a run was started with, under what is typed to go on with it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from hydra.types import RunMode

from disttrain.config.compose import Request, compose, composer, parse
from disttrain.config.overrides import CHOSEN_WHOLE, Choices, find_run, fitting, key_of, merge, value_of
from disttrain.config.schema import PathsConfig
from disttrain.config.trust import check_words, without_secrets
from disttrain.errors import ConfigError, UserError
from disttrain.record import RunFolder

CHOOSING = (*CHOSEN_WHOLE, "callbacks", "experiment")
"""What, typed at a resume, may choose other groups than the run was started with."""


def with_stored(request: Request) -> tuple[Request, Path | None]:
    """With `resume=`, the stored words of that run in front of those typed, and its folder. ConfigError for several jobs."""
    wanted = value_of(request.overrides, "resume")
    if wanted is None:
        return request, None
    if request.multirun:
        raise ConfigError("-m with resume= would let several jobs write into one run folder", "leave out -m or resume=")
    outputs, name = Path(value_of(request.overrides, "paths.outputs") or PathsConfig().outputs).expanduser(), ""
    if wanted == "auto":
        with composer(request) as app:
            _, config = compose(app, replace(request, overrides=merge(request.overrides, ["resume=null"])))
        outputs, name = Path(config.paths.outputs).expanduser(), config.run_name
    run = find_run(wanted, outputs, name)
    if run is None:
        why = f"no run named '{name}' under {outputs} has a checkpoint"
        print(f"disttrain: resume=auto: {why}, so this begins anew", file=sys.stderr, flush=True)
        return replace(request, overrides=merge(request.overrides, ["resume=null"])), None
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
    return replace(whole, overrides=merge(kept, request.overrides)), run


def _choices(request: Request) -> Choices | None:
    """What the overrides choose, whatever keys they set; None if that can't be composed."""
    chosen = [word for word in request.overrides if "." not in key_of(word)]
    try:
        with composer(request) as app:
            composed = app.config_loader.load_configuration(request.config_name, chosen, RunMode.RUN)
    except UserError:
        return None
    return Choices(dict(composed.hydra.runtime.choices), frozenset(map(str, composed.get("callbacks") or ())))
