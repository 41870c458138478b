"""Checkpoints in an object store: in memory for the rules, on a real S3 server for the rest."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch

from disttrain import cli
from disttrain.checkpoint import files, writer
from disttrain.checkpoint.load import index_of, latest_good, load
from disttrain.checkpoint.retain import remove
from disttrain.checkpoint.save import save
from disttrain.checkpoint.state import State
from disttrain.config.overrides import find_weights
from disttrain.parallel.layout import Layout
from disttrain.parallel.mesh import Mesh
from disttrain.places import is_remote, place_of
from disttrain.record import RunFolder

pytest.importorskip("upath")


def state(value: float) -> State:
    return State({"model/w": (torch.full((6, 2), value), Layout((6, 2)))}, {"value": value})


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> RunFolder:
    """A run whose checkpoints lie in memory, under a name of this test's own."""
    folder = RunFolder(tmp_path)
    folder.keep_checkpoints_at(f"memory://{request.node.name}")
    return folder


def test_the_run_folder_knows_where_its_checkpoints_are(run: RunFolder, tmp_path: Path) -> None:
    where = run.checkpoints
    assert is_remote(where)
    assert where.name == tmp_path.name
    run.keep_checkpoints_at("memory://elsewhere")
    assert RunFolder(tmp_path).checkpoints == where, "a run that goes on does so where it began"
    assert place_of("a/b") == Path("a/b")


def test_written_found_read_let_go_and_put_aside(run: RunFolder) -> None:
    where = run.checkpoints
    for step in (1, 2, 3):
        save(state(float(step)), where / f"step-{step}", Mesh())
    assert files.steps_in(where) == [1, 2, 3]
    assert latest_good(run.path).folder == where / "step-3"
    found = state(-1.0)
    load(found, where / "step-3", Mesh())
    assert bool((found.tensors["model/w"][0] == 3.0).all())
    remove(where, [1])
    files.supersede(where, 2)
    assert files.steps_in(where) == [2]
    assert index_of(where / "superseded" / "step-3").keys() == {"model/w"}
    save(state(4.0), where / "step-3", Mesh())
    files.supersede(where, 2)
    assert sorted(one.name for one in (where / "superseded").iterdir()) == ["step-3", "step-3.1"]


def test_without_its_manifest_there_is_no_checkpoint(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given up is passed over, whatever it is called; what is damaged, too."""
    where = run.checkpoints
    save(state(1.0), where / "step-1", Mesh())
    monkeypatch.setattr(writer, "_seal", lambda job: (_ for _ in ()).throw(OSError("the store is gone")))
    with pytest.raises(OSError, match="the store is gone"):
        save(state(2.0), where / "step-2", Mesh())
    monkeypatch.undo()
    save(state(3.0), where / "step-3", Mesh())
    (where / "step-3" / "state.json").write_bytes(b"{}")
    found = latest_good(run.path)
    assert found.folder == where / "step-1"
    assert "state.json" in found.passed_over[0]


def test_receipts_of_a_run_before_are_not_this_ones(run: RunFolder) -> None:
    where = run.checkpoints
    (where / "step-1" / "receipts-00000000" / "rank-0.json").write_text('{"entries": [], "by_rank": null}')
    save(state(1.0), where / "step-1", Mesh())
    assert latest_good(run.path).folder == where / "step-1"
    found = state(-1.0)
    load(found, where / "step-1", Mesh())
    assert bool((found.tensors["model/w"][0] == 1.0).all())


# --- a real server ------------------------------------------------------------------------------------------------

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "open-sesame-99", "AWS_DEFAULT_REGION": "us-east-1"}
TINY = [
    *("launch.device=cpu", "dataset=synthetic", "model=transformer_block", "model.hidden_size=16", "model.num_heads=2"),
    *("dataset.shape=[8,16]", "dataset.num_samples=64", "callbacks=minimal", "train.eval_every=null"),
]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A bucket on moto's S3 server, which runs as a process of its own on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "import sys; from moto.server import main; main(sys.argv[1:])", "-H", "127.0.0.1", "-p", str(port)]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | CREDENTIALS)
    url = f"http://127.0.0.1:{port}"
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url}.items():
        monkeypatch.setenv(name, value)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urlopen(f"{url}/moto-api/data.json", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "server.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.2)
        place_of("s3://bucket").mkdir()
        yield "s3://bucket/runs"
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()


@pytest.mark.service
@pytest.mark.world(2)
@pytest.mark.filterwarnings("default::DeprecationWarning:botocore.*", "default::ResourceWarning")
def test_a_run_saves_to_s3_resumes_from_it_and_falls_back(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("moto")
    monkeypatch.chdir(tmp_path)
    words = ["strategy=ddp", "launch.world_size=2", "train.steps=6", "callbacks.checkpoint.every=2", "callbacks.checkpoint.keep_last=2"]
    assert cli.main([*TINY, "callbacks=[minimal,checkpoint]", *words, f"callbacks.checkpoint.path={s3}"]) == 0
    (run,) = (tmp_path / "outputs").glob("*/*")
    where = RunFolder(run).checkpoints
    assert str(where) == f"{s3}/{run.parent.name}/{run.name}"
    assert not (run / "checkpoints").exists()
    assert files.steps_in(where) == [4, 6]
    assert {path.name for path in (where / "step-6" / "model").iterdir()} <= {"rank-0.safetensors", "rank-1.safetensors"}
    assert b"sesame" not in (run / "config.yaml").read_bytes()

    damaged = where / "step-6" / "model" / "rank-0.safetensors"
    body = damaged.read_bytes()
    damaged.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    assert cli.main([f"resume={run}", "train.steps=8", "strategy=single", "launch.world_size=1"]) == 0
    told = capfd.readouterr().out
    assert "step-6 is passed over: model/rank-0.safetensors is damaged" in told
    assert "goes on after step 4" in told
    assert files.steps_in(where) == [6, 8]
    assert latest_good(run).folder == where / "step-8"
    find_weights(f"{where}/step-8")
    assert index_of(place_of(f"{where}/step-8")).keys() == index_of(where / "step-6").keys()
