"""Any layout loads what any other saved, piece by piece; what does not fit or is damaged is refused by name."""

import json
import math
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from disttrain.checkpoint import files
from disttrain.checkpoint.files import problems, read_values
from disttrain.checkpoint.load import index_of, latest_good, load
from disttrain.checkpoint.save import save
from disttrain.checkpoint.state import State
from disttrain.errors import CheckpointError
from disttrain.launch.world import run_world
from disttrain.parallel.layout import Copy, Cut, Layout, Sum
from disttrain.parallel.mesh import Mesh


def run(body, degrees, *args):
    """[body(mesh, *args) of each rank] in a world of these degrees."""

    def entry(place):
        return body(Mesh(degrees, place.rank), *args)

    return run_world(entry, math.prod(degrees.values()), timeout_seconds=30)


QKV = Cut(0, (8, 4, 4))


def layouts(degrees):
    """A merged projection cut by segments, a row-cut matrix cut again over data, a copy, a scalar."""
    tp, shard = degrees.get("tp", 1), degrees.get("dp_outer", 1)
    axes = {"tp": tp, "data": shard}

    def made(shape, **placements):
        return Layout(shape, {axis: placement for axis, placement in placements.items() if axes[axis] > 1}, axes)

    return {
        "model/qkv.weight": made((16, 6), tp=QKV, data=Sum()),
        "model/out.weight": made((4, 8), tp=Cut(1), data=Cut(0)),
        "model/norm.weight": made((5,), tp=Copy(), data=Sum(done=True)),
        "optimizer/qkv.weight/exp_avg": made((16, 6), tp=QKV, data=Cut(0)),
        "optimizer/norm.weight/step": Layout(()),
    }


def whole(name, layout):
    """The true tensor: a different number at every place of every name."""
    count = 1
    for size in layout.shape:
        count *= size
    return (torch.arange(count, dtype=torch.float64) + 1000 * len(name)).reshape(layout.shape)


def local(tensor, layout, at):
    part = torch.zeros(layout.local_shape(at), dtype=tensor.dtype)
    for there, here in layout.pieces(at):
        part[here] = tensor[there]
    return part


def state_of(mesh, fill=True):
    state = State()
    for name, layout in layouts(mesh.degrees).items():
        tensor = local(whole(name, layout), layout, mesh.coordinate())
        state.tensors[name] = (tensor if fill else torch.full_like(tensor, torch.nan), layout)
    if fill:
        state.values = {"progress": {"step": 7}, "by_rank": {"rng": mesh.rank * 11}}
    return state


def save_here(mesh, folder):
    save(state_of(mesh), folder, mesh)
    return folder.is_dir() and not list(folder.parent.glob(f".{folder.name}.*"))


def load_here(mesh, folder):
    state = state_of(mesh, fill=False)
    notes = load(state, folder, mesh)
    wrong = [
        name
        for name, (tensor, layout) in state.tensors.items()
        if not torch.equal(tensor, local(whole(name, layout), layout, mesh.coordinate()))
    ]
    return wrong, state.values, notes


