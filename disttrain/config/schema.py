"""Every key of a config, with its type, unit and meaning. No torch here: `--help` and `--cfg` need none.

Groups that name a class (`model`, `dataset`, `optimizer`, `scheduler`, each callback) are components: a mapping
with `_target_` and that class's arguments. The rest is typed below. What `auto` and `-1` stand for is worked
out by `check`, so that a frozen config holds plain numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def key(default: Any, meaning: str, unit: str = "") -> Any:
    """A config key: its default, what it means and the unit it is given in."""
    metadata = {"help": meaning, "unit": unit}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class StrategyConfig:
    """How one training step is cut over ranks: degrees of the mesh axes, and the strategies' own knobs."""

    name: str = key("ddp", "name of the preset, for logs")
    dp_replicate: int = key(1, "ranks that hold the same weights and see different samples; -1 fills the world", "ranks")
    dp_shard: int = key(1, "ranks that see different samples and share out weights (FSDP)", "ranks")
    cp: int = key(1, "ranks that share out the sequence", "ranks")
    tp: int = key(1, "ranks that share out each layer's matrices", "ranks")
    pp: int = key(1, "ranks that share out the layers", "ranks")
    ep: int = key(1, "ranks that share out experts; divides dp_shard", "ranks")
    sequence_parallel: bool = key(False, "under tp, share out the sequence between blocks (norms, residuals)")
    plan: dict[str, str] = key({}, "tensor plan {parameter or module name pattern: style}, over the model's own")
    bucket_size: float = key(25.0, "size of the buckets in which gradients travel over data ranks", "MiB")
    find_unused_parameters: bool = key(False, "parameters may be left out of a step (one host read a step)")


@dataclass
class LaunchConfig:
    """Processes, devices and how they meet."""

    world_size: int | Literal["auto"] = key("auto", "ranks in all; auto: one for single, else the GPUs, else two an axis", "ranks")
    nodes: int = key(1, "machines", "machines")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "what ranks compute on; auto: cuda where there are GPUs")
    backend: Literal["auto", "gloo", "nccl", "cuda:nccl,cpu:gloo"] = key(
        "auto", "what ranks talk by; auto: cuda:nccl,cpu:gloo on GPUs, else gloo"
    )
    threads: int | Literal["auto"] = key("auto", "CPU threads a rank; auto: cores / ranks", "threads")
    start_method: Literal["auto", "fork", "spawn"] = key("auto", "how ranks are started; auto: fork where that is safe")
    max_restarts: int = key(0, "restarts of all ranks after a failure that is not the user's", "restarts")
    timeout_seconds: float = key(600.0, "longest wait for another rank, at rendezvous and in collectives", "s")
    grace_seconds: float = key(30.0, "time to save and leave after a stop signal", "s")
    interface: str = key("auto", "network interface for gloo and NCCL; auto is lo on one machine")
    env: dict[str, str] = key({}, "environment variables for every rank")


@dataclass
class TrainConfig:
    """The experiment: what a step is and how many there are."""

    steps: int | None = key(400, "optimizer steps; null if epochs is given", "steps")
    epochs: int | None = key(None, "passes over the training data; null if steps is given", "epochs")
    global_batch_size: int = key(32, "samples a step, whatever the layout", "samples")
    clip_norm: float | None = key(1.0, "largest global gradient norm; null: no clipping")
    log_every: int = key(20, "steps between log points; the first and the last step are logged always", "steps")
    eval_every: int | None = key(100, "steps between evaluations; one is made at the end always; null: at the end only", "steps")
    dtype: Literal["float32", "float64"] = key("float32", "type of the weights; float64 is for proofs")


@dataclass
class PathsConfig:
    """Folders; relative ones are taken against the folder the command was typed in."""

    data: str = key("~/.cache/disttrain", "where prepared and downloaded data lies")
    outputs: str = key("outputs", "where run folders are made")


@dataclass
class VerifyConfig:
    """`verify`: does this layout compute what one device computes?"""

    steps: int = key(3, "steps to compare", "steps")
    tolerance: float = key(1e-10, "largest relative error")
    dtype: Literal["float64", "float32", "bf16", "fp16"] = key("float64", "type that both sides compute in")
    shrink: bool = key(True, "make the batch and the sequence as small as the layout allows")


@dataclass
class GenerateConfig:
    """`generate`: sample text from a checkpoint."""

    prompt: str = key("def ", "text to go on from")
    length: int = key(256, "tokens to add", "tokens")
    temperature: float = key(0.8, "0 takes the likeliest token")
    top_k: int | None = key(50, "draw from the k likeliest tokens; null: from all", "tokens")


@dataclass
class DebugConfig:
    """Overlays for finding faults."""

    overfit: bool = key(False, "train on the first global batch again and again")
    deterministic: bool = key(False, "torch.use_deterministic_algorithms")


@dataclass
class Config:
    """The whole config, checked, resolved and frozen: one process makes it, all ranks read the same text."""

    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    model: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = key({}, "torchmetrics of the user's own, {name: component}")
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    seed: int = key(0, "fixes weights, data order and dropout")
    run_name: str = key("run", "name of the experiment, for W&B and resume=auto")
    tags: list[str] = key([], "labels, for W&B")
    resume: str | None = key(None, "run folder, checkpoint or auto: go on where it stopped")
    init_from: str | None = key(None, "run folder or checkpoint: take its weights only")
