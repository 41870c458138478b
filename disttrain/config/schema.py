"""Every key of a config, with its type, unit and meaning. No torch here: `--help` and `--cfg` need none.

Groups that name a class (`model`, `dataset`, `optimizer`, `scheduler`, each callback) are components: a mapping
with `_target_` and that class's arguments. The rest is typed below. What `auto` and `-1` stand for is worked
out by `check`, so that a frozen config holds plain numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from disttrain.config.typed import unknown
from disttrain.errors import ConfigError


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
    dp_shard: int = key(1, "ranks that see different samples and share out weights, gradients and optimizer state (FSDP, ZeRO)", "ranks")
    cp: int = key(1, "ranks that share out the sequence", "ranks")
    tp: int = key(1, "ranks that share out each layer's matrices", "ranks")
    pp: int = key(1, "ranks that share out the layers", "ranks")
    ep: int = key(1, "ranks that share out experts; divides dp_shard, -1 takes all of it", "ranks")
    sequence_parallel: bool = key(False, "under tp, share out the sequence between blocks (norms, residuals)")
    attention: Literal["gather", "ring"] = key("gather", "under cp: keys and values of all ranks come at once, or go round")
    loss_chunk: int | None = key(
        None, "compute logits and their loss so many tokens at a time, and again in backward; null: all of a micro-batch's", "tokens"
    )
    plan: dict[str, str] = key({}, "tensor plan {parameter or module name pattern: style}, over the model's own")
    bucket_size: float = key(25.0, "size of the buckets in which gradients travel over data ranks", "MiB")
    zero: Literal[0, 1, 2, 3] = key(
        3, "under dp_shard, what is kept whole: 0 all, 1 weights and gradients, 2 weights, 3 nothing between uses"
    )
    gather_dtype: Literal["weights", "bf16"] = key("weights", "type that weights are gathered in under dp_shard; bf16 halves the bytes")
    offload: bool = key(False, "under dp_shard, keep weights, gradients and optimizer state in host memory, and update there")
    find_unused_parameters: bool = key(False, "parameters may be left out of a step (one host read a step)")
    compression: Literal["none", "bf16", "fp16", "powersgd"] = key(
        "none", "how gradients are made smaller on their way over data ranks: another training, by design"
    )
    compression_rank: int = key(4, "columns that powersgd approximates a matrix by", "columns")
    sync_every: int = key(1, "steps between averages of the weights over dp_replicate; more than 1: local SGD, another training", "steps")
    outer_lr: float = key(1.0, "under sync_every, rate of the step from the last average towards the new one; 1: the average itself")
    outer_momentum: float = key(0.0, "under sync_every, Nesterov momentum of that step (DiLoCo takes 0.7 and 0.9)")
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"] = key(
        "1f1b", "under pp, the order of a step's forwards and backwards"
    )
    virtual_stages: int | None = key(None, "under pp, stages a rank; null: the fewest that the schedule takes", "stages")
    stage_split: list[str] = key([], "under pp, first module of each later stage; empty: balanced by cost")
    recompute: Literal["none", "full", "selective"] = key(
        "none", "blocks compute again in backward: all their activations, or all but matrix products and attention"
    )
    recompute_every: int = key(1, "of the blocks, every n-th is recomputed", "blocks")
    offload_activations: bool = key(False, "activations of the blocks wait for backward in host memory")
    compile: bool = key(False, "torch.compile, block by block")
    compile_backend: str = key("inductor", "torch.compile's backend")
    deepspeed: dict[str, Any] | str | None = key(
        None, "hand the step to DeepSpeed's engine, with what else its JSON says (a file, or keys); null: it stays here"
    )
    sync_batch_norm: bool = key(True, "BatchNorm sees each micro-batch over all data ranks, as one device does; false: its rank's part")


@dataclass
class LaunchConfig:
    """Processes, devices and how they meet."""

    world_size: int | Literal["auto"] = key("auto", "ranks in all; auto: one for single, else the GPUs, else two an axis", "ranks")
    nodes: int = key(1, "machines; under torchrun and srun those that are found", "machines")
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
    dtype: Literal["float32", "float64", "bfloat16"] = key(
        "float32", "type of the weights; float64 is for proofs; bfloat16 loses small updates"
    )


PRECISIONS = ("fp32", "bf16", "fp8")
RATED = {
    "peak_tflops": PRECISIONS,
    "matmul_tflops": PRECISIONS,
    "attention_tflops": ("flash", "fused", "triton"),
    "collectives": ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"),
}
"""What a key of the hardware has rates of."""


@dataclass
class HardwareConfig:
    """Devices and cables that `plan` reckons with. Rates are those measured alone, at their best."""

    name: str = key("unknown", "name of the preset")
    source: str = key("", "where the numbers come from")
    device: str = key("", "pattern (regular expression) of the name by which the driver knows such a device")
    devices_per_node: int = key(1, "devices that share fast links", "devices")
    peak_tflops: dict[str, float] = key({}, "peak of dense matrix products by type (bf16, fp8, fp32), for MFU", "TFLOP/s")
    matmul_tflops: dict[str, float] = key({}, "largest rate measured on matrix products, by type", "TFLOP/s")
    attention_tflops: dict[str, float] = key({}, "rate measured on long causal attention, by kernel (flash, fused, triton)", "TFLOP/s")
    memory_gib: float = key(0.0, "memory of a device", "GiB")
    memory_bandwidth: float = key(0.0, "of a device's memory", "GB/s")
    link_bandwidth: float = key(0.0, "bus bandwidth of large all-reduces inside a node", "GB/s")
    link_half_message: float = key(0.0, "all-reduce that reaches half of it", "MB")
    link_latency: float = key(0.0, "of a collective inside a node", "us")
    collectives: dict[str, list[float]] = key(
        {}, "of each kind of collective, where doctor measured it: bus bandwidth, message that reaches half of it, latency", "GB/s, MB, us"
    )
    network_bandwidth: float = key(0.0, "of the network, for one device, one way", "GB/s")
    network_latency: float = key(0.0, "of a collective, for each node it goes through", "us")
    network_by_nodes: dict[str, float] = key({}, "bandwidth measured for one device by nodes of the group, where it falls", "GB/s")
    price_per_hour: float | None = key(None, "of one device", "USD")

    def __post_init__(self) -> None:
        """Refuse what can't be reckoned with, from wherever it comes. Nought of a rate stands for one that is not known."""
        if self.devices_per_node < 1:
            raise ConfigError(f"hardware.devices_per_node={self.devices_per_node} is no number of devices", "hardware.devices_per_node=1")
        for name, value in asdict(self).items():
            if isinstance(value, float) and not 0 <= value < math.inf:
                raise ConfigError(f"hardware.{name}={value:g} is not a number from zero on", f"hardware.{name}=<a number>")
            for of, rate in value.items() if isinstance(value, Mapping) else ():
                self._check_rate(name, of, rate)

    @staticmethod
    def _check_rate(name: str, of: str, rate: float | list[float]) -> None:
        place, names = f"hardware.{name}.{of}", RATED.get(name, ())
        if names and of not in names:
            raise unknown(place, rate, [f"hardware.{name}.{known}" for known in names])
        if not names and not (of.isdigit() and int(of) > 0):
            raise ConfigError(f"hardware.{name} is by numbers of nodes, and {of!r} is none", f"hardware.{name}={{2: {rate}}}")
        figures = rate if isinstance(rate, list) else [rate]
        if len(figures) == (3 if name == "collectives" else 1) and figures[0] > 0 and all(0 <= figure < math.inf for figure in figures):
            return
        if name == "collectives":
            found = f"{place}={rate} is not [GB/s, MB, us]: three numbers, the first above zero, none below"
            raise ConfigError(found, "python -m disttrain doctor, which measures them")
        raise ConfigError(f"{place}={rate} is no rate: a number above zero", f"{place}=<a rate>")


