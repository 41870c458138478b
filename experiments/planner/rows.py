"""Published runs as cases for the planner: what a row says, and what is assumed where it is silent.

Everything that was judged and not read stands in `SOURCES` and `MACHINES`, by the prefix of a row's id, with its
reason. It was fixed before the fit.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from disttrain.config.schema import HardwareConfig
from disttrain.plan.case import FULL, NONE, SELECTIVE, Case, Layout, Numbers, Recompute, Software, every
from disttrain.plan.devices import preset
from disttrain.plan.pipeline import balanced, in_order
from disttrain.plan.shape import Shape

HERE = Path(__file__).resolve().parent
PUBLISHED = HERE / "published_runs.csv"
HALF = {"bf16", "fp16", ""}
"""A blank precision is one of these in every such source."""


@dataclass(frozen=True)
class Source:
    """What is assumed of the runs of one source."""

    kernel: str = "flash"
    hardware: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the preset of the GPU."""
    software: Mapping[str, Any] = field(default_factory=dict)
    vocab: int = 51200
    why: str = ""


SOURCES: Mapping[str, Source] = {
    "am": Source("fused", why="Transformer Engine"),
    "bs": Source(
        "unfused",
        {"network_bandwidth": 6.25},
        {"scattered": False},
        250880,
        "4 x 100 Gb/s a node of eight; DeepSpeed's pipeline sends whole tensors; the vocabulary follows from the stated parameters",
    ),
    "dgxc": Source("fused", why="Transformer Engine and XLA through cuDNN"),
    "ds": Source("unfused", why="Megatron-DeepSpeed of 2021"),
    "ibm": Source("flash", why="torch's SDPA; network as stated: 400 and 800 Gb/s a node"),
    "kor": Source("unfused", why="Megatron-LM of 2022"),
    "lf": Source(
        "triton", why="llm-foundry's FlashAttention-1 kernel in Triton; A100: 1600 Gb/s a node as stated; H100: the usual 8 x 400"
    ),
    "mb": Source(
        "fused", software={"tensor_exposed": 0.5}, why="Megatron-Bridge's own recipes: Transformer Engine, tensor axis overlapped"
    ),
    "mlm": Source("fused", why="Megatron-LM of 2025 with Transformer Engine"),
    "nl": Source("fused", software={"tensor_exposed": 0.5}, why="NeMo's own recipes: Transformer Engine, tensor axis overlapped"),
    "nm": Source("fused", software={"tensor_exposed": 0.5}, why="NeMo's own recipes: Transformer Engine, tensor axis overlapped"),
    "nt": Source(
        "flash",
        {"network_by_nodes": {"2": 45.2, "4": 20.0, "8": 12.5, "16": 10.6, "32": 8.1, "64": 4.1}},
        why="FlashAttention-2; the cluster's own all-reduce table (ultrascale playbook, appendix), an eighth for each device",
    ),
    "prod": Source("unfused", why="Megatron-DeepSpeed of 2021"),
    "sc21": Source("unfused", why="Megatron-LM of 2021"),
    "smx": Source(
        "fused",
        {"matmul_tflops": {"bf16": 1462.0, "fp8": 2925.0}},
        why="its own calibration: products reach 0.45 to 0.65 of peak on this machine",
    ),
    "tt": Source("flash", why="torch's SDPA"),
    "tta": Source("flash", why="torch's SDPA"),
    "tto": Source("flash", why="torch's SDPA"),
    "ya": Source("flash", {"network_bandwidth": 12.5}, why="network not stated: 100 Gb/s a GPU assumed"),
    "zb": Source("unfused", {}, {}, 50304, "Megatron-LM of 2023"),
}

