"""Curves in Weights & Biases, without the run ever waiting for it."""

from __future__ import annotations

import dataclasses
import logging
import netrc
import os
import queue
import re
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from disttrain.callbacks.wandb_models import Models
from disttrain.errors import ConfigError
from disttrain.record import RunFolder
from disttrain.secrecy import REDACTED, SECRET
from disttrain.texts import read_json, write_json
from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer

_log = logging.getLogger(__name__)
_MODES = ("auto", "online", "offline", "disabled")
_REDACTED = REDACTED
_SWEEP_FOLDER = re.compile(r"\d\d-\d\d-\d\d-\w+")
_SEEN = "seen.json"
_FLUSH = "x_transaction_log_flush_interval"
_FLUSH_SECONDS = 1.0
_PACE_SECONDS = 0.5


class WandB(Callback):
    """One W&B run for one run folder, from rank 0, in its `wandb/`.

    A thread of its own imports W&B and opens the run beside the first steps, then sends the rows that queue up. So
    neither import nor network costs a step, and a W&B that fails costs a warning. A row takes a quarter of a
    millisecond of the interpreter, so rows are sent at an even pace while steps run, and what is left at the end.
    Without a login it works offline (`wandb sync` sends it later) and never asks.
    """

    def __init__(
        self,
        project: str = "disttrain",
        mode: str | None = "auto",
        entity: str | None = None,
        group: str | None = None,
        notes: str | None = None,
        open_seconds: float = 60.0,
        finish_seconds: float = 60.0,
        log_model: bool | str = False,
        all_ranks: bool = False,
    ) -> None:
        """`mode`: auto or null (WANDB_MODE if set, else online where logged in, else offline) | online | offline | disabled.

        `group`: by default the jobs of a sweep are one. `open_seconds`, `finish_seconds`: how long to wait for the
        server before going on offline, and at the end of the run. `log_model`: checkpoints become artifacts, true: the
        last one, all: each. `all_ranks`: every rank has a run of its own in the group, for W&B's system metrics of its
        process and device. ConfigError for `online` without a login, and for another `log_model`.
        """
        if log_model not in (True, False, "all"):
            raise ConfigError(f"callbacks.wandb.log_model is '{log_model}'; it may be true, false, all", "callbacks.wandb.log_model=true")
        mode = mode or "auto"
        if mode not in _MODES:
            raise ConfigError(f"callbacks.wandb.mode is '{mode}'; it may be {', '.join(_MODES)}", "callbacks.wandb.mode=offline")
        self.mode = resolve_mode(mode)
        if self.mode == "online" and not logged_in():
            raise ConfigError("W&B is to be online, and nobody is logged in", "callbacks.wandb.mode=offline, or first: wandb login")
        self.project, self.entity, self.group, self.notes = project, entity, group, notes
        self.open_seconds, self.finish_seconds = open_seconds, finish_seconds
        self.log_model, self.all_ranks = log_model, all_ranks
        given = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None  # by the agent of a W&B sweep
        self.id = given or secrets.token_hex(4)
        self._first = 0
        """Step from which this start of the run goes on."""
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float]] | int] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._models: Models | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin to open the run."""
        self._first = trainer.progress.step
        if trainer.folder is None or self.mode == "disabled" or not (trainer.is_lead or self.all_ranks):
            return
        arguments = self._arguments(trainer, trainer.folder)
        seen = trainer.folder.subfolder("wandb") / _SEEN
        if trainer.is_lead:
            self._models = Models(trainer.folder, self.log_model) if self.log_model else None
        else:
            arguments, seen = _of_rank(arguments, trainer.mesh.rank), seen.with_name(f"seen-{trainer.mesh.rank}.json")
        self._thread = threading.Thread(target=self._work, args=(arguments, seen), name="wandb", daemon=True)
        self._thread.start()

    def on_log(self, trainer: Trainer, row: Mapping[str, float]) -> None:
        """Hand the row to the thread."""
        if self._thread is not None and trainer.is_lead:
            self._rows.put((trainer.progress.step, dict(row)))

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Mark the run as failed."""
        self._finish(exit_code=1)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Send what is left and close the run."""
        self._finish(exit_code=0)

    def state_dict(self) -> dict[str, Any]:
        """The run's id, so that a resume goes on with the same curves."""
        return {"id": self.id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the run of before."""
        self.id = str(state["id"])

    def _arguments(self, trainer: Trainer, folder: RunFolder) -> dict[str, Any]:
        config = trainer.config
        in_sweep = _SWEEP_FOLDER.fullmatch(folder.path.parent.name) is not None
        name = config.run_name if config is not None else folder.path.name
        return {
            "project": self.project,
            "entity": self.entity,
            "notes": self.notes,
            "mode": self.mode,
            "id": self.id,
            "resume": "allow",
            "name": f"{name}-{folder.path.name}" if in_sweep else name,
            "group": self.group or (folder.path.parent.name if in_sweep else folder.path.name if self.all_ranks else None),
            "tags": list(config.tags) if config is not None else None,
            "config": plain(config) if config is not None else None,
            "dir": str(folder.path),
        }

    # --- the thread ------------------------------------------------------------------------------------------------

    def _work(self, arguments: dict[str, Any], seen: Path) -> None:
        """Open, send rows until the end comes, close. Nothing that goes wrong here reaches the training."""
        try:
            run = self._open(arguments)
            exit_code, last = self._send(run, seen)
            if self._models is not None:
                self._models.send(run, is_last=True)
            run.finish(exit_code=exit_code)
            self._note(seen, last)
            _end_service()
        except Exception as error:
            _log.warning("W&B gave up, and the run goes on without it: %s: %s", type(error).__name__, error)

    def _open(self, arguments: dict[str, Any]) -> Any:
        """The run, with `step` as the one x axis; offline if the server does not answer in time."""
        import wandb

        try:
            run = wandb.init(**arguments, settings=self._settings(wandb))
        except wandb.errors.CommError as error:
            _log.warning("W&B does not answer (%s); this run is kept offline, `wandb sync` sends it later", error)
            run = wandb.init(**arguments | {"mode": "offline"}, settings=self._settings(wandb))
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        predicted = (arguments["config"] or {}).get("predicted") or {}
        run.summary.update({f"predicted/{name}": value for name, value in predicted.items()})  # beside what is measured
        if not run.offline:
            _log.info("W&B: %s", run.url)
        return run

    def _settings(self, wandb: Any) -> Any:
        """Silent, without its own copy of the terminal; no command line in the record where one holds a secret.

        Rows reach the file within a second: W&B's own fifteen are lost when this rank is killed.
        """
        hidden = any(SECRET.search(argument.partition("=")[0]) for argument in sys.argv)
        flush = {_FLUSH: _FLUSH_SECONDS} if _FLUSH in wandb.Settings.model_fields else {}
        return wandb.Settings(console="off", silent=True, init_timeout=self.open_seconds, x_disable_meta=hidden, **flush)

    def _send(self, run: Any, seen: Path) -> tuple[int, int]:
        """Log rows in the order they come, from the first step that W&B has not seen; the exit code that ends them, and the last step."""
        known = read_json(seen) or {}
        last = max(int(known["step"]) if known.get("id") == self.id else -1, run.starting_step - 1)
        noted_at, noted_next = time.monotonic(), last
        while not isinstance(item := self._rows.get(), int):
            step, row = item
            if step == last == self._first:  # an evaluation that a stop cut off: W&B has the step, and takes it with the next
                run.log({"step": step, **row}, step=step + 1, commit=False)
            if step <= last:
                continue
            run.log({"step": step, **row}, step=step, commit=True)
            last = step
            if self._models is not None:
                self._models.send(run, is_last=False)
            if time.monotonic() - noted_at >= 2 * _FLUSH_SECONDS:  # what was logged by the last note has been flushed since
                self._note(seen, noted_next)
                noted_at, noted_next = time.monotonic(), last
            self._ending.wait(_PACE_SECONDS)
        return item, last

    def _note(self, seen: Path, step: int) -> None:
        """Remember, beside W&B's files, up to where they surely go."""
        write_json(seen, {"id": self.id, "step": step})

    def _finish(self, exit_code: int) -> None:
        if self._thread is None:
            return
        self._rows.put(exit_code)
        self._ending.set()
        self._thread.join(self.open_seconds + self.finish_seconds)
        if self._thread.is_alive():
            _log.warning("W&B has not ended within %g s; what it has lies in the run folder's wandb/", self.finish_seconds)
        self._thread = None


def _of_rank(arguments: dict[str, Any], rank: int) -> dict[str, Any]:
    """Arguments of the run that holds the system metrics of `rank` and nothing else."""
    return arguments | {"id": f"{arguments['id']}-{rank}", "name": f"{arguments['name']}-rank-{rank}", "job_type": "rank", "config": None}


def _end_service() -> None:
    """End W&B's helper process, unless the program has other runs open (a notebook's)."""
    import wandb

    if wandb.run is None:
        wandb.teardown()


def resolve_mode(mode: str) -> str:
    """What `auto` means here: WANDB_MODE if it is set, online where somebody is logged in, else offline. No network."""
    if mode != "auto":
        return mode
    told = os.environ.get("WANDB_MODE", "").lower()
    if told:
        return {"dryrun": "offline", "run": "online"}.get(told, told)
    return "online" if logged_in() else "offline"


def logged_in() -> bool:
    """Whether W&B would find a key without asking: in the environment or in the netrc file, under its server's name."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    given = os.environ.get("NETRC")
    for path in [given] if given else [os.path.expanduser("~/.netrc"), os.path.expanduser("~/_netrc")]:
        try:
            entry = netrc.netrc(path).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if entry is not None and entry[2]:
            return True
    return False


def plain(value: Any, name: str = "") -> Any:
    """A config as nested mappings, lists and plain values; what looks like a secret by its name is left out."""
    if SECRET.search(name) and value is not None:
        return _REDACTED
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(_resolved(value, key), str(key)) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _resolved(mapping: Mapping[Any, Any], key: Any) -> Any:
    """The value of `key`, or, where an interpolation in it leads nowhere, its text."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return mapping[key]
    except OmegaConfBaseException:
        return OmegaConf.to_container(mapping, resolve=False)[key]  # type: ignore[index]