LAYOUTS = [{}, {"tp": 2}, {"dp_outer": 2}, {"tp": 2, "dp_outer": 2}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint by each layout."""
    folder = tmp_path_factory.mktemp("saved")
    for number, degrees in enumerate(LAYOUTS):
        assert all(run(save_here, degrees, folder / f"step-{number}"))
    return folder


@pytest.mark.world(4)
@pytest.mark.parametrize("reader", LAYOUTS, ids=str)
def test_any_layout_loads_any_others(saved, reader):
    for number in range(len(LAYOUTS)):
        for wrong, values, _ in run(load_here, reader, saved / f"step-{number}"):
            assert wrong == []
            assert values["progress"] == {"step": 7}


def test_state_by_rank_comes_back_to_its_rank_and_only_in_the_same_world(saved):
    same = run(load_here, {"tp": 2}, saved / "step-2")
    assert [values["by_rank"] for _, values, _ in same] == [{"rng": 0}, {"rng": 11}]
    (_, values, notes), *_ = run(load_here, {}, saved / "step-2")
    assert "by_rank" not in values
    assert "2 ranks and this run has 1" in notes[0]


def test_each_element_is_written_once(saved):
    for number in range(len(LAYOUTS)):
        written = Counter()
        for file in (saved / f"step-{number}").rglob("*.safetensors"):
            for key, piece in load_file(file).items():
                written[f"{file.parent.name}/{key.split('[')[0]}"] += piece.numel()
        assert written == {name: torch.Size(layout.shape).numel() for name, layout in layouts({}).items()}


def test_one_device_writes_plain_names_that_safetensors_reads_alone(saved):
    tensors = load_file(saved / "step-0" / "model" / "rank-0.safetensors")
    assert set(tensors) == {"qkv.weight", "out.weight", "norm.weight"}
    assert torch.equal(tensors["out.weight"], whole("model/out.weight", layouts({})["model/out.weight"]))


def test_no_file_is_a_pickle(saved):
    for file in (saved / "step-3").rglob("*"):
        assert file.is_dir() or file.suffix in {".safetensors", ".json"}


def test_weights_alone(saved):
    state = state_of(Mesh(), fill=False)
    state.values = {"mine": 1}
    load(state, saved / "step-3", Mesh(), kinds={"model"})
    assert not state.tensors["model/norm.weight"][0].isnan().any()
    assert state.tensors["optimizer/norm.weight/step"][0].isnan()
    assert state.values == {"mine": 1}


def test_a_cut_piece_is_keyed_by_its_place(saved):
    pieces = index_of(saved / "step-1")["model/out.weight"].pieces
    assert [(piece.key, piece.offsets) for piece in pieces] == [("out.weight[0:4,0:4]", (0, 0)), ("out.weight[0:4,4:8]", (0, 4))]


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved / "step-0", tmp_path / "checkpoints" / "step-5")
    return tmp_path / "checkpoints" / "step-5"


def test_missing_and_unknown_names_are_named(copy):
    state = state_of(Mesh(), fill=False)
    state.tensors["model/new.weight"] = (torch.zeros(2), Layout((2,)))
    del state.tensors["optimizer/norm.weight/step"]
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: model/new\.weight; not in this run: optimizer/norm\.weight/step"):
        load(state, copy, Mesh())


def test_another_shape_is_named(copy):
    state = state_of(Mesh(), fill=False)
    state.tensors["model/norm.weight"] = (torch.zeros(6), Layout((6,)))
    with pytest.raises(CheckpointError, match=r"model/norm\.weight has shape \[6\] here and \[5\] in the checkpoint"):
        load(state, copy, Mesh())


def test_a_callback_may_come_or_go(copy):
    state = state_of(Mesh(), fill=False)
    state.tensors["callbacks/ema/shadow/norm.weight"] = (torch.ones(5), Layout((5,)))
    (note,) = load(state, copy, Mesh())
    assert "callbacks/ema/shadow/norm.weight is not in the checkpoint" in note


def test_a_flipped_bit_is_found_by_all_ranks(copy):
    file = copy / "model" / "rank-0.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    for error in run(load_error, {"tp": 2}, copy):
        assert "model/rank-0.safetensors is damaged" in error


def load_error(mesh, folder):
    try:
        load(state_of(mesh, fill=False), folder, mesh)
    except CheckpointError as error:
        return error.message
    return None


def test_latest_good_passes_over_what_is_cut_off_and_says_so(saved, copy):
    checkpoints = copy.parent
    for step, file in ((6, "manifest.json"), (7, "state.json"), (8, None)):
        shutil.copytree(copy, checkpoints / f"step-{step}")
        if file:
            (checkpoints / f"step-{step}" / file).unlink()
    (checkpoints / "step-8" / "optimizer" / "rank-0.safetensors").write_bytes(b"short")
    (checkpoints / ".step-9.partial").mkdir()
    (checkpoints / "step-10.txt").touch()
    found = latest_good(checkpoints.parent)
    assert found.folder == copy
    assert [line.split()[0] for line in found.passed_over] == ["step-8", "step-7", "step-6"]
    assert "5 bytes instead of" in found.passed_over[0]
    assert "state.json is missing" in found.passed_over[1]
    assert latest_good(checkpoints).folder is None


def test_foreign_format_is_refused(copy):
    (copy / "manifest.json").write_text(json.dumps({"format": 99, "files": []}))
    assert "format 99" in problems(copy)[0]


def fail_on_one(mesh, folder):
    """The last rank's disk is full: nobody waits, all say why."""
    if mesh.rank == mesh.size - 1:
        files.write_blocks = _no_space
    try:
        save(state_of(mesh), folder, mesh)
    except OSError as error:
        return str(error)
    return None


def _no_space(path, folder, blocks):
    raise OSError(28, "No space left on device")


def test_a_full_disk_on_one_rank_fails_on_all_and_keeps_the_old_one(tmp_path):
    folder = tmp_path / "step-3"
    save(state_of(Mesh()), folder, Mesh())
    errors = run(fail_on_one, {"tp": 2}, folder)
    assert all("rank 1: [Errno 28] No space left" in error for error in errors), errors
    assert problems(folder) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    folder = tmp_path / "step-3"
    for value in (1, 2):
        save(State({"model/w": (torch.full((3,), float(value)), Layout((3,)))}, {"value": value}), folder, Mesh())
    assert read_values(folder) == {"value": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-3"]
