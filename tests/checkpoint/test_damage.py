"""A byte that changed, a file that is cut off or gone: told by name, and the checkpoint before it is taken."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from disttrain.checkpoint.files import MANIFEST, problems
from disttrain.checkpoint.load import latest_good, load
from disttrain.checkpoint.save import save
from disttrain.checkpoint.state import State
from disttrain.errors import CheckpointError
from disttrain.parallel.layout import Layout
from disttrain.parallel.mesh import Mesh

NUM_FLIPS = 1000


def state(filled: bool = True) -> State:
    """Odd sizes and several types, so that offsets and padding differ."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model/weight": torch.randn(7, 5, generator=generator),
        "model/half": torch.randn(3, generator=generator).bfloat16(),
        "optimizer/weight/exp_avg": torch.randn(7, 5, generator=generator, dtype=torch.float64),
        "optimizer/weight/step": torch.tensor(3, dtype=torch.int64),
        "callbacks/mine/flags": torch.tensor([True, False, True]),
    }
    held = {name: (tensor if filled else torch.zeros_like(tensor), Layout(tuple(tensor.shape))) for name, tensor in tensors.items()}
    values = {"progress": {"step": 2}, "lr": 0.1, "note": 'a "quoted" ü', "by_rank": [1, 2], "by_name": {"optimizer": {"weight": {"n": 1}}}}
    return State(held, values if filled else {})


def bits(state: State) -> tuple[list[bytes], object]:
    return [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor, _ in state.tensors.values()], state.values


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(state(), tmp_path / "checkpoints" / f"step-{step}", Mesh())
    return tmp_path


def read(folder: Path) -> tuple[list[bytes], object]:
    found = state(filled=False)
    load(found, folder, Mesh())
    return bits(found)


def test_every_flipped_byte_is_found_or_harmless(run: Path) -> None:
    """1,000 places drawn over all files, each changed to another value."""
    folder, draw = run / "checkpoints" / "step-2", random.Random(0)
    whole = read(folder)
    places = [(path, place) for path in sorted(folder.rglob("*")) if path.is_file() for place in range(path.stat().st_size)]
    assert len(places) > NUM_FLIPS
    harmless: Counter[str] = Counter()
    for path, place in draw.sample(places, NUM_FLIPS):
        plain = path.read_bytes()
        path.write_bytes(plain[:place] + bytes([plain[place] ^ draw.randrange(1, 256)]) + plain[place + 1 :])
        wrong = problems(folder)
        if not wrong:
            assert read(folder) == whole
            harmless[path.name] += 1
        elif path.name != MANIFEST:
            assert path.name in wrong[0], (wrong, path)
        path.write_bytes(plain)
    assert harmless.keys() <= {MANIFEST}, "what a checksum covers is always found"
    assert read(folder) == whole


def test_each_file_that_is_cut_off_or_gone_is_named_and_the_one_before_is_taken(run: Path) -> None:
    folder = run / "checkpoints" / "step-2"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) == 5
    for path in files:
        plain = path.read_bytes()
        for keep in (0, 7, len(plain) // 2, len(plain) - 1, None):
            path.unlink()
            if keep is not None:
                path.write_bytes(plain[:keep])
            found = latest_good(run)
            assert found.folder == run / "checkpoints" / "step-1", (path, keep)
            (note,) = found.passed_over
            assert note.startswith("step-2 is passed over: ")
            assert path.name in note
            with pytest.raises(CheckpointError, match=path.name):
                read(folder)
        path.write_bytes(plain)
    assert latest_good(run).passed_over == []


def test_a_folder_in_a_files_place_is_damage(run: Path) -> None:
    path = run / "checkpoints" / "step-2" / "state.json"
    path.unlink()
    path.mkdir()
    assert latest_good(run).folder == run / "checkpoints" / "step-1"
    shutil.rmtree(run / "checkpoints" / "step-1")
    assert latest_good(run).folder is None
