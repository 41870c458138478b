"""How far the run is, and what has been asked of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from disttrain.parallel.step import Verdict

NUM_VERDICTS = len(Verdict)


FAILED = "FAILED"
"""What a reason to stop begins with if the run has failed by it."""


class DivergedError(ArithmeticError):
    """All ranks agreed that there is no point in going on."""


@dataclass
class Result:
    """How a run ended: 'done', or 'stopped' with the reason, and the last value of every metric."""

    status: str
    reason: str
    step: int
    metrics: dict[str, float]


class Progress:
    """Position of a run. `step` counts global batches taken, skipped updates included."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Start of a run on `device` (the CPU by default)."""
        self.device = device or torch.device("cpu")
        self.step = 0
        self.epoch = 0
        self.step_in_epoch = 0
        self.reasons: list[str] = []
        self._flags = [0.0] * NUM_VERDICTS
        self._late: tuple[Tensor, Any] | None = None

    def request(self, verdict: Verdict, reason: str) -> None:
        """Ask all ranks for `verdict`: it is put into the next step's reduction, and holds on every rank alike."""
        self._flags[verdict] = 1.0
        self.reasons.append(f"{verdict.name}: {reason}")

    def flags(self) -> list[float] | None:
        """This rank's requests for the step under way, taken once; None when there is none."""
        if not any(self._flags):
            return None
        flags, self._flags = self._flags, [0.0] * NUM_VERDICTS
        return flags

    def settle(self, verdict: Tensor, drain: bool) -> Verdict:
        """Post the agreed counters [4] of this step, and return the verdict of the step before.

        `drain` waits for this step's as well, and returns the larger: before a save, an evaluation and the end.
        SKIP is never returned: it was settled on the device.
        """
        late = self._read()
        self._post(verdict)
        return max(late, self._read()) if drain else late

    def finish_step(self, epoch_ends: bool) -> None:
        """Move the position behind the step just taken."""
        if epoch_ends:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0
        else:
            self.step_in_epoch += 1

    def _post(self, verdict: Tensor) -> None:
        """Start copying to the host, without waiting."""
        if verdict.device.type == "cuda":
            host = torch.empty(NUM_VERDICTS, dtype=verdict.dtype, pin_memory=True)
            host.copy_(verdict, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._late = (host, event)
        else:
            self._late = (verdict, None)

    def _read(self) -> Verdict:
        """The verdict posted last, waited for if need be; GO if there is none."""
        if self._late is None:
            return Verdict.GO
        host, event = self._late
        self._late = None
        if event is not None:
            event.synchronize()
        counts = host.tolist()
        return next((verdict for verdict in (Verdict.STOP, Verdict.SAVE) if counts[verdict] > 0), Verdict.GO)

    def state_dict(self) -> dict[str, int]:
        """Position as integers; read only at a save, after draining."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take up the position of `state_dict`."""
        self.step, self.epoch, self.step_in_epoch = state["step"], state["epoch"], state["step_in_epoch"]
