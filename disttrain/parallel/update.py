"""The end of a step: one optimizer update, decided and scaled on the device."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from disttrain.errors import CheckpointError
from disttrain.parallel.fused import FusedAdam
from disttrain.parallel.layout import Layout
from disttrain.parallel.step import Report, ScaleRule, Verdict


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


class Gate:
    """Whether a step's update is made, by one comparison on the device."""

    def __init__(self, device: torch.device) -> None:
        below = (math.inf, *(0.5 if verdict is Verdict.SKIP else math.inf for verdict in Verdict))
        self._below = torch.tensor(below, dtype=torch.float64, device=device)
        self._go, self._skip = torch.zeros((), device=device), torch.ones((), device=device)

    def __call__(self, agreed: Tensor, has_targets: Tensor | bool) -> Tensor:
        """1.0 where `agreed` [sum of squares, then verdicts] is not finite or asks for a skip, or nothing is learned from; else 0.0."""
        if has_targets is False:
            return self._skip.clone()
        go = agreed.lt(self._below).all()  # a NaN lies below nothing
        return torch.where(go if has_targets is True else go & has_targets, self._go, self._skip)


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

    sharing = 1
    """Ranks that share out the moments of what each holds."""

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
        self._fused = FusedAdam(optimizer)
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._groups = list(optimizer.param_groups)  # a list of our own: DeepSpeed's engine takes those without parameters out
        self._bases = [float(group["lr"]) for group in self._groups]
        self._uniform = len(set(self._bases)) == 1
        self._one = torch.ones((), dtype=torch.float32, device=factors.device)
        wide = factors.device.type == "cpu" and all(parameter.dtype == torch.float64 for parameter in self._parameters)
        self.rate = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=factors.device)
        self._clip_norm = torch.full((), math.inf if clip_norm is None else clip_norm, dtype=torch.float64, device=factors.device)
        self._excess = torch.ones((), dtype=torch.float32, device=factors.device)
        # fused kernels take the divisor in float32: in a proof in float64 gradients are divided here instead
        self._divides = not self._on_device or any(parameter.dtype == torch.float64 for parameter in self._parameters)
        self._rates = (factors * self._bases[0]).to(self.rate.dtype)
        if self._on_device:
            for group in self._groups:
                group["lr"] = self.rate if self._uniform else torch.zeros_like(self.rate)

    @property
    def honours_skip(self) -> bool:
        """Whether the optimizer skips on the device, without a host read."""
        return self._on_device

    def __call__(self, report: Report) -> None:
        """Update, or not; then forget the gradients."""
        self._set_rates()
        report = report.on(self.updates.device)
        skip = report.skip
        divisor = self._divisor(report)
        if divisor is not None and self._divides:
            torch._foreach_div_([p.grad for p in self._parameters if p.grad is not None], divisor)
        if self._on_device:
            self._step_on_device(None if self._divides else divisor, skip)
        elif not bool(skip):
            self._step()
        for parameter in self._parameters:
            parameter.grad = None
        self.num_calls += 1
        self.updates += skip.logical_not()
        if self.loss_scale is not None:
            self.loss_scale.adapt(report.overflow)

    def _step_on_device(self, grad_scale: Tensor | None, skip: Tensor) -> None:
        if not self._fused(grad_scale, skip):
            self.optimizer.grad_scale, self.optimizer.found_inf = grad_scale, skip  # type: ignore[attr-defined]
            self._step()

    def _divisor(self, report: Report) -> Tensor | None:
        """What gradients are divided by: loss scale / clip factor."""
        scale = None if self.loss_scale is None else self.loss_scale.value
        if self.clip_norm is None:
            return scale
        highest = torch.maximum(report.grad_norm, self._clip_norm)
        excess = highest / self._clip_norm if self._divides else torch.div(highest, self._clip_norm, out=self._excess)
        return excess if scale is None else excess * scale

    def ready(self, number: int, due: frozenset[str]) -> frozenset[str]:
        """What happens after step `number`, of what is `due`: all of it, where ranks agree at every step."""
        return due

    def shown(self, report: Report) -> tuple[Report, Tensor, Tensor]:
        """(report, rate, skipped updates) as a row of the log has them, the same on every rank; all call it."""
        return report, self.rate, self.skipped

    def check_saved(self, state: Mapping[str, Any]) -> None:
        """CheckpointError where the `state_dict` of a checkpoint is of another kind of update."""
        if "replicas" in state:
            raise CheckpointError(
                f"it was written under strategy.sync_every, where each of {state['replicas']} replicas has an optimizer state of its own",
                f"strategy.sync_every=<as then> on {state['replicas']} replicas, or init_from=<it> to start anew from its weights",
            )

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
        for group, base in zip(self._groups, self._bases, strict=True):
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

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """After a load has filled what `state_tensors` gave ('<parameter>/<moment>'): nothing, where that is the optimizer's own memory."""

    def show_gradients(self) -> None:
        """After `finish`: each parameter's gradient is to be looked at in `.grad`, where it mostly lies already. All ranks call it."""

    def state_dict(self) -> dict[str, Any]:
        """Scalars beside the moments: counters and the loss scale. A host read."""
        state: dict[str, Any] = {"num_calls": self.num_calls, "skipped": int(self.skipped)}
        groups = [{key: value for key, value in g.items() if key != "lr" and _plain(value)} for g in self._groups]
        state["by_group"] = groups
        if self.loss_scale is not None:
            state |= {"loss_scale": float(self.loss_scale.value), "streak": int(self.loss_scale.streak)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up `state_dict`."""
        self.num_calls = state["num_calls"]
        self.updates.fill_(state["num_calls"] - state["skipped"])
        for group, values in zip(self._groups, state["by_group"], strict=True):
            group.update(values)
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.value.fill_(state["loss_scale"])
            self.loss_scale.streak.fill_(state["streak"])

    def state_by_name(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps of a parameter as a plain number or text, of those that this rank holds."""
        plain = {name: self._plain_state(parameter) for name, parameter in parameters.items()}
        return {name: values for name, values in plain.items() if values}

    def _plain_state(self, parameter: Tensor) -> dict[str, Any]:
        return {key: value for key, value in self.optimizer.state.get(parameter, {}).items() if _plain(value)}

    def load_by_name(self, parameters: Mapping[str, nn.Parameter], state: Mapping[str, dict[str, Any]]) -> None:
        """Take up `state_by_name` of all ranks together."""
        for name, values in state.items():
            if name in parameters:
                self.optimizer.state[parameters[name]].update(values)
