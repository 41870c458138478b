"""How far the run is, and what has been asked of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from disttrain.parallel.collectives import gather_json
from disttrain.parallel.mesh import Axis
from disttrain.parallel.step import Verdict

NUM_VERDICTS = len(Verdict)


FAILED = "FAILED"
"""What a reason to stop begins with if the run has failed by it."""


@dataclass
class Result:
    """How a run ended: 'done', or 'stopped' with the reason, and the last value of every metric."""

    status: str
    reason: str
    step: int
    metrics: dict[str, float]


def diverged(metrics: Mapping[str, float]) -> str | None:
    """Why a run whose last metrics these are has come to nothing; None if it has not."""
    name = "val/loss" if "val/loss" in metrics else "train/loss"
    if math.isfinite(metrics.get(name, 0.0)):
        return None
    skipped = metrics.get("train/skipped_updates", 0.0)
    remedy = "a smaller optimizer.lr; callbacks=[default,nan_guard] ends such a run early"
    return f"at the end {name} is {metrics[name]}, and {skipped:.0f} updates were skipped\n  try: {remedy}"


def follows(verdict: Verdict, ending: bool) -> frozenset[str]:
    """What a verdict adds to what is due. A stop before the last step logs and saves, and leaves without an evaluation."""
    if ending:
        return frozenset({"log", "save", "stop"})
    return {Verdict.SAVE: frozenset({"save"}), Verdict.ROLL_BACK: frozenset({"roll_back"})}.get(verdict, frozenset())


class Progress:
    """Position of a run. `step` counts global batches taken, skipped updates included."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Start of a run on `device` (the CPU by default)."""
        self.device = device or torch.device("cpu")
        self.step = 0
        self.epoch = 0
        self.step_in_epoch = 0
        self.owes_evaluation = False
        """A stop cut off the evaluation after `step`: it is made first when the run goes on."""
        self.reasons: list[str] = []
        self._flags = [0.0] * NUM_VERDICTS
        self._late: tuple[Tensor | list[float], Any, int] | None = None
        self._skipped_at = 0

    def request(self, verdict: Verdict, reason: str) -> None:
        """Ask all ranks for `verdict`: it is put into the next step's reduction, and holds on every rank alike."""
        self._flags[verdict] = 1.0
        self.reasons.append(f"{verdict.name}: {reason}")

    def agreed_reason(self, world: Axis) -> tuple[str, bool]:
        """Why the run stops, from whichever rank asked, and whether it has failed by that. Every rank calls it."""
        given = gather_json(self.reasons, world, self.device)
        stops = [reason for reasons in given for reason in reasons if reason.startswith((Verdict.STOP.name, FAILED))]
        return stops[-1].partition(": ")[2] if stops else "asked to stop", any(reason.startswith(FAILED) for reason in stops)

    @property
    def skipped_at(self) -> int:
        """The newest step known here to be skipped by a verdict; 0 for none. On a GPU that of the last step is not known yet."""
        if self._late is not None and not isinstance(self._late[0], Tensor) and self._late[0][Verdict.SKIP] > 0:
            return self._late[2]
        return self._skipped_at

    def flags(self) -> list[float] | None:
        """This rank's requests for the step under way, taken once; None when there is none."""
        if not any(self._flags):
            return None
        flags, self._flags = self._flags, [0.0] * NUM_VERDICTS
        return flags

    def settle(self, verdict: Tensor, drain: bool) -> Verdict:
        """Post the agreed counters [5] of this step, and return the verdict of the step before.

        `drain` waits for this step's as well, and returns the larger: before a save, an evaluation and the end.
        SKIP is never returned: it was settled on the device. A STOP agreed together with a ROLL_BACK is asked for again,
        by all ranks, and so follows it a step later.
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
            self._late = (host, event, self.step)
        else:
            self._late = (verdict.tolist(), None, self.step)

    def _read(self) -> Verdict:
        """The verdict posted last, waited for if need be; GO if there is none."""
        if self._late is None:
            return Verdict.GO
        host, event, step = self._late
        self._late = None
        if event is not None:
            event.synchronize()
        counts = host.tolist() if isinstance(host, Tensor) else host
        if counts[Verdict.SKIP] > 0:
            self._skipped_at = step
        if counts[Verdict.ROLL_BACK] > 0 and counts[Verdict.STOP] > 0:
            self._flags[Verdict.STOP] = 1.0
        return next((verdict for verdict in (Verdict.ROLL_BACK, Verdict.STOP, Verdict.SAVE) if counts[verdict] > 0), Verdict.GO)

    def state_dict(self) -> dict[str, Any]:
        """Position as integers, and what is owed to it; read only at a save, after draining."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "owes_evaluation": self.owes_evaluation,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the position of `state_dict`."""
        self.step, self.epoch, self.step_in_epoch = state["step"], state["epoch"], state["step_in_epoch"]
        self.owes_evaluation = bool(state.get("owes_evaluation", False))
