"""Functions that spawned ranks import."""

from __future__ import annotations

from disttrain.launch.place import Place


def plus(place: Place, number: int) -> tuple[int, str]:
    return place.rank + number, place.launcher
