"""A sweep in which a wrong job fails alone.

Hydra's basic sweeper composes a whole batch before the first job, so that one wrong choice runs none, and tells of
a failed job at the end. This one composes and checks every job first and says at once which are wrong, then runs
the others one after the other, says at once what failed, goes on, and ends with a table. With another launcher
than Hydra's basic one, the sound jobs are handed over together.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, run_job
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from disttrain.config.overrides import close
from disttrain.errors import UserError
from disttrain.places import not_made
from disttrain.texts import write_json

USER_ERROR, FAILED = 2, 1
STOPPED = (130, 143)
"""Exit codes after which the sweep starts no further job."""

Validate = Callable[[DictConfig], object]
"""Settle and check a composed job, and set its output folder; raises UserError."""


@dataclass
class Job:
    """One job of a sweep and how it ended."""

    number: int
    name: str
    """The overrides that tell it from the others, as typed."""
    words: list[str]
    folder: str
    exit_code: int = 0
    reason: str = ""


class JobSweeper:
    """The grid of Hydra's basic sweeper, each job on its own."""

    def __init__(self, context: HydraContext, task: TaskFunction, config: DictConfig, validate: Validate) -> None:
        """`config` is the sweep's own, composed without the values that are swept over."""
        self.context = context
        self.task = task
        self.config = config
        self.validate = validate
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
        self.folder = str(config.hydra.sweep.dir)

    def sweep(self, arguments: Sequence[str]) -> list[Job]:
        """Run every point of the grid; returns the jobs in order."""
        # Hydra runs these modules once more when it looks for plugins, so their classes are others before that.
        from hydra._internal.core_plugins.basic_launcher import BasicLauncher
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        options = self.config.hydra.sweeper
        words = [f"{key}={value}" for key, value in (options.params or {}).items()] + list(arguments)
        parser = OverridesParser.create(config_loader=self.context.config_loader)
        (grid,) = BasicSweeper.split_arguments(parser.parse_overrides(words), None)
        common = set.intersection(*(set(point) for point in grid))
        jobs = []
        for number, point in enumerate(grid):
            name = " ".join(close(word) for word in point if word not in common)
            jobs.append(Job(number, name or "(all the same)", list(point), os.path.join(self.folder, str(number))))
        if isinstance(self.launcher, BasicLauncher):
            self._one_by_one(jobs)
        else:
            self._together(jobs)
        return jobs

    def _one_by_one(self, jobs: list[Job]) -> None:
        for job, composed in [(job, self._compose(job, job.number)) for job in jobs]:
            if composed is not None:
                self._run(job, composed)
            _store(jobs)
            if job.exit_code in STOPPED:
                for rest in jobs[job.number + 1 :]:
                    rest.exit_code, rest.reason = job.exit_code, "not started"
                return

    def _run(self, job: Job, composed: DictConfig) -> None:
        try:
            returned = run_job(
                hydra_context=self.context,
                task_function=self.task,
                config=composed,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
        except OSError as error:  # of the job's folder, which Hydra makes; what the task raises is in `returned`
            self._refuse(job, not_made(error))
        else:
            _take(job, returned)

    def _together(self, jobs: list[Job]) -> None:
        """Sound jobs first, so that the launcher's numbers are theirs; wrong ones take the numbers behind them."""
        sound: list[Job] = []
        wrong: list[Job] = []
        for job in jobs:
            (wrong if self._compose(job, len(sound), record=False) is None else sound).append(job)
        for number, job in enumerate([*sound, *wrong]):
            job.number = number
        for job in wrong:
            self._record(job)
        size = self.config.hydra.sweeper.max_batch_size or max(1, len(sound))
        for start in range(0, len(sound), size):
            batch = sound[start : start + size]
            returns: Sequence[JobReturn] = self.launcher.launch([job.words for job in batch], initial_job_idx=start)
            for job, returned in zip(batch, returns, strict=True):
                _take(job, returned)
        _store(jobs)

    def _compose(self, job: Job, number: int, record: bool = True) -> DictConfig | None:
        """The job's composed config, or None if it is wrong: then it has failed, and been told of."""
        try:
            composed = self.context.config_loader.load_sweep_config(self.config, job.words)
            with open_dict(composed.hydra):
                composed.hydra.job.id = composed.hydra.job.num = number
                composed.hydra.sweep.dir = self.folder
            self.validate(composed)
        except UserError as error:
            self._refuse(job, error, record)
            return None
        job.folder = str(composed.hydra.runtime.output_dir)
        return composed

    def _refuse(self, job: Job, error: UserError, record: bool = True) -> None:
        job.exit_code, job.reason = USER_ERROR, str(error)
        print(f"job {job.number} ({job.name}) is wrong:\n{error}", file=sys.stderr, flush=True)
        if record:
            self._record(job)

    def _record(self, job: Job) -> None:
        """A job that never began still has a folder, with its message."""
        folder = Path(self.folder, str(job.number))
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
        words = list(one.overrides or ())
        jobs.append(Job(number, " ".join(words), words, str(one.working_dir)))
        _take(jobs[-1], one)
    return jobs


def _store(jobs: Sequence[Job]) -> None:
    """sweep.json beside the jobs' folders: which is which, and how each ended so far."""
    rows = [
        {"job": Path(j.folder).name, "overrides": [close(word) for word in j.words], "exit_code": j.exit_code, "reason": j.reason}
        for j in jobs
    ]
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
