"""The run folder: the record of a run, which `report`, `doctor` and `resume` read and nothing else.

    config.yaml, config.1.yaml ...     resolved; a number for every time the run was resumed
    overrides.yaml, overrides.1.yaml   what was typed
    environment.json                   versions, machine, git commit and diff; no environment variables
    metrics.jsonl                      a row a log point
    ranks/rank-<n>.json                a rank's step times, and a pipeline's timeline
    logs/rank-<n>.log
    checkpoints/step-<n>/              or checkpoints.url, which says where they are
    wandb/, tensorboard/
    result.json                        status, reason, exit code, final metrics

No secret is written into these (`secrecy`), and nothing that others may write to, whatever the umask.
Nothing in it names the folder's own absolute path: it can be moved. Rows and verdicts are strict JSON (`texts`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import yaml

from disttrain.errors import LaunchError
from disttrain.places import is_remote, new_folder, place_of
from disttrain.secrecy import redacted
from disttrain.texts import flat, read_mapping, read_yaml, row_of, strict, strict_json, write_text

_POINTER = "checkpoints.url"
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def followed_by(values: Mapping[str, float], row: Mapping[str, float]) -> dict[str, float]:
    """The last value of each metric after a further row: an evaluation takes the place of all that the one before had measured."""
    stays = values if "val/loss" not in row else {name: value for name, value in values.items() if not name.startswith("val/")}
    return {**stays, **row}


class RunFolder:
    """One run's folder. The parent makes it, ranks open the same path; only one process a file writes."""

    def __init__(self, path: Path | str) -> None:
        """Open the folder at `path`, which exists."""
        self.path = Path(path)
        self._metrics: IO[str] | None = None
        self._lock: int | None = None
        self._added: tuple[Path, ...] = ()
        self._result_before: dict[str, Any] = {}
        self._environment_before: Path | None = None

    @classmethod
    def make(cls, outputs: Path | str, job: Path | None = None) -> RunFolder:
        """A new folder under `outputs`, or at `job`, which may be there and hold logs. LaunchError if something else is in it."""
        if job is None:
            return cls(new_folder(Path(outputs)))
        job.mkdir(parents=True, exist_ok=True)
        if any(entry.suffix != ".log" for entry in job.iterdir()):  # Hydra's own log begins before the run does
            go_on = f"resume={job} to go on in it, or " if (job / "overrides.yaml").is_file() else ""
            raise LaunchError(f"{job} can't be the run folder: something is in it", f"{go_on}another hydra.run.dir")
        return cls(job)

    # --- where things lie -------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie, one folder a step: in it, or where `keep_checkpoints_at` has said."""
        pointer = self.path / _POINTER
        return place_of(pointer.read_text(encoding="utf-8").strip()) if pointer.is_file() else self.path / "checkpoints"

    @property
    def keeps_elsewhere(self) -> bool:
        """Whether checkpoints lie where `keep_checkpoints_at` has said."""
        return (self.path / _POINTER).is_file()

    def keep_checkpoints_at(self, place: str) -> str:
        """Checkpoints of this run go below `place`, under the run's name; where, if the run began with another place, is unchanged."""
        pointer = self.path / _POINTER
        if not is_remote(place):
            place = os.path.abspath(os.path.expanduser(place))
        if not pointer.is_file():
            write_text(pointer, f"{place.rstrip('/')}/{self.path.parent.name}/{self.path.name}\n")
        return pointer.read_text(encoding="utf-8").strip()

    def step_folder(self, step: int) -> Path:
        """The checkpoint of `step`; whether it exists is another question."""
        return self.checkpoints / f"step-{step}"

    def log_file(self, rank: int) -> Path:
        """The log of `rank`."""
        return self.path / "logs" / f"rank-{rank}.log"

    @property
    def metrics_file(self) -> Path:
        """One JSON row a log point."""
        return self.path / "metrics.jsonl"

    def store_of_rank(self, rank: int, found: Mapping[str, Any]) -> None:
        """Write what `rank` has kept for itself."""
        (self.path / "ranks").mkdir(exist_ok=True)
        write_text(self._rank_file(rank), json.dumps(strict(found), allow_nan=False) + "\n")

    def of_rank(self, rank: int) -> dict[str, Any]:
        """What `rank` has written for itself; empty if nothing."""
        return read_mapping(self._rank_file(rank))

    def ranks(self) -> list[int]:
        """Ranks that have written something for themselves."""
        return sorted(int(path.stem.removeprefix("rank-")) for path in (self.path / "ranks").glob("rank-*.json"))

    def subfolder(self, name: str) -> Path:
        """A folder of that name in it (`wandb`, `tensorboard`, `profile`, ...), made if need be."""
        (self.path / name).mkdir(exist_ok=True)
        return self.path / name

    # --- one run at a time ------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Keep other runs out until `unlock`, or until this process and the ranks it forked are gone.

        A file system without locks lets everybody in. Raises LaunchError if another run is writing here.
        """
        handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise LaunchError(
                f"the run folder {self.path} is in use by another run that is still alive",
                "wait for it or stop it, or leave out resume= to begin a new run",
            ) from None
        except OSError as error:
            os.close(handle)
            if error.errno not in _NO_LOCKS_HERE:
                raise
            return
        self._lock = handle

    def unlock(self) -> None:
        """Let others in. Ranks share the parent's lock, so this ends theirs too."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    # --- config and environment -------------------------------------------------------------------------------

    def store_config(self, text: str, overrides: Sequence[str]) -> dict[str, tuple[Any, Any]]:
        """Put the resolved config and what was typed beside those already here; none is overwritten.

        Returns {key: (value then, value now)} against the first one, with which the run began; empty for a new run.
        """
        before = next(iter(self._all("config")), None)
        number = len(self._all("config"))
        name = f".{number}" if number else ""
        text = self._portable(text)
        begun = {} if before is None else read_yaml(before, dict)
        self._result_before = self.result() if number else {}
        files = self.path / f"config{name}.yaml", self.path / f"overrides{name}.yaml"
        write_text(files[0], text, lasting=True)
        write_text(files[1], self._portable(yaml.safe_dump(list(overrides), allow_unicode=True)), lasting=True)
        self._added = files if number else ()
        if before is None:
            return {}
        old, new = (dict(flat(one)) for one in (begun, yaml.safe_load(text) or {}))
        absent = "(absent)"
        return {
            key: (old.get(key, absent), new.get(key, absent))
            for key in sorted(old.keys() | new.keys())
            if old.get(key, absent) != new.get(key, absent)
        }

    def take_back(self) -> bool:
        """Forget a resume that was refused: what it stored goes, the verdict of before returns.

        False for a run's first start, and for a resume that has put aside what came after the step that it went on from.
        """
        if not self._added or self.result().get("put_aside"):
            return False
        for file in self._added:
            file.unlink(missing_ok=True)
        if self._environment_before is not None:
            os.replace(self._environment_before, self.path / "environment.json")
        write_text(self.path / "result.json", strict_json(self._result_before), lasting=True)
        return True

    def config_text(self) -> str:
        """The newest resolved config; FileNotFoundError where there is none."""
        return self._config_file().read_text(encoding="utf-8")

    def config_values(self) -> dict[str, Any]:
        """The newest resolved config as plain data; ConfigError where it is damaged."""
        return read_yaml(self._config_file(), dict)

    def overrides(self) -> list[str]:
        """What was typed for the newest config of this run, stored overrides included."""
        newest = self._newest("overrides")
        return [] if newest is None else [str(one) for one in read_yaml(newest, list)]

    def store_environment(self, description: Mapping[str, Any]) -> None:
        """Write environment.json; one of an earlier start of the same run moves to environment.<n>.json."""
        current = self.path / "environment.json"
        if current.exists():
            number = 1 + len(list(self.path.glob("environment.*.json")))
            self._environment_before = self.path / f"environment.{number}.json"
            os.replace(current, self._environment_before)
        write_text(current, redacted(strict_json(description), code=True))

    # --- metrics ----------------------------------------------------------------------------------------------

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row to metrics.jsonl; it is on its way to the disk when this returns."""
        if self._metrics is None:
            self._drop_torn_line()
            self._metrics = self.metrics_file.open("a", encoding="utf-8")
        self._metrics.write(json.dumps(strict(row), allow_nan=False) + "\n")
        self._metrics.flush()

    def read(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl in order; lines that a crash has torn are left out."""
        return list(self._rows())

    def last_values(self) -> dict[str, float]:
        """The last value of each metric in metrics.jsonl."""
        values: dict[str, float] = {}
        for row in self._rows():
            values = followed_by(values, row)
        return {name: value for name, value in values.items() if name not in ("step", "perf/elapsed_seconds")}

    def cut_back(self, step: int) -> bool:
        """Drop the rows after `step`: the run goes on from there. Whether there were any."""
        if not self.metrics_file.exists():
            return False
        self.close()
        rows = list(self._rows())
        kept = [row for row in rows if row["step"] <= step]
        write_text(self.metrics_file, "".join(json.dumps(strict(row)) + "\n" for row in kept))
        return len(kept) < len(rows)

    def close(self) -> None:
        """Close metrics.jsonl; `append` opens it again."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    # --- verdict ----------------------------------------------------------------------------------------------

    def write_result(self, **fields: Any) -> None:
        """Set these fields of result.json (`status`, `reason`, `exit_code`, `metrics`, ...); others stay."""
        write_text(self.path / "result.json", redacted(strict_json(self.result() | fields)), lasting=True)

    def result(self) -> dict[str, Any]:
        """What result.json holds; `status` is 'running' while a run is alive, or was killed without a word."""
        return read_mapping(self.path / "result.json")

    # --- inside -----------------------------------------------------------------------------------------------

    def _config_file(self) -> Path:
        newest = self._newest("config")
        if newest is None:
            raise FileNotFoundError(f"{self.path} holds no config.yaml: it is not a run folder")
        return newest

    def _rank_file(self, rank: int) -> Path:
        return self.path / "ranks" / f"rank-{rank}.json"

    def _rows(self) -> Iterator[dict[str, Any]]:
        if not self.metrics_file.exists():
            return
        with self.metrics_file.open(encoding="utf-8", errors="replace") as lines:
            yield from (row for line in lines if line.endswith("\n") and (row := row_of(line)) is not None)

    def _drop_torn_line(self) -> None:
        """A line without its end was cut off by a crash: what is added must not be glued to it."""
        with contextlib.suppress(FileNotFoundError), self.metrics_file.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)

    def _all(self, stem: str) -> list[Path]:
        """`<stem>.yaml`, `<stem>.1.yaml`, ... as far as they go without a gap."""
        found: list[Path] = []
        while (path := self.path / (f"{stem}.{len(found)}.yaml" if found else f"{stem}.yaml")).exists():
            found.append(path)
        return found

    def _newest(self, stem: str) -> Path | None:
        return next(reversed(self._all(stem)), None)

    def _portable(self, text: str) -> str:
        """`text` without secrets, and without the folder's own absolute path, which a typed `resume=` may hold."""
        own = rf"(?<![\w.~-]){re.escape(str(self.path.resolve()))}(?=[/\s'\",\]}}):]|$)"  # not where it begins or ends another path
        return redacted(re.sub(own, ".", text))
