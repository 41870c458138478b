"""Text: windows, splits by file, prepared once, and mistakes that are named."""

from __future__ import annotations

import json
import pickle
import pwd
import subprocess
import sys

import numpy as np
import pytest
import torch

from disttrain.data.dataset import sample_seeds
from disttrain.data.images import Digits
from disttrain.data.text import PythonStdlib, TextFiles
from disttrain.errors import ConfigError, DataError


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    for i in range(40):
        path = folder / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"[{i}]" * 30)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "no.txt").write_text("secret")
    (folder / "part0" / "notes.md").write_text("markdown")
    return folder


def build(files, tmp_path, **fields):
    return TextFiles(**({"paths": [str(path) for path in files], "data_dir": str(tmp_path / "data"), "context": 16} | fields))


def all_of(dataset):
    indices = torch.arange(len(dataset))
    return dataset.batch(indices, sample_seeds(0, 0, indices))


def text_of(data, dataset):
    """What the samples' inputs say, one after the other."""
    return data.decode(all_of(dataset)[0].flatten().tolist())


def test_windows_follow_one_another_and_targets_are_one_ahead(texts, tmp_path):
    data = build([texts], tmp_path, pattern="*.txt")
    data.prepare()
    dataset = data.train()
    inputs, targets = all_of(dataset)
    assert inputs.shape == targets.shape == (len(dataset), 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    some = torch.tensor([5, 2, 2])
    assert torch.equal(dataset.batch(some, some)[0], inputs[some])


def test_splits_are_apart_by_file_and_miss_none(texts, tmp_path):
    data = build([texts], tmp_path, pattern="*.txt", context=1, validation_fraction=0.2)
    data.prepare()
    parts = [set(text_of(data, split)[1:-1].split("][")) for split in (data.train(), data.validation())]
    whole = {str(i) for i in range(40)}
    cut = {"", "3"}  # the very last token is a target only
    assert parts[0] | parts[1] | cut >= whole
    assert not parts[0] & parts[1] - cut
    assert 2 <= len(parts[1]) <= 16


def test_split_follows_the_relative_path_alone(texts, tmp_path):
    first = build([texts], tmp_path)
    first.prepare()
    moved = texts.rename(tmp_path / "moved")
    second = build([moved], tmp_path)
    second.prepare()
    assert first.train().fingerprint == second.train().fingerprint
    assert first.train().fingerprint != first.validation().fingerprint


def test_a_lone_file_is_cut_near_its_end(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(200)))
    data = build([path], tmp_path, context=3, validation_fraction=0.25)
    data.prepare()
    inputs, targets = all_of(data.train())  # tokens 0 .. 149: 49 windows of 3, and the next one's first as a target
    assert (inputs.max(), targets.max()) == (146, 147)
    assert all_of(data.validation())[0].min() == 150


def test_without_validation_everything_is_trained_on(texts, tmp_path):
    data = build([texts], tmp_path, validation_fraction=0)
    data.prepare()
    assert data.validation() is None


def test_prepared_once_and_mapped_by_all(texts, tmp_path, monkeypatch):
    data = build([texts], tmp_path)
    data.prepare()
    (index,) = (tmp_path / "data").glob("*.json")
    facts = json.loads(index.read_text())
    assert facts["fingerprint"] in facts["file"]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == sorted([index.name, facts["file"]])

    rank = build([texts], tmp_path)  # another process, that didn't prepare
    monkeypatch.setattr("disttrain.data.prepared.store", None)
    assert len(rank.train()) == len(data.train())
    rank.prepare()
    base = rank.train()._windows
    while not isinstance(base, np.memmap):
        base = base.base
    assert base.mode == "r"


def test_a_changed_file_is_prepared_anew(texts, tmp_path):
    data = build([texts], tmp_path)
    data.prepare()
    (texts / "part0" / "0.txt").write_text("something else")
    changed = build([texts], tmp_path)
    changed.prepare()
    assert changed.train().fingerprint != data.train().fingerprint


def test_a_half_written_file_is_not_taken(texts, tmp_path):
    data = build([texts], tmp_path)
    data.prepare()
    wanted = data.train().fingerprint
    (binary,) = (tmp_path / "data").glob("*.bin")
    binary.write_bytes(binary.read_bytes()[:-1])
    again = build([texts], tmp_path)
    again.prepare()
    assert again.train().fingerprint == wanted
    assert torch.equal(all_of(again.train())[0], all_of(again.train())[0])


def test_a_copy_maps_again(texts, tmp_path):
    data = build([texts], tmp_path)
    data.prepare()
    dataset = data.train()
    frozen = pickle.dumps(dataset)
    assert len(frozen) < 2000  # not the text itself
    assert torch.equal(all_of(pickle.loads(frozen))[0], all_of(dataset)[0])