MACHINES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "A100-80GB-SXM": ("a100", {}),
    "A100-40GB-SXM": ("a100", {"memory_gib": 39.6, "memory_bandwidth": 1555}),
    "H100-80GB-SXM": ("h100", {}),
    "H100-94GB": ("h100", {"memory_gib": 94, "memory_bandwidth": 2400}),
    "H100-96GB-HBM2e-500W": (
        "h100",
        {"memory_gib": 95, "memory_bandwidth": 2400, "matmul_tflops": {"bf16": 651.0, "fp8": 1150.0}},  # 500 W for 700 W: 0.82
    ),
    "H200": ("h200", {}),
    "H100-95GiB": ("h100", {"memory_gib": 95}),
    "B200": ("b200", {}),
    # racks of 72: data sheet; products as measured, fp8 and B300's in proportion to their peaks
    "GB200": ("b200", {"devices_per_node": 72, "peak_tflops": {"bf16": 2450, "fp8": 4900}, "matmul_tflops": {"bf16": 1822, "fp8": 3584}}),
    "GB300": ("b200", {"devices_per_node": 72, "peak_tflops": {"bf16": 2450, "fp8": 4900}, "matmul_tflops": {"bf16": 1822, "fp8": 3584}}),
}


@dataclass(frozen=True)
class Row:
    """One published run."""

    name: str
    source: str
    """Prefix of the id."""
    family: tuple[str, str]
    """Source and model: folds of the cross-validation keep families together."""
    case: Case
    hardware: HardwareConfig
    seconds: float
    """Measured step time."""
    memory_gib: float | None
    gpu: str
    gpus: int
    precision: str
    note: str


def read(path: Path = PUBLISHED) -> list[Row]:
    """The rows that a dense model's step time can be judged on: whole layout, a time or a rate, a GPU we know."""
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in map(_row, csv.DictReader(file)) if row is not None]


def _row(cells: dict[str, str]) -> Row | None:
    if cells["layout_complete"] != "1" or cells["gpu"] not in MACHINES:
        return None
    seconds = _seconds(cells)
    is_sparse = "MoE" in cells["notes"] or cells["ep"] not in ("", "1") or "DeepSeek" in cells["model"] or not cells["ffn_hidden"]
    if seconds is None or is_sparse or "fp4" in cells["precision"]:
        return None
    prefix = cells["id"].split("-")[0]
    source = SOURCES.get(prefix, Source())
    shape = _shape(cells, source)
    layout = _layout(cells)
    layout = replace(layout, blocks=in_order(_stages(cells, shape, layout.pp)))
    precision = "fp8" if "fp8" in cells["precision"].lower() else "bf16"
    software = Software(source.kernel, precision, cells["compile"] != "no", _tensor_exposed(cells))
    software = replace(software, **source.software)
    case = Case(shape, layout, _int(cells["seq_len"]), _int(cells["global_batch"]), Numbers(), software)
    return Row(
        cells["id"], prefix, (prefix, cells["model"]), case, _hardware(cells, source), seconds, _float(cells["measured_peak_mem_gib"]),
        cells["gpu"], _int(cells["gpus"]), cells["precision"], cells["notes"],
    )  # fmt: skip


def _seconds(cells: dict[str, str]) -> float | None:
    """The step time, from tokens a second where no time is given."""
    if cells["measured_step_time_s"]:
        return float(cells["measured_step_time_s"])
    if cells["measured_tokens_per_s_per_gpu"]:
        return _int(cells["seq_len"]) * _int(cells["global_batch"]) / (float(cells["measured_tokens_per_s_per_gpu"]) * _int(cells["gpus"]))
    return None


def _shape(cells: dict[str, str], source: Source) -> Shape:
    heads = _int(cells["heads"])
    model = cells["model"]
    return Shape(
        layers=_int(cells["layers"]),
        hidden=_int(cells["hidden"]),
        heads=heads,
        kv_heads=_int(cells["kv_heads"]) or heads,
        ffn=_int(cells["ffn_hidden"]),
        vocab=_int(cells["vocab"]) or source.vocab,
        gated=bool(re.search(r"llama|qwen|mistral|grok", model, re.IGNORECASE)),
        tied=bool(re.search(r"GPT|MPT|BLOOM|MT-NLG", model)),
        positions=_int(cells["seq_len"]) if re.search(r"GPT|MPT", model) else 0,
    )


