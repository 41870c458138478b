"""A clock for orders of actions: how long a step of a pipeline takes, and how much of it is waited, if each action takes a given time.

An order is what each rank did, one action behind the other (`Pipeline.actions`). An action begins when its rank is free and what
it needs is there: a forward its micro-batch's forward in the stage before, a backward that of the stage behind, the
last stage's its own forward, a backward for weights its own for inputs. Messages take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Action = tuple[str, int, int]
"""F, B (whole backward), I (backward for inputs) or W (for weights); of which stage; for which micro-batch."""


def step_time(orders: Sequence[Sequence[Action]], seconds: Mapping[str, float] | Callable[[Action], float]) -> float:
    """When the last action ends, each taking `seconds` (by its kind, or as a function says). ValueError for orders that can't go on."""
    takes = seconds if callable(seconds) else lambda action: seconds[action[0]]
    ends: dict[Action, float] = {}
    places, free = [0] * len(orders), [0.0] * len(orders)
    last = max(stage for order in orders for _, stage, _ in order)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order) and (ready := _ready(order[places[rank]], ends, last)) is not None:
                action = order[places[rank]]
                free[rank] = max(free[rank], ready) + takes(action)
                ends[action] = free[rank]
                places[rank] += 1
                moved = True
        if not moved:
            waiting = [order[place] for place, order in zip(places, orders, strict=True) if place < len(order)]
            raise ValueError(f"these actions wait for each other: {waiting}")
    return max(free)


def waited(orders: Sequence[Sequence[Action]], seconds: Mapping[str, float]) -> float:
    """The bubble: the share of ranks' time until the last action's end in which they do nothing."""
    worked = sum(seconds[kind] for order in orders for kind, _, _ in order)
    return 1.0 - worked / (len(orders) * step_time(orders, seconds))


def _ready(action: Action, ends: Mapping[Action, float], last: int) -> float | None:
    """When what the action needs was there; None if it is not yet."""
    kind, stage, micro = action
    if kind == "F":
        return ends.get(("F", stage - 1, micro)) if stage else 0.0
    if kind == "W":
        return ends.get(("I", stage, micro))
    if stage == last:
        return ends.get(("F", stage, micro))
    return ends.get(("B", stage + 1, micro), ends.get(("I", stage + 1, micro)))