def test_characters_are_numbered_and_come_back(tmp_path):
    path = tmp_path / "greek.txt"
    path.write_text("αβγ αβγ\nx" * 50, encoding="utf-8")
    data = build([path], tmp_path, vocabulary="characters", context=8)
    data.prepare()
    assert data.vocab_size == 6
    assert data.decode(data.encode("γx\nα")) == "γx\nα"
    assert data.encode("\n") == [0]
    assert data.bytes_per_token == pytest.approx((6 * 2 + 3) / 9)
    assert text_of(data, data.train()).startswith("αβγ αβγ\nxαβγ")
    with pytest.raises(DataError, match="'q'"):
        data.encode("q")


def test_many_characters_need_wider_numbers(tmp_path):
    path = tmp_path / "wide.txt"
    letters = "".join(chr(0x4E00 + i) for i in range(700)) + "\U0001f600"
    path.write_text(letters * 2, encoding="utf-8")
    data = build([path], tmp_path, vocabulary="characters", validation_fraction=0.0)
    data.prepare()
    assert data.vocab_size == 701
    assert text_of(data, data.train()) == (letters * 2)[: len(data.train()) * 16]


def test_bytes_decode_whatever_they_are(tmp_path):
    path = tmp_path / "b.txt"
    path.write_bytes(b"abc" * 100)
    data = build([path], tmp_path)
    assert data.encode("é") == [0xC3, 0xA9]
    assert data.decode([0xC3, 0xA9, 0xFF]) == "é\N{REPLACEMENT CHARACTER}"
    assert data.vocab_size == 256
    assert data.bytes_per_token == 1.0


def test_stdlib_is_this_interpreters_source_without_tests(tmp_path):
    data = PythonStdlib(data_dir=str(tmp_path))
    names = [name for name, _ in data._files()]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not {"test", "tests", "site-packages", "__pycache__"} & {part for name in names for part in name.split("/")}
    assert 300 < len(names) < 3000
    data.prepare()
    assert len(data.train()) > 50_000
    assert 0.02 < len(data.validation()) / len(data.train()) < 0.25
    assert "\ndef " in text_of(data, data.validation())


@pytest.mark.parametrize(
    ("fields", "message", "remedy"),
    [
        ({"paths": ["/nowhere"]}, "/nowhere, which doesn't exist", "dataset.paths="),
        ({"pattern": "*.tex"}, r"matches dataset.pattern=\*.tex", "dataset.pattern="),
        ({"context": 100_000}, "too little text: 41 files.*train split .* tokens.*100001", "dataset.context="),
        ({"vocabulary": "words"}, "dataset.vocabulary=words is not one of bytes, characters", "dataset.vocabulary=bytes"),
        ({"validation_fraction": 1.5}, "dataset.validation_fraction=1.5", "dataset.validation_fraction=0.1"),
        ({"context": 0}, "dataset.context=0", "dataset.context=128"),
        ({"num_workers": -1}, "dataset.num_workers=-1", "dataset.num_workers=0"),
        ({"data_dir": "/proc/nowhere"}, "can't be written under /proc/nowhere", "paths.data="),
    ],
)
def test_mistakes_are_named(texts, tmp_path, fields, message, remedy):
    with pytest.raises(DataError, match=message) as error:
        build([texts], tmp_path, **fields).prepare()
    assert error.value.remedy.startswith(remedy)


def test_what_is_no_text_is_named(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("é".encode("latin-1") * 100)
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8"):
        build([path], tmp_path, vocabulary="characters").prepare()


def test_data_choices_are_read_and_prepared_without_torch(texts, tmp_path):
    """Config checks and the parent, which forks, need none of it."""
    program = f"""
import sys
sys.modules["torch"] = None  # importing it fails
from disttrain.data import images, synthetic
from disttrain.data.text import TextFiles
TextFiles(paths=[{str(texts)!r}], data_dir={str(tmp_path / "data")!r}, context=16).prepare()
print(TextFiles.kind, images.Digits.kind, synthetic.Synthetic(kind="images").kind)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tokens", "images", "images"]


def test_a_user_without_a_home_is_told_which_folder_to_name(texts, tmp_path, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    for kind in (PythonStdlib, Digits):
        with pytest.raises(ConfigError, match="this user has none") as caught:
            kind()
        assert caught.value.remedy.startswith("paths.data=")
    TextFiles(paths=[str(texts)], data_dir=str(tmp_path), context=16).prepare()
    with pytest.raises(ConfigError, match="~/corpus names a home folder"):
        TextFiles(paths=["~/corpus"], data_dir=str(tmp_path)).prepare()


def test_unprepared_text_says_so(texts, tmp_path):
    with pytest.raises(DataError, match=r"prepare\(\) comes first"):
        build([texts], tmp_path).train()
