"""The end of a step: one optimizer update, decided and scaled on the device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
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


def _plain(value: Any) -> bool:
    """Whether an optimizer keeps something as a plain number or text, which no tensor file holds."""
    return isinstance(value, (bool, int, float, str))


def _bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's step, for torch's own without the wrapper: that imports torch's compiler (over a second on every rank)."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return optimizer.step
    bare = torch.no_grad()(inspect.unwrap(kind.step))

    def step() -> None:
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            optimizer.step()
        else:
            bare(optimizer)

    return step


class Update:
    """Applies an optimizer to summed gradients. Unscaling and clipping are one device factor; SKIP is `found_inf`.

    The rate is read from a table of the schedule at the device's count of real updates, so a skipped step moves
    neither. Optimizers that do not honour `found_inf` cost one host read a step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factors: Tensor,
        clip_norm: float | None,
        loss_scale: LossScale | None,
    ) -> None:
        """`factors` [n]: the schedule by update, at least one for each call."""
        self.optimizer = optimizer
        self.loss_scale = loss_scale
        self.clip_norm = clip_norm
        self.num_calls = 0
        self.updates = torch.zeros((), dtype=torch.int64, device=factors.device)
        """Calls that did make an update, counted on the device."""
        self._factors = factors
        self._step = _bare_step(optimizer)
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._bases = [float(group["lr"]) for group in optimizer.param_groups]
        self._uniform = len(set(self._bases)) == 1
        self._one = torch.ones((), dtype=torch.float32, device=factors.device)
        wide = factors.device.type == "cpu" and all(parameter.dtype == torch.float64 for parameter in self._parameters)
        self.rate = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=factors.device)
        self._excess = torch.ones((), dtype=torch.float32, device=factors.device)
        # fused kernels take the divisor in float32: in a proof in float64 gradients are divided here instead
        self._divides = not self._on_device or any(parameter.dtype == torch.float64 for parameter in self._parameters)
        self._rates = (factors * self._bases[0]).to(self.rate.dtype)
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
        if divisor is not None and self._divides:
            torch._foreach_div_([p.grad for p in self._parameters if p.grad is not None], divisor)
        if self._on_device:
            self.optimizer.grad_scale = None if self._divides else divisor  # type: ignore[attr-defined]
            self.optimizer.found_inf = skip  # type: ignore[attr-defined]
            self._step()
        elif not bool(skip):
            self._step()
        for parameter in self._parameters:
            parameter.grad = None
        self.num_calls += 1
        self.updates += skip == 0
        if self.loss_scale is not None:
            self.loss_scale.adapt(report.overflow)

    def _divisor(self, report: Report) -> Tensor | None:
        """What gradients are divided by: loss scale / clip factor."""
        scale = None if self.loss_scale is None else self.loss_scale.value
        if self.clip_norm is None:
            return scale
        excess = report.grad_norm.clamp(min=self.clip_norm) / self.clip_norm
        if not self._divides:
            excess = self._excess.copy_(excess)
        return excess if scale is None else excess * scale

    @property
    def skipped(self) -> Tensor:
        """Calls that made none, on the device."""
        return self.num_calls - self.updates

    def _set_rates(self) -> None:
        if self._on_device and self._uniform:
            torch.take(self._rates, self.updates, out=self.rate)
            return
        factor = self._factors.take(self.updates)
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

    def make_state(self, parameters: Sequence[nn.Parameter]) -> None:
        """Create the moments (zeros) of these parameters before a load fills them: one update that is skipped on the device."""
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        before = [] if self._on_device else [parameter.detach().clone() for parameter in parameters]
        if self._on_device:
            self.optimizer.grad_scale, self.optimizer.found_inf = None, self._one  # type: ignore[attr-defined]
        self._step()
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=False):
                parameter.copy_(value)
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Scalars beside the moments: counters and the loss scale. A host read."""
        state: dict[str, Any] = {"num_calls": self.num_calls, "skipped": int(self.skipped)}
        own = [{key: value for key, value in self.optimizer.state[p].items() if _plain(value)} for p in self._parameters]
        groups = [{key: value for key, value in g.items() if key != "lr" and _plain(value)} for g in self.optimizer.param_groups]
        state |= {"by_parameter": own, "by_group": groups}
        if self.loss_scale is not None:
            state |= {"loss_scale": float(self.loss_scale.value), "streak": int(self.loss_scale.streak)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up `state_dict`."""
        self.num_calls = state["num_calls"]
        self.updates.fill_(state["num_calls"] - state["skipped"])
        for parameter, values in zip(self._parameters, state["by_parameter"], strict=True):
            if values:
                self.optimizer.state[parameter].update(values)
        for group, values in zip(self.optimizer.param_groups, state["by_group"], strict=True):
            group.update(values)
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.value.fill_(state["loss_scale"])
            self.loss_scale.streak.fill_(state["streak"])
