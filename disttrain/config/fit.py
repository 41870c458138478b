"""Whether the data, once it is there, fits the model and the batch: what its config alone can't say. No torch here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from disttrain.config.check import check_batch, check_pipeline
from disttrain.config.schema import Config
from disttrain.data.module import DataModule
from disttrain.errors import ConfigError

CNN, RESNET = "disttrain.models.cnn.SimpleCNN", "disttrain.models.resnet.ResNet18"
BLOCK, GPT = "disttrain.models.block.TransformerBlock", "disttrain.models.gpt.GPT"
SYNTHETIC, DIGITS = "disttrain.data.synthetic.Synthetic", "disttrain.data.images.Digits"

ANY = "any"
"""A dimension that the model leaves to the data."""


def check_data(config: Config, data: DataModule, model: Callable[..., Any]) -> None:
    """ConfigError for tokens, labels or samples that the model, whose class is `model`, has no place for.

    A class of the user's own is asked for no more than it says: arguments of that name, what its data states.
    """
    given = _arguments(config.model, model)
    unit = config.strategy.tp
    for key, found, what, step in (("vocab_size", data.vocab_size, "tokens", unit), ("num_classes", data.num_classes, "classes", 1)):
        most = given.get(key)
        if isinstance(most, int) and found is not None and found > most:
            said = f"the data has {found} different {what}, and the model is built for model.{key}={most}"
            raise ConfigError(said, f"model.{key}={-(-found // step) * step}")
    if data.sample_shape is not None:
        _check_shape(config, given, tuple(data.sample_shape))


def takes_batch(config: Config, global_batch_size: int) -> bool:
    """Whether the layout comes out even with global batches of that size."""
    other = replace(config, train=replace(config.train, global_batch_size=global_batch_size))
    try:
        check_batch(other)
        check_pipeline(other)
    except ConfigError:
        return False
    return True


def _arguments(component: Mapping[str, Any], model: Callable[..., Any]) -> Mapping[str, Any]:
    """What a shipped model is built with, its class's defaults too; of another one what the config says."""
    if not component["_target_"].startswith("disttrain."):
        return component
    defaults = {name: one.default for name, one in inspect.signature(model).parameters.items()}
    return defaults | dict(component)


def _check_shape(config: Config, given: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """The data's shape is the one that a shipped model takes."""
    target, dataset = config.model["_target_"], config.dataset["_target_"]
    wanted = _wanted(target, given)
    if wanted is None:
        return
    if len(wanted) == len(shape) and all(want in (ANY, has) for want, has in zip(wanted, shape, strict=True)):
        if target == GPT and shape[0] > (longest := given["max_seq_len"]):
            said = f"a sample of the data has {shape[0]} tokens, more than model.max_seq_len={longest}"
            raise ConfigError(said, f"dataset.context={longest}")
        return
    shown = f"[{', '.join(map(str, wanted))}]"
    said = f"the model ({target}) takes samples of shape {shown}, and the data's are {list(shape)}"
    raise ConfigError(said, _remedy(dataset, given, wanted, shape))


def _wanted(target: str, given: Mapping[str, Any]) -> tuple[int | str, ...] | None:
    """The shape of the samples that a shipped model takes; None for one whose shape is not known."""
    if target == CNN:
        return (1, 28, 28)
    if target == RESNET:
        return (given["channels"], ANY, ANY)
    if target == BLOCK:
        return (ANY, given["hidden_size"])
    return (ANY,) if target == GPT else None


def _remedy(dataset: str, given: Mapping[str, Any], wanted: tuple[int | str, ...], shape: tuple[int, ...]) -> str | None:
    """The override that makes the two fit."""
    if dataset == SYNTHETIC:
        usual = (28, 28, 28) if len(wanted) == 3 else (given["max_seq_len"],) * 2
        fits = shape if len(shape) == len(wanted) else usual
        return f"dataset.shape=[{','.join(str(has if want == ANY else want) for want, has in zip(wanted, fits, strict=True))}]"
    if len(wanted) == len(shape) == 3 and wanted[1:] == (ANY, ANY):
        return f"model.channels={shape[0]}"
    return f"dataset.size={wanted[-1]}" if dataset == DIGITS else None
