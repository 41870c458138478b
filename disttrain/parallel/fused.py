"""torch's fused Adam and AdamW, called on lists that are kept from step to step.

Their own `step` looks every option over, collects each group's tensors and sorts them by device and type, every time,
which for a small model takes longer than the update. What the kernel is given is the same, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Group:
    options: dict[str, Any]
    parameters: list[Tensor]
    states: list[dict[str, Tensor]]

    @property
    def is_plain(self) -> bool:
        """Whether the kernel can be called once for all of it, and every parameter has been updated before."""
        kinds = {(type(p) in (Tensor, torch.nn.Parameter), p.device, p.dtype) for p in self.parameters}
        unusual = any(self.options[name] for name in ("amsgrad", "differentiable", "capturable"))
        moments = all(state.keys() >= {"step", "exp_avg", "exp_avg_sq"} for state in self.states)
        numbers = all(isinstance(beta, (int, float)) for beta in self.options["betas"])
        return len(kinds) == 1 and next(iter(kinds))[0] and moments and numbers and bool(self.options["fused"]) and not unusual


class FusedAdam:
    """The step of an optimizer that is torch's Adam or AdamW, fused, itself and no child of it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._fits = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        self._state: Any = None
        self._num_states = 0
        self._given: list[dict[str, Any]] = []
        self._groups: list[_Group] = []

    @torch.no_grad()
    def __call__(self, grad_scale: Tensor | None, skip: Tensor) -> bool:
        """Update with gradients divided by `grad_scale`, unless `skip` (float32) is 1.0.

        False, with nothing done, where this is not the optimizer's way: its first step, hooks, a missing gradient, rare options.
        """
        if not self._fits or self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks:
            return False
        if self._is_changed():
            self._collect()
        if not self._groups:
            return False
        if any(parameter.grad is None for group in self._groups for parameter in group.parameters):
            return False
        steps = [[state["step"] for state in group.states] for group in self._groups]
        counted = [step for of_group in steps for step in of_group]
        torch._foreach_add_(counted, [1.0 - skip] * len(counted))  # before a skipped update nobody reads them
        for group, its_steps in zip(self._groups, steps, strict=True):
            options = group.options
            kernel = torch._fused_adamw_ if options["decoupled_weight_decay"] else torch._fused_adam_
            kernel(
                group.parameters,
                [cast(Tensor, parameter.grad) for parameter in group.parameters],
                [state["exp_avg"] for state in group.states],
                [state["exp_avg_sq"] for state in group.states],
                [],
                its_steps,
                lr=options["lr"],
                beta1=options["betas"][0],
                beta2=options["betas"][1],
                weight_decay=options["weight_decay"],
                eps=options["eps"],
                amsgrad=False,
                maximize=options["maximize"],
                grad_scale=grad_scale,
                found_inf=skip,
            )
        return True

    def _is_changed(self) -> bool:
        """Whether the optimizer was given other groups or another state, as `load_state_dict` does."""
        state, given = self.optimizer.state, self.optimizer.param_groups
        known = state is self._state and len(state) == self._num_states and len(given) == len(self._given)
        return not known or any(group is not before for group, before in zip(given, self._given, strict=True))

    def _collect(self) -> None:
        self._state, self._given = self.optimizer.state, list(self.optimizer.param_groups)
        self._num_states = len(self._state)
        groups = [_Group(group, group["params"], [self._state.get(p, {}) for p in group["params"]]) for group in self._given]
        self._groups = groups if all(group.is_plain for group in groups) else []
