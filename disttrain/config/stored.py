"""What a run was started with, under what is typed to go on with it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from disttrain.config.compose import Request, compose, composer, parse
from disttrain.config.overrides import find_run, fitting, merge, value_of
from disttrain.config.schema import PathsConfig
from disttrain.config.trust import check_words, without_secrets
from disttrain.record import RunFolder


def with_stored(request: Request) -> tuple[Request, Path | None]:
    """With `resume=`, the stored words of that run in front of those typed, and its folder."""
    wanted = value_of(request.overrides, "resume")
    if wanted is None:
        return request, None
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
    stored = parse(RunFolder(run).overrides())
    check_words(stored.overrides, [] if request.folders else stored.folders, run)
    kept, left_out = fitting(without_secrets(stored.overrides), request.overrides)
    if left_out:
        print(f"disttrain: left out of what the run was started with: {' '.join(left_out)}", file=sys.stderr, flush=True)
    whole = replace(
        request,
        overrides=merge(kept, request.overrides),
        config_name=request.config_name if request.arguments.config_name else stored.config_name,
        folders=request.folders or stored.folders,
        typed=request.overrides,
        stored_in=run,
    )
    return whole, run
