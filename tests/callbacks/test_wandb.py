"""W&B, read back from its own offline files."""

import contextlib
import os
import signal
import time

import pytest
from omegaconf import OmegaConf

from disttrain.callbacks.wandb import WandB, logged_in, plain, resolve_mode
from disttrain.errors import ConfigError
from disttrain.launch.world import supervise
from tests.callbacks.fakes import FakeTrainer, config
from tests.callbacks.wandb_file import runs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def nobody_logged_in(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def follow(callback, trainer, rows, end=True):
    callback.on_fit_start(trainer)
    for step, row in rows:
        trainer.progress.step = step
        callback.on_log(trainer, row)
    if end:
        callback.on_fit_end(trainer)


def run_folder(tmp_path, name="12-00-00-k3f9", parent="2026-11-29"):
    folder = tmp_path / parent / name
    folder.mkdir(parents=True)
    return folder


def test_a_run_is_kept_whole(tmp_path):
    folder = run_folder(tmp_path)
    trainer = FakeTrainer(folder, config=config(run_name="first try", tags=["a,b", "x: y"], seed=7, predicted={"perf/step_seconds": 0.25}))
    callback = WandB(project="mine")
    follow(callback, trainer, [(1, {"train/loss": 3.0}), (20, {"train/loss": 2.0, "val/loss": 2.5}), (40, {"train/loss": 1.5})])
    (run,) = runs(folder)
    assert run.run.project == "mine"
    assert run.run.display_name == "first try"
    assert run.run.run_id == callback.id
    assert run.run.run_group == ""
    assert list(run.run.tags) == ["a,b", "x: y"]
    assert run.config["seed"] == 7
    assert run.config["train"]["global_batch_size"] == 32  # nested, not one blob
    assert [(row["_step"], row["step"], row["train/loss"]) for row in run.history] == [(1, 1, 3.0), (20, 20, 2.0), (40, 40, 1.5)]
    assert run.history[1]["val/loss"] == 2.5  # train and validation of one step are one row
    assert any(metric.glob_name == "*" and metric.step_metric == "step" for metric in run.metrics)
    assert run.summary["train/loss"] == 1.5
    assert run.summary["val/loss"] == 2.5
    assert run.summary["predicted/perf/step_seconds"] == 0.25  # beside what is measured
    assert run.exit_codes == [0]


def test_no_secret_is_logged(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "launch.env.HF_TOKEN=hf_sesame"])
    folder = run_folder(tmp_path)
    follow(WandB(), FakeTrainer(folder, config=config()), [(1, {"train/loss": 1.0})])
    (run,) = runs(folder)
    assert run.config["launch"]["env"] == {"HF_TOKEN": "<redacted>", "WANDB_API_KEY": "<redacted>", "OMP_NUM_THREADS": "1"}
    for file in (folder / "wandb").rglob("*"):
        assert not file.is_file() or b"sesame" not in file.read_bytes(), file


def test_jobs_of_a_sweep_are_one_group_and_a_failed_one_is_marked(tmp_path):
    ids = set()
    for job in ("0", "1"):
        folder = run_folder(tmp_path, job, "2026-11-29/12-00-00-k3f9")
        trainer = FakeTrainer(folder, config=config())
        callback = WandB()
        follow(callback, trainer, [(1, {"train/loss": 1.0})], end=job == "0")
        if job == "1":
            callback.on_exception(trainer, RuntimeError("boom"))
        (run,) = runs(folder)
        ids.add(run.run.run_id)
        assert run.run.run_group == "12-00-00-k3f9"
        assert run.run.display_name == f"run-{job}"
        assert run.exit_codes == [int(job)]
    assert len(ids) == 2


def test_a_resume_keeps_the_id_and_starts_at_the_first_step_not_seen(tmp_path):
    """Crashed at step 50, saved at 20: W&B has 1 to 40, so the run that goes on sends 60 first."""
    folder = run_folder(tmp_path)
    first = WandB()
    follow(first, FakeTrainer(folder), [(step, {"train/loss": float(step)}) for step in (1, 20, 40)], end=False)
    first.on_exception(FakeTrainer(folder), RuntimeError("boom"))
    again = WandB()
    again.load_state_dict(first.state_dict())
    time.sleep(1.1)  # W&B names its folders by the second
    trainer = FakeTrainer(folder)
    trainer.progress.step = 20
    follow(again, trainer, [(step, {"train/loss": float(step)}) for step in (40, 60)])
    before, after = runs(folder)
    assert before.run.run_id == after.run.run_id
    assert [row["step"] for row in before.history + after.history] == [1, 20, 40, 60]


