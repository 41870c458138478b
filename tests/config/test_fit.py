"""Data that is there and a model that was asked for: what one has no place for in the other is refused before any rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disttrain import build
from disttrain.errors import ConfigError, DataError
from tests import tiny

IMAGES = {"_target_": "disttrain.data.synthetic.Synthetic", "kind": "images", "shape": [1, 28, 28], "num_samples": 16}
MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    "tokens": (tiny.GPT, tiny.TOKENS | {"vocab_size": 33}, "model.vocab_size=34", {"tp": 2}),
    "length": (tiny.GPT, tiny.TOKENS | {"context": tiny.CONTEXT + 1}, f"dataset.context={tiny.CONTEXT}", {}),
    "labels, by the class's default": (tiny.CNN, IMAGES | {"num_classes": 11}, "model.num_classes=11", {}),
    "size": (tiny.CNN, IMAGES | {"shape": [1, 20, 20]}, "dataset.shape=[1,28,28]", {}),
    "no picture": (tiny.CNN, IMAGES | {"shape": [32, 512]}, "dataset.shape=[1,28,28]", {}),
    "width": (tiny.BLOCK, tiny.VECTORS | {"shape": [8, 64]}, "dataset.shape=[8,32]", {}),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_misfit_is_refused_with_what_mends_it(kind: str) -> None:
    model, dataset, remedy, layout = MISFITS[kind]
    with pytest.raises(ConfigError) as caught:
        build.prepare(tiny.config(model=model, dataset=dataset, **layout))
    assert caught.value.remedy == remedy


def test_scaled_digits_are_refused_with_the_size_that_fits(tmp_path: Path) -> None:
    digits = {"_target_": "disttrain.data.images.Digits", "size": 20, "data_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"takes samples of shape \[1, 28, 28\], and the data's are \[1, 20, 20\]") as caught:
        build.prepare(tiny.config(model=tiny.CNN, dataset=digits))
    assert caught.value.remedy == "dataset.size=28"
    build.prepare(tiny.config(model=tiny.CNN, dataset=digits | {"size": 28}))


def test_fewer_tokens_and_shorter_samples_fit() -> None:
    build.prepare(tiny.config(dataset=tiny.TOKENS | {"vocab_size": 5, "context": 3}))


def test_a_users_own_model_is_asked_only_what_it_says() -> None:
    build.prepare(tiny.config(model={"_target_": "tests.nets.Normalised"}, dataset=IMAGES))


def test_a_smaller_batch_that_is_proposed_comes_out_even() -> None:
    data = tiny.TOKENS | {"num_samples": 15}
    for dp, micro, proposed in ((1, None, 15), (2, None, 14), (2, 3, 12), (4, 2, 8), (1, 16, 15)):
        with pytest.raises(DataError) as caught:
            build.prepare(tiny.config(dp, dataset=data, micro_batch_size=micro, global_batch_size=48))
        assert caught.value.remedy == f"train.global_batch_size={proposed}, or more data by the keys of dataset"
    with pytest.raises(DataError) as caught:
        build.prepare(tiny.config(4, dataset=data | {"num_samples": 3}))
    assert caught.value.remedy == "more data by the keys of dataset"
