"""Before a training: what `plan` predicts for it goes into its config; one that can't fit its devices is refused."""

from __future__ import annotations

from dataclasses import replace

from disttrain.config.schema import Config, HardwareConfig
from disttrain.errors import ConfigError
from disttrain.plan.constants import Constants
from disttrain.plan.devices import CPU, device_bytes, machine_bytes, resolve
from disttrain.plan.memory import GIB
from disttrain.plan.planned import Plan, make, overrides, predicted
from disttrain.plan.settle import GPT, settle
from disttrain.plan.walls import show_bytes

ROUGH = "perf/"
"""Times are left out where the hardware was not measured."""


def foresee(config: Config) -> Config:
    """The config with its predictions. ConfigError, with the nearest layout that fits, unless plan.force.

    A model whose shape is not known is trained without a plan.
    """
    if config.model.get("_target_") != GPT:
        return config
    settled = settle(config)
    if settled.changes:
        return config  # the check lets through what plan reads otherwise: better no prediction than one of another layout
    hardware = resolve(config.hardware, settled.case.layout.world // settled.nodes)
    plan = make(settled.case, hardware, Constants())
    if not config.plan.force:
        check_fit(plan, config)
    found = predicted(plan)
    if hardware.name == CPU:
        found = {name: value for name, value in found.items() if not name.startswith(ROUGH)}
    return replace(config, predicted=found)


def check_fit(plan: Plan, config: Config) -> None:
    """ConfigError where the fullest rank needs more than the whole memory of the device that it will get."""
    has = (
        device_bytes()
        if config.launch.device == "cuda"
        else machine_bytes() // max(1, int(config.launch.world_size) // config.launch.nodes)
    )
    if has is None or plan.peak_bytes <= has:
        return
    from disttrain.plan.verb import nearest

    hardware: HardwareConfig = replace(plan.hardware, memory_gib=has / GIB)
    fitting = nearest(replace(plan, hardware=hardware), config, Constants())
    needs = f"the fullest rank of this layout needs {show_bytes(plan.peak_bytes)}, and its device has {show_bytes(has)}"
    if not fitting.fits:
        raise ConfigError(f"{needs}; no layout on {plan.case.layout.world} ranks fits", "plan.force=true, to try all the same")
    raise ConfigError(f"{needs} (plan.force=true tries all the same)", " ".join(overrides(config, fitting.case)))
