"""The shares that no data sheet gives, each with its meaning: two fitted on published runs, four at round values.

`experiments/planner/judge.py` fits and cross-validates them and writes the page that says how far they carry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from disttrain.config.schema import HardwareConfig


@dataclass(frozen=True, slots=True)
class Constants:
    """What a training step reaches of what the hardware was measured at alone."""

    matmul: float = 0.849
    """Share of the measured peak of large matrix products (fitted)."""
    link: float = 0.359
    """Share of the bus bandwidth measured inside a node: collectives wait for the slowest rank and contend with work (fitted)."""
    network: float = 0.65
    """Share of the network cards' bandwidth: a well-tuned cluster reaches about two thirds to three quarters."""
    attention: float = 0.9
    """Share of the attention kernel's rate, measured on long sequences."""
    memory: float = 0.9
    """Share of the memory's bandwidth that pointwise kernels and the optimizer reach."""
    overlap: float = 2.0
    """Exponent q of hiding: work and communication side by side take (work^q + said^q)^(1/q); 1 is one after the other."""

    def on(self, hardware: HardwareConfig) -> Constants:
        """Those that hold there: a processor's cores carry the messages themselves, so these hide behind nothing and nothing slows them."""
        return self if hardware.device else replace(self, link=1.0, overlap=1.0)