def test_an_evaluation_that_a_stop_cut_off_is_sent_by_the_run_that_goes_on(tmp_path):
    folder = run_folder(tmp_path)
    first = WandB()
    follow(first, FakeTrainer(folder), [(step, {"train/loss": float(step)}) for step in (1, 20)])
    again = WandB()
    again.load_state_dict(first.state_dict())
    time.sleep(1.1)  # W&B names its folders by the second
    trainer = FakeTrainer(folder)
    trainer.progress.step = 20
    follow(again, trainer, [(20, {"val/loss": 2.5}), (40, {"train/loss": 40.0})])
    owed, next_row = runs(folder)[1].history
    assert (owed["step"], owed["val/loss"]) == (20, 2.5)
    assert next_row["step"] == 40
    assert "val/loss" not in next_row


@pytest.mark.world(1)
def test_a_rank_that_is_killed_loses_no_step(tmp_path):
    """What W&B had not written when the rank died is sent again by the run that goes on; nothing is left alive."""
    folder = run_folder(tmp_path)
    callback = WandB()

    def written():
        with contextlib.suppress(Exception):  # in the middle of a record
            return runs(folder)[0].history
        return []

    def entry(place):
        trainer = FakeTrainer(folder)
        callback.on_fit_start(trainer)
        for step in range(1, 25):
            trainer.progress.step = step
            callback.on_log(trainer, {"train/loss": float(step)})
            time.sleep(0.12)
        until = time.monotonic() + 60
        while len(written()) <= 3 and time.monotonic() < until:  # on a busy machine W&B's process takes its time
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    assert supervise(entry, 1).failure is not None
    again = WandB()
    again.load_state_dict(callback.state_dict())
    follow(again, FakeTrainer(folder), [(step, {"train/loss": float(step)}) for step in range(1, 31)])
    before, after = ([row["step"] for row in run.history] for run in runs(folder))
    assert len(before) > 3  # all but the last second's
    assert set(before) | set(after) == set(range(1, 31))
    assert before == sorted(set(before))
    assert after == sorted(set(after))


def test_other_ranks_open_nothing(tmp_path):
    folder = run_folder(tmp_path)
    follow(WandB(), FakeTrainer(folder, rank=1, config=config()), [(1, {"train/loss": 1.0})])
    assert not (folder / "wandb").exists()


def test_training_does_not_wait_and_survives_a_broken_wandb(tmp_path, monkeypatch, caplog):
    import wandb

    def slow(**arguments):
        time.sleep(1.0)
        raise RuntimeError("no disk")

    monkeypatch.setattr(wandb, "init", slow)
    trainer = FakeTrainer(run_folder(tmp_path), config=config())
    callback = WandB()
    before = time.perf_counter()
    follow(callback, trainer, [(step, {"train/loss": 1.0}) for step in range(1, 50)], end=False)
    assert time.perf_counter() - before < 0.8
    callback.on_fit_end(trainer)
    assert "W&B gave up, and the run goes on without it: RuntimeError: no disk" in caplog.text


def test_a_server_that_does_not_answer_is_no_obstacle(tmp_path, monkeypatch):
    import wandb

    real = wandb.init

    def init(**arguments):
        if arguments["mode"] == "online":
            raise wandb.errors.CommError("timed out")
        return real(**arguments)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    folder = run_folder(tmp_path)
    follow(WandB(), FakeTrainer(folder, config=config()), [(1, {"train/loss": 1.0})])
    (run,) = runs(folder)
    assert [row["step"] for row in run.history] == [1]


# --- modes -------------------------------------------------------------------------------------------------------


def test_auto_is_offline_unless_logged_in_or_told(monkeypatch, tmp_path):
    assert resolve_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert resolve_mode("auto") == "online"
    assert resolve_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve_mode("auto") == "disabled"
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert resolve_mode("auto") == "offline"


def test_a_netrc_entry_is_a_login_for_its_own_server_only(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine example.org login me password other\n")
    assert not logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.mine.org")
    assert not logged_in()


def test_online_without_a_login_is_an_error_and_never_a_prompt():
    with pytest.raises(ConfigError, match="nobody is logged in"):
        WandB(mode="online")
    with pytest.raises(ConfigError, match="auto, online, offline, disabled"):
        WandB(mode="on")


def test_disabled_opens_nothing(tmp_path):
    folder = run_folder(tmp_path)
    follow(WandB(mode="disabled"), FakeTrainer(folder), [(1, {"train/loss": 1.0})])
    assert not (folder / "wandb").exists()


def test_config_objects_become_plain_values():
    """G08: nested, with an interpolation, a list, a null and one key that can't be resolved."""
    given = OmegaConf.create({"a": {"b": 3, "c": "${a.b}"}, "list": [1, {"x": None}], "lost": "${nowhere.to.go}", "hub_token": "hf"})
    assert plain(given) == {
        "a": {"b": 3, "c": 3},
        "list": [1, {"x": None}],
        "lost": "${nowhere.to.go}",
        "hub_token": "<redacted>",
    }
    harmless = {"max_tokens": 5, "tokenizer": "byte", "monitor": "val/loss"}
    assert plain(harmless) == harmless
