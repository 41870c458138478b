"""E04: wherever a save is cut off or fails, the newest good checkpoint loads; experiments/crash_safety tries every place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disttrain.checkpoint import files
from disttrain.checkpoint.save import Saver, save
from disttrain.launch.place import alone
from experiments.crash_safety import inject


@pytest.mark.parametrize("fault", inject.FAULTS)
@pytest.mark.parametrize("step", [1, 2], ids=["the same step again", "a later step"])
def test_a_save_that_goes_wrong_anywhere_leaves_a_whole_state(fault: str, step: int) -> None:
    cases = inject.cases_of(1, (fault,), (step,))
    found = [inject.run_case(case, 1) for case in cases[inject.FAULTS.index(fault) :: 6]]
    assert found == sorted(found), "once the later state can be found, it stays so"
    assert found[0] == "earlier"


@pytest.mark.long
@pytest.mark.world(2)
@pytest.mark.parametrize("fault", inject.FAULTS)
def test_nor_does_one_of_two_ranks(fault: str) -> None:
    cases = inject.cases_of(2, (fault,))
    assert {inject.run_case(case, 2) for case in cases} == {"earlier", "later"}


def test_nothing_gets_its_name_before_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power failure may lose is what no fsync has asked for."""
    told: list[tuple[str, str]] = []

    def watch(name: str, path_of: Callable[..., str]) -> None:
        plain = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            told.append((name, path_of(*arguments)))
            return plain(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    def path_of(file: int, *_: Any) -> str:
        return os.readlink(f"/proc/self/fd/{file}")

    watch("write", path_of)
    watch("fsync", path_of)
    watch("rename", lambda before, after: str(after))
    mesh = inject.mesh_of(alone())
    saver = Saver(tmp_path / "checkpoints", mesh)
    saver.save(inject.state_of(mesh, 1.0), 1)
    assert [saved.error for saved in saver.drain()] == [None]
    saver.close()
    (at,) = [number for number, what in enumerate(told) if what == ("rename", str(tmp_path / "checkpoints" / "step-1"))]
    written = {path: number for number, (name, path) in enumerate(told[:at]) if name == "write" and "receipts" not in path}
    flushed = {path: number for number, (name, path) in enumerate(told[:at]) if name == "fsync"}
    assert len(written) == 4
    for path, number in written.items():
        assert flushed[path] > number, path
        assert flushed[str(Path(path).parent)] > flushed[path], f"the name of {path}"
    assert ("fsync", str(tmp_path / "checkpoints")) in told[at:], "the name itself"


def test_one_that_was_moved_aside_still_counts(tmp_path: Path) -> None:
    mesh = inject.mesh_of(alone())
    for step in (1, 2):
        save(inject.state_of(mesh, inject.EARLIER), tmp_path / "checkpoints" / f"step-{step}", mesh)
    (tmp_path / "checkpoints" / "step-2").rename(tmp_path / "checkpoints" / ".step-2.old")
    assert files.steps_in(tmp_path / "checkpoints") == [1, 2]
    assert inject.read_back(alone(), tmp_path) == inject.EARLIER
