"""The end of a step: one optimizer update, decided and scaled on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from disttrain.parallel.layout import Layout
from disttrain.parallel.step import Report, ScaleRule


class LossScale:
    """Dynamic loss scale, the same on every rank because it moves by the agreed skip alone."""

    def __init__(self, rule: ScaleRule, device: torch.device) -> None:
        self.rule = rule
        self.value = torch.full((), rule.start, dtype=torch.float32, device=device)
        self.streak = torch.zeros((), dtype=torch.int32, device=device)

    def adapt(self, overflow: Tensor) -> None:
        """Back off where `overflow` (float32, 0 or 1), grow after a long enough streak without."""
        torch._amp_update_scale_(
            self.value, self.streak, overflow, self.rule.growth_factor, self.rule.backoff_factor, self.rule.growth_interval
        )


class Update:
    """Applies an optimizer to summed gradients. Unscaling and clipping are one device factor; SKIP is `found_inf`.

    The rate is read from a table of the schedule at the device's count of real updates, so a skipped step moves
    neither. Optimizers that do not honour `found_inf` cost one host read a step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factors: Tensor,
        updates: Tensor,
        skipped: Tensor,
        clip_norm: float | None,
        loss_scale: LossScale | None,
    ) -> None:
        """`factors` [n]: the schedule by update; `updates` and `skipped`: the run's device counters, moved here."""
        self.optimizer = optimizer
        self.loss_scale = loss_scale
        self.clip_norm = clip_norm
        self.updates = updates
        self.skipped = skipped
        self._factors = factors
        self._last = torch.tensor(factors.numel() - 1, device=factors.device)
        self._on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._bases = [float(group["lr"]) for group in optimizer.param_groups]
        self._uniform = len(set(self._bases)) == 1
        self._one = torch.ones((), dtype=torch.float32, device=updates.device)
        self.rate = torch.zeros((), dtype=torch.float32, device=updates.device)
        if self._on_device:
            for group in optimizer.param_groups:
                group["lr"] = self.rate if self._uniform else torch.zeros_like(self.rate)

    @property
    def honours_skip(self) -> bool:
        """Whether the optimizer skips on the device, without a host read."""
        return self._on_device

    def __call__(self, report: Report) -> None:
        """Update, or not; then forget the gradients."""
        self._set_rates()
        skip = report.skip
        divisor = self._divisor(report)
        if self._on_device:
            self.optimizer.grad_scale = divisor  # type: ignore[attr-defined]
            self.optimizer.found_inf = skip  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not bool(skip):
            if divisor is not None:
                grads = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
                torch._foreach_div_(grads, divisor)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += skip.to(torch.int64)
        self.updates += (1 - skip).to(torch.int64)
        if self.loss_scale is not None:
            self.loss_scale.adapt(report.overflow)

    def _divisor(self, report: Report) -> Tensor | None:
        """What gradients are divided by: loss scale / clip factor."""
        scale = None if self.loss_scale is None else self.loss_scale.value
        if self.clip_norm is None:
            return scale
        excess = (report.grad_norm / self.clip_norm).clamp(min=1.0).to(torch.float32)
        return excess if scale is None else excess * scale

    def _set_rates(self) -> None:
        factor = self._factors.take(torch.minimum(self.updates, self._last))
        if self._on_device and self._uniform:
            torch.mul(factor, self._bases[0], out=self.rate)
            return
        torch.mul(factor, self._bases[0], out=self.rate)
        for group, base in zip(self.optimizer.param_groups, self._bases, strict=True):
            if self._on_device:
                torch.mul(factor, base, out=group["lr"])
            else:
                group["lr"] = float(factor) * base

    def state_tensors(self, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout]) -> dict[str, tuple[Tensor, Layout]]:
        """Moments as '<parameter>/<moment>' with that parameter's layout; scalars (step counts) with an empty one.

        An optimizer that has not stepped yet has none.
        """
        names = {id(parameter): name for name, parameter in parameters.items()}
        found: dict[str, tuple[Tensor, Layout]] = {}
        for parameter, state in self.optimizer.state.items():
            name = names[id(parameter)]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    found[f"{name}/{key}"] = (value, layouts[name] if value.shape == parameter.shape else Layout(tuple(value.shape)))
        return found

    def make_state(self) -> None:
        """Create the optimizer's moments (zeros) before a load fills them: one update that is skipped on the device."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        before = [p.detach().clone() for group in self.optimizer.param_groups for p in group["params"]] if not self._on_device else []
        if self._on_device:
            self.optimizer.grad_scale, self.optimizer.found_inf = None, self._one  # type: ignore[attr-defined]
        self.optimizer.step()
        with torch.no_grad():
            for parameter, value in zip((p for g in self.optimizer.param_groups for p in g["params"]), before, strict=False):
                parameter.copy_(value)
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Scalars beside the moments: the loss scale."""
        if self.loss_scale is None:
            return {}
        return {"loss_scale": float(self.loss_scale.value), "streak": int(self.loss_scale.streak)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up `state_dict`; the counters `updates` and `skipped` were restored before."""
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.value.fill_(state["loss_scale"])
            self.loss_scale.streak.fill_(state["streak"])
