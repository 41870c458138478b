"""Mixed precision: matrix products in a half type, weights and their update in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

from disttrain.config.limits import check_limits
from disttrain.errors import ConfigError
from disttrain.parallel.step import Declaration, Precision, ScaleRule
from disttrain.train.hooks import StepPolicy

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class AMP(StepPolicy):
    """Autocast around every forward; for fp16 a dynamic loss scale too (Micikevicius et al. 2018, arXiv:1710.03740).

    It only declares: the scale itself lives in the update, moves by the agreed skip alone and is saved with it.
    """

    def __init__(
        self,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        """`precision`: fp32 | bf16 | fp16; the rest is for fp16, `growth_interval` in steps without an overflow."""
        scale = {"init_scale": init_scale, "growth_factor": growth_factor}
        check_limits("amp", scale | {"backoff_factor": backoff_factor, "growth_interval": growth_interval})
        if precision not in _DTYPES:
            raise ConfigError(
                f"callbacks.amp.precision is '{precision}'; it may be {', '.join(_DTYPES)}",
                "callbacks.amp.precision=bf16",
            )
        self.precision = precision
        self.dtype = _DTYPES[precision]
        self.rule = ScaleRule(init_scale, growth_factor, backoff_factor, growth_interval)

    def declare(self) -> Declaration:
        """The type of matrix products and, for fp16, how the loss is scaled; nothing for fp32."""
        if self.precision == "fp32":
            return Declaration()
        return Declaration(precision=Precision(self.dtype), loss_scale=self.rule if self.precision == "fp16" else None)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast on every kind of device that this process computes on. Nothing is entered before the context is."""
        return nullcontext() if self.precision == "fp32" else _autocast(self.dtype)


@contextmanager
def _autocast(dtype: torch.dtype) -> Iterator[None]:
    on_gpu = torch.autocast("cuda", dtype) if torch.cuda.is_initialized() else nullcontext()
    with torch.autocast("cpu", dtype), on_gpu:
        yield
