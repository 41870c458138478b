"""Peak rates of devices, for MFU (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

Dense products (no structured sparsity), from the makers' data sheets: NVIDIA V100 (DS-2017), A100 (2021), H100
and H200 (2023, 2024), B200 (2024), L4, L40S, RTX 4090 and 3090 (GeForce whitepapers); AMD MI250X, MI300X.
"""

from __future__ import annotations

import re

import torch

_HALF = "half"
_TF32 = "tf32"
_FP32 = "fp32"

PEAKS: dict[str, dict[str, float]] = {
    "GB200": {_HALF: 2.5e15, _TF32: 1.25e15, _FP32: 80e12},
    "GH200": {_HALF: 989e12, _TF32: 494e12, _FP32: 67e12},
    "B200": {_HALF: 2.25e15, _TF32: 1.12e15, _FP32: 75e12},
    "H200": {_HALF: 989e12, _TF32: 494e12, _FP32: 67e12},
    "H100 PCIe": {_HALF: 756e12, _TF32: 378e12, _FP32: 51e12},
    "H100 NVL": {_HALF: 835e12, _TF32: 417e12, _FP32: 60e12},
    "H100": {_HALF: 989e12, _TF32: 494e12, _FP32: 67e12},
    "A100": {_HALF: 312e12, _TF32: 156e12, _FP32: 19.5e12},
    "V100": {_HALF: 125e12, _FP32: 15.7e12},
    "L40S": {_HALF: 362e12, _TF32: 183e12, _FP32: 91.6e12},
    "L4": {_HALF: 121e12, _TF32: 60e12, _FP32: 30.3e12},
    "RTX 4090": {_HALF: 165e12, _TF32: 82.6e12, _FP32: 82.6e12},
    "RTX 3090": {_HALF: 71e12, _TF32: 35.6e12, _FP32: 35.6e12},
    "MI250X": {_HALF: 383e12, _FP32: 47.9e12},
    "MI300X": {_HALF: 1307e12, _TF32: 653e12, _FP32: 163e12},
}
"""Floating-point operations a second by words in the device's name; the first that fits holds."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak of `device` for products in `dtype`; None where it is not known (a CPU's depends on what else it does)."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype, torch.backends.cuda.matmul.allow_tf32)


def peak_of(name: str, dtype: torch.dtype, tf32: bool) -> float | None:
    """Peak of the device called `name`; float32 products may run in TF32."""
    rates = next((rates for part, rates in PEAKS.items() if re.search(rf"\b{part}\b", name)), None)
    if rates is None:
        return None
    if dtype in (torch.float16, torch.bfloat16):
        return rates[_HALF]
    if dtype == torch.float32:
        return rates.get(_TF32, rates[_FP32]) if tf32 else rates[_FP32]
    return None
