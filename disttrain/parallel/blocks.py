"""How a model's repeated blocks run: compiled, computed again in backward, their activations on the host."""

from __future__ import annotations

from torch import nn

from disttrain.errors import ConfigError
from disttrain.parallel.compiled import compile_blocks
from disttrain.parallel.options import Options
from disttrain.parallel.random import Streams
from disttrain.parallel.recompute import offload_blocks, recompute_blocks
from disttrain.parallel.stages import Absent


def change_blocks(model: nn.Module, options: Options, streams: Streams) -> None:
    """What `options` ask for, from the inside out: the compiled block is what runs again, and its input what is offloaded."""
    if options.recompute == "none" and not options.offload_activations and not options.compile:
        return
    blocks = blocks_of(model)
    if options.compile:
        compile_blocks(blocks.values(), options.compile_backend)
    if options.recompute != "none":
        recompute_blocks(blocks, options.recompute, options.recompute_every, streams)
    if options.offload_activations:
        offload_blocks(blocks.values())


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The model's repeated blocks that this rank holds, by name; ConfigError for a model that names none."""
    parts = getattr(model, "parts", None)
    if parts is None or not parts().repeated:
        why = "does not say which its blocks are (parts())" if parts is None else "has no blocks that repeat (parts().repeated)"
        raise ConfigError(
            f"{class_name(model)} {why}, and strategy.recompute, offload_activations and compile and optimizer=muon work on blocks",
            "strategy.recompute=none strategy.offload_activations=false strategy.compile=false optimizer=adamw",
        )
    return blocks_named(model)


def blocks_named(model: nn.Module) -> dict[str, nn.Module]:
    """Likewise, and none of a model that names none."""
    parts = getattr(model, "parts", None)
    held = {name: module for name, module in model.named_modules() if not isinstance(module, Absent)}
    return {name: held[name] for name in (() if parts is None else parts().repeated) if name in held}


def class_name(model: nn.Module) -> str:
    """The class as its author called it: FSDP2 gives what it shards a class of its own, on top of the author's."""
    return next(kind.__name__ for kind in type(model).__mro__ if not kind.__module__.startswith("torch.distributed.fsdp"))
