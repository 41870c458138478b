"""Which checkpoints of a run stay: the last few and the best few."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from disttrain.checkpoint.files import remove_tree, step_name
from disttrain.places import is_remote

_log = logging.getLogger(__name__)


class Retention:
    """Remembers the checkpoints that this run wrote, over resumes, and says which may go. Others' files are never named."""

    def __init__(self, keep_last: int | None, keep_best: int, mode: str) -> None:
        """`keep_last` None keeps all; `keep_best` by score, `mode` 'min' or 'max'."""
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.sign = 1.0 if mode == "min" else -1.0
        self.scores: dict[int, float | None] = {}
        self._under_way: set[int] = set()

    def add(self, step: int, score: float | None) -> None:
        """The checkpoint of `step` is being written; `score` is None where nothing was measured, or was NaN."""
        self.scores[step] = None if score is None or score != score else score
        self._under_way.add(step)

    def confirm(self, step: int) -> None:
        """The checkpoint of `step` exists."""
        self._under_way.discard(step)

    def drop(self, step: int) -> None:
        """The checkpoint of `step` does not exist."""
        self._under_way.discard(step)
        self.scores.pop(step, None)

    def best(self) -> list[int]:
        """Steps of the best `keep_best`, best first; of equals the earlier."""
        measured = [(self.sign * score, step) for step, score in self.scores.items() if score is not None and step not in self._under_way]
        return [step for _, step in sorted(measured)[: self.keep_best]]

    def expired(self) -> list[int]:
        """Steps that are neither among the last nor among the best, oldest first; they are forgotten.

        One that is still being written counts as neither: nothing goes before what takes its place is there.
        """
        if self.keep_last is None:
            return []
        steps = sorted(self.scores.keys() - self._under_way)
        kept = set(steps[len(steps) - min(self.keep_last, len(steps)) :]) | set(self.best())
        gone = [step for step in steps if step not in kept]
        for step in gone:
            del self.scores[step]
        return gone

    def state_dict(self) -> dict[str, Any]:
        """Steps and scores, as JSON."""
        return {"scores": [[step, score] for step, score in sorted(self.scores.items())]}

    def load_state_dict(self, state: dict[str, Any], until: int) -> None:
        """Take up `state_dict`, but not steps after `until`, which a resume has put aside."""
        self.scores = {int(step): score for step, score in state["scores"] if step <= until}
        self._under_way.clear()


def remove(checkpoints: Path, steps: list[int]) -> None:
    """Delete these checkpoints from the folder `checkpoints`; rank 0 alone. The name goes first: half of one never bears it."""
    for step in steps:
        folder = checkpoints / step_name(step)
        if is_remote(folder):
            remove_tree(folder)
            continue
        going = folder.with_name(f".{folder.name}.gone")
        shutil.rmtree(going, ignore_errors=True)
        try:
            if folder.exists():
                folder.rename(going)
        except OSError as error:
            _log.warning("%s is no longer needed and cannot be deleted: %s", folder, error)
        shutil.rmtree(going, ignore_errors=True)