@dataclass
class PathsConfig:
    """Folders; relative ones are taken against the folder the command was typed in."""

    data: str = key("~/.cache/disttrain", "where prepared and downloaded data lies")
    outputs: str = key("outputs", "where run folders are made")


@dataclass
class PlanConfig:
    """`plan`: what a layout costs, before it is run."""

    search: bool = key(False, "rank the layouts that fit by predicted step time")
    top: int = key(10, "layouts that a search shows", "layouts")
    force: bool = key(False, "plan, and train, what does not fit the devices, as it is asked for")
    tokens: float | None = key(None, "tokens of the whole training, for its days and its price", "tokens")
    json: bool = key(False, "print JSON instead of tables")
    dry: bool = key(False, "also take a step of each kind of rank on tensors without memory, and count it beside the formulas")


@dataclass
class VerifyConfig:
    """`verify`: does this layout compute what one device computes?"""

    steps: int = key(3, "steps to compare", "steps")
    tolerance: float | None = key(None, "largest relative error; null: 1e-10, for float32 1e-4, bf16 0.3, fp16 0.06")
    dtype: Literal["float64", "float32", "bf16", "fp16"] = key("float64", "type that both sides compute in")
    shrink: bool = key(True, "make the batch and the sequence as small as the layout allows")


@dataclass
class DoctorConfig:
    """`doctor`: what holds a run back?"""

    steps: int = key(20, "steps that are timed on every rank", "steps")
    warmup: int = key(5, "steps before them", "steps")
    fix: bool = key(False, "try the override that should help, and show before and after")
    json: bool = key(False, "print JSON instead of tables")


@dataclass
class GenerateConfig:
    """`generate`: sample text from a checkpoint."""

    prompt: str = key("def ", "text to go on from")
    length: int = key(256, "tokens to add", "tokens")
    temperature: float = key(0.8, "0 takes the likeliest token")
    top_k: int | None = key(50, "draw from the k likeliest tokens; null: from all", "tokens")


@dataclass
class ReportConfig:
    """`report`: runs and sweeps as one page."""

    output: str | None = key(None, "folder for the page; null: report/ in the run or sweep, or here if there are several")
    figures: bool = key(True, "PNGs beside the page")
    wandb: bool = key(False, "save a dashboard of these runs in W&B; without a login, write what would be saved")
    project: str | None = key(None, "W&B project of the dashboard; null: that of the runs")
    entity: str | None = key(None, "W&B user or team; null: that of the runs, else one's own")


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
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    seed: int = key(0, "fixes weights, data order and dropout")
    run_name: str = key("run", "name of the experiment, for W&B and resume=auto")
    tags: list[str] = key([], "labels, for W&B")
    predicted: dict[str, float] = key({}, "what plan predicts for this run, by metric; the program fills it in")
    resume: str | None = key(None, "run folder, checkpoint or auto: go on where it stopped")
    init_from: str | None = key(None, "run folder or checkpoint: take its weights only")