SCHEDULES = {
    **dict.fromkeys(("", "none", "1F1B", "1F1B (vpp unstated)"), "1f1b"),
    **dict.fromkeys(("interleaved 1F1B", "interleaved 1F1B (vpp not stated)", "Interleaved1F1B", "1F1B-I"), "interleaved_1f1b"),
    **dict.fromkeys(("GPipe", "AFAB"), "gpipe"),
    "ZB-1p": "zero_bubble",
    "ZB-2p": "zero_bubble_2p",
}


def _layout(cells: dict[str, str]) -> Layout:
    dp, fsdp, zero = _int(cells["dp"]) or 1, _int(cells["fsdp"]) or 1, _int(cells["zero_stage"])
    replicate, shard = (dp, fsdp) if fsdp > 1 else (1, dp) if zero else (dp, 1)
    virtual = _int(cells["vpp"]) or 1
    if "prints VP" in cells["notes"]:
        virtual = 6  # GPT-3 of February 2025: the README says 12, the configuration that ran 6
    schedule = SCHEDULES[cells["schedule"]]
    return Layout(
        dp_replicate=replicate,
        dp_shard=shard,
        cp=_int(cells["cp"]) or 1,
        tp=_int(cells["tp"]) or 1,
        pp=_int(cells["pp"]) or 1,
        zero=zero,
        sequence_parallel=cells["sequence_parallel"] == "yes",
        schedule="interleaved_1f1b" if schedule == "1f1b" and virtual > 1 else schedule,
        virtual=virtual,
        recompute=_recompute(cells["activation_checkpointing"]),
        micro_batch=_int(cells["micro_batch"]) or 1,
        reshard=zero != 2,
    )


def _stages(cells: dict[str, str], shape: Shape, stages: int) -> tuple[int, ...]:
    """Where the source cuts layers by cost, so; else as even as they come."""
    notes = cells["notes"]
    if stages > 1 and cells["id"].startswith("nt-"):  # nanotron counts the head's cost
        return balanced(shape.layers, stages, shape.head_parameters / shape.layer_parameters)
    if "balanced as layers" in notes:
        each, over = divmod(shape.layers + 2, stages)
        return tuple(each + (0 < rank <= over) - (rank in (0, stages - 1)) for rank in range(stages))
    if "one layer fewer" in notes and (shape.layers + 2) % stages == 0:
        each = (shape.layers + 2) // stages
        return (each - 1, *(each,) * (stages - 2), each - 1)
    return ()


def _recompute(text: str) -> Recompute:
    if some := re.match(r"full on (\d+) of (\d+) layers", text):
        return every(int(some[1]) / int(some[2]))
    if text == "full":
        return FULL
    if text == "selective (attention core)":
        return SELECTIVE
    if text == "selective (op)":
        return Recompute(0.5, 0.0, 1.0, 0.5)  # every second product, as torchtitan's policy has it
    if text in ("selective (every 2nd layer)", "selective", "custom remat"):
        return every(0.5)
    return NONE


def _tensor_exposed(cells: dict[str, str]) -> float:
    """Half where the source says that tensor-parallel communication overlaps."""
    notes, model = cells["notes"], cells["model"]
    on = re.search(r"TP comm overlap on for ([\dB/]+)", notes)
    if on and any(size in model for size in on[1].split("/")):
        return 0.5
    if "TP comm overlap except" in notes and "8B" not in model:
        return 0.5
    return 0.5 if "async TP" in notes else 1.0


def _hardware(cells: dict[str, str], source: Source) -> HardwareConfig:
    name, changes = MACHINES[cells["gpu"]]
    found = replace(preset(name), **changes) if changes else preset(name)
    if source.hardware:
        found = replace(found, **source.hardware)
    if stated := re.match(r"(\d+)Gb/s(?: RoCE)? per node", cells["interconnect"]):
        found = replace(found, network_bandwidth=int(stated[1]) / 8 / 8)
    return found


def _int(text: str) -> int:
    return int(float(text)) if text else 0


def _float(text: str) -> float | None:
    return float(text) if text else None
