"""Which checkpoints stay: the last k and the best k, over resumes, and nobody else's files."""

import json

from disttrain.checkpoint.retain import Retention, remove


def saves(retention, scores):
    gone = []
    for step, score in scores:
        retention.add(step, score)
        retention.confirm(step)
        gone += retention.expired()
    return gone


def test_best_and_the_two_newest_remain():
    """E10: the oldest that isn't the best goes, never the newest."""
    retention = Retention(keep_last=2, keep_best=1, mode="min")
    gone = saves(retention, [(1, 0.1), (2, 0.5), (3, 0.4), (4, 0.3), (5, 0.2)])
    assert sorted(retention.scores) == [1, 4, 5]
    assert gone == [2, 3]


def test_best_are_remembered_over_a_resume():
    """E11: 4 saves, resume, 4 saves: exactly the two best overall, and the last."""
    scores = [(1, 0.9), (2, 0.3), (3, 0.8), (4, 0.7), (5, 0.95), (6, 0.2), (7, 0.6), (8, 0.85)]
    retention = Retention(keep_last=1, keep_best=2, mode="min")
    saves(retention, scores[:4])
    again = Retention(keep_last=1, keep_best=2, mode="min")
    again.load_state_dict(json.loads(json.dumps(retention.state_dict())), until=4)
    saves(again, scores[4:])
    assert sorted(again.scores) == [2, 6, 8]


def test_steps_after_the_resumed_one_are_forgotten():
    retention = Retention(keep_last=3, keep_best=0, mode="min")
    saves(retention, [(2, None), (4, None), (6, None)])
    again = Retention(keep_last=3, keep_best=0, mode="min")
    again.load_state_dict(retention.state_dict(), until=4)
    assert sorted(again.scores) == [2, 4]


def test_max_mode_nan_and_unmeasured_are_never_best():
    retention = Retention(keep_last=1, keep_best=1, mode="max")
    saves(retention, [(1, 0.5), (2, float("nan")), (3, None), (4, 0.4)])
    assert retention.best() == [1]
    assert sorted(retention.scores) == [1, 4]


def test_all_stay_without_a_limit():
    assert saves(Retention(keep_last=None, keep_best=0, mode="min"), [(step, None) for step in range(9)]) == []


def test_nothing_goes_before_what_takes_its_place_is_there():
    retention = Retention(keep_last=1, keep_best=1, mode="min")
    saves(retention, [(1, 0.5)])
    retention.add(2, 0.1)
    assert retention.expired() == []
    assert retention.best() == [1]
    assert retention.state_dict() == {"scores": [[1, 0.5], [2, 0.1]]}, "one under way is remembered by the next"
    retention.drop(2)
    assert retention.expired() == []
    retention.add(3, 0.2)
    retention.confirm(3)
    assert retention.expired() == [1]


def test_only_named_folders_are_deleted(tmp_path):
    for name in ("step-1", "step-2", "step-10", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    remove(tmp_path, [1, 3])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine", "step-10", "step-2"]
