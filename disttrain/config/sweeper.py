"""A sweep in which a wrong job fails alone.

Hydra's basic sweeper composes a whole batch before the first job, so that one wrong choice runs none, and tells of
a failed job at the end. This one composes, checks and runs job after job, says at once what failed, goes on, and
ends with a table. With another launcher than Hydra's basic one, the sound jobs are handed over together.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus, run_job
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from disttrain.config.overrides import close
from disttrain.errors import UserError
from disttrain.record import write_json

USER_ERROR, FAILED = 2, 1
STOPPED = (130, 143)
"""Exit codes after which the sweep starts no further job."""

Validate = Callable[[DictConfig, str], object]
"""Settle and check a composed job whose output folder is given; raises UserError."""


@dataclass
class Job:
    """One job of a sweep and how it ended."""

    number: int
    words: list[str]
    folder: str
    exit_code: int = 0
    reason: str = ""

    @property
    def name(self) -> str:
        """What tells it from the others, as typed."""
        return " ".join(map(close, self.words)) or "(no override)"


class JobSweeper(BasicSweeper):  # type: ignore[misc]
    """The grid of Hydra's basic sweeper, each job on its own."""

    def __init__(self, max_batch_size: int | None = None, params: Mapping[str, str] | None = None) -> None:
        super().__init__(max_batch_size, dict(params or {}))
        self.validate: Validate | None = None
        self.task_function: TaskFunction | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra's rules before `sweep`."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.task_function = task_function

    def sweep(self, arguments: list[str]) -> list[Job]:
        """Run every point of the grid; returns the jobs in order."""
        assert self.hydra_context is not None and self.config is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        words = [f"{key}={value}" for key, value in self.params.items()] + list(arguments)
        (grid,) = self.split_arguments(parser.parse_overrides(words), None)
        folder = str(self.config.hydra.sweep.dir)
        jobs = [Job(number, list(point), folder) for number, point in enumerate(grid)]
        if isinstance(self.launcher, BasicLauncher):
            self._one_by_one(jobs)
        else:
            self._together(jobs)
        return jobs

    def _one_by_one(self, jobs: list[Job]) -> None:
        for job in jobs:
            composed = self._compose(job, job.number)
            if composed is not None:
                assert self.hydra_context is not None and self.task_function is not None
                returned = run_job(
                    hydra_context=self.hydra_context,
                    task_function=self.task_function,
                    config=composed,
                    job_dir_key="hydra.sweep.dir",
                    job_subdir_key="hydra.sweep.subdir",
                )
                _take(job, returned)
            _store(jobs)
            if job.exit_code in STOPPED:
                for rest in jobs[job.number + 1 :]:
                    rest.exit_code, rest.reason = job.exit_code, "not started"
                return

    def _together(self, jobs: list[Job]) -> None:
        """Sound jobs first, so that the launcher's numbers are theirs; wrong ones take the numbers behind them."""
        assert self.launcher is not None
        sound: list[Job] = []
        wrong: list[Job] = []
        for job in jobs:
            (wrong if self._compose(job, len(sound), record=False) is None else sound).append(job)
        for number, job in enumerate([*sound, *wrong]):
            job.number = number
        for job in wrong:
            self._record(job)
        for start in range(0, len(sound), self.max_batch_size or max(1, len(sound))):
            batch = sound[start : start + (self.max_batch_size or len(sound))]
            returns: Sequence[JobReturn] = self.launcher.launch([job.words for job in batch], initial_job_idx=start)
            for job, returned in zip(batch, returns, strict=True):
                _take(job, returned)
        _store(jobs)

    def _compose(self, job: Job, number: int, record: bool = True) -> DictConfig | None:
        """The job's composed config, or None if it is wrong: then it has failed, and been told of."""
        assert self.hydra_context is not None and self.config is not None and self.validate is not None
        try:
            composed = self.hydra_context.config_loader.load_sweep_config(self.config, job.words)
            with open_dict(composed.hydra):
                composed.hydra.job.id = composed.hydra.job.num = number
            job.folder = os.path.join(str(composed.hydra.sweep.dir), str(number))
            self.validate(composed, os.path.join(str(composed.hydra.sweep.dir), str(composed.hydra.sweep.subdir)))
        except UserError as error:
            job.exit_code, job.reason = USER_ERROR, str(error)
            print(f"job {job.number} ({job.name}) is wrong:\n{error}", file=sys.stderr, flush=True)
            if record:
                self._record(job)
            return None
        job.folder = str(composed.hydra.runtime.output_dir)
        return composed

    def _record(self, job: Job) -> None:
        """A job that never began still has a folder, with its message."""
        assert self.config is not None
        folder = Path(str(self.config.hydra.sweep.dir)) / str(job.number)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "logs" / "rank-0.log").write_text(f"{job.reason}\n", encoding="utf-8")
        write_json(folder / "result.json", {"status": "user_error", "exit_code": job.exit_code, "reason": job.reason})
        job.folder = str(folder)


def _take(job: Job, returned: JobReturn) -> None:
    """How a job that was run ended: as its outcome says, or as what it raised."""
    if returned.status is JobStatus.COMPLETED:
        job.exit_code, job.reason = returned.return_value.exit_code, returned.return_value.reason
    else:
        error = returned._return_value  # `return_value` would print and raise
        job.exit_code = USER_ERROR if isinstance(error, UserError) else FAILED
        job.reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, UserError):
            logging.getLogger(__name__).error("job %d failed", job.number, exc_info=error)
    if job.exit_code:
        first = job.reason.splitlines()[0] if job.reason else f"exit code {job.exit_code}"
        print(f"job {job.number} ({job.name}) failed: {first}", file=sys.stderr, flush=True)


def jobs_of(returned: Any) -> list[Job]:
    """The jobs of a sweeper that is not ours, as far as it hands back what Hydra's basic one does (batches of returns)."""
    returns = [one for batch in returned or () for one in (batch if isinstance(batch, (list, tuple)) else [batch])]
    jobs = []
    for number, one in enumerate(one for one in returns if isinstance(one, JobReturn)):
        jobs.append(Job(number, list(one.overrides or ()), str(one.working_dir)))
        _take(jobs[-1], one)
    return jobs


def _store(jobs: Sequence[Job]) -> None:
    """sweep.json beside the jobs' folders: which is which, and how each ended so far."""
    rows = [{"job": Path(j.folder).name, "overrides": j.words, "exit_code": j.exit_code, "reason": j.reason} for j in jobs]
    write_json(Path(jobs[0].folder).parent / "sweep.json", rows)


def summary(jobs: Sequence[Job]) -> str:
    """The table at the end of a sweep: every job, how it ended, and why not well."""
    words = {0: "done", USER_ERROR: "wrong", FAILED: "failed", 130: "interrupted", 143: "preempted"}
    bad = [job for job in jobs if job.exit_code]
    lines = [f"{len(jobs)} jobs, {len(bad)} failed, in {os.path.dirname(jobs[0].folder)}"]
    for job in jobs:
        lines.append(f"  {job.number:>3}  {words.get(job.exit_code, 'failed'):<11}  {job.name}")
        if job.exit_code:
            lines.append(f"       {'':<11}  {job.reason.splitlines()[0] if job.reason else 'no reason given'}")
    return "\n".join(lines)


def exit_code(jobs: Sequence[Job]) -> int:
    """Of a whole sweep: stopped, failed in a run, wrong, or done."""
    codes = {job.exit_code for job in jobs}
    return next((code for code in (*STOPPED, FAILED, USER_ERROR) if code in codes), 0 if codes == {0} else FAILED)
