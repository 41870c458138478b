"""Checkpoints as artifacts of a W&B run, sent by W&B's own thread."""

from __future__ import annotations

import logging
from typing import Any

from disttrain.checkpoint.files import steps_in
from disttrain.places import is_remote
from disttrain.record import RunFolder

_log = logging.getLogger(__name__)


class Models:
    """The complete checkpoints of a run folder, each sent once: the last one at the end, or `all` of them as they come."""

    def __init__(self, folder: RunFolder, which: bool | str) -> None:
        self.folder, self.which = folder, which
        self._sent = set(steps_in(folder.checkpoints))
        """An earlier start has sent these."""

    def send(self, run: Any, is_last: bool) -> None:
        """Send what is new; of a run that wants its last one only, at the end. A checkpoint that was removed meanwhile is left out."""
        new = [step for step in sorted(steps_in(self.folder.checkpoints)) if step not in self._sent]
        if self.which != "all":
            new = new[-1:] if is_last else []
        for step in new:
            try:
                run.log_artifact(self._artifact(run.id, step), aliases=["latest", f"step-{step}"])
            except (OSError, ValueError) as error:
                _log.warning("the checkpoint of step %d is not sent to W&B: %s", step, error)
            self._sent.add(step)

    def _artifact(self, run_id: str, step: int) -> Any:
        """The checkpoint's files; of one in an object store, where it is."""
        import wandb

        artifact = wandb.Artifact(f"model-{run_id}", type="model", metadata={"step": step})
        place = self.folder.step_folder(step)
        if is_remote(place):
            artifact.add_reference(str(place), checksum=False)
        else:
            artifact.add_dir(str(place))
        return artifact
