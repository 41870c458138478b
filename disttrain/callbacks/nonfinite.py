"""Where the first value arose that is not finite: a step's batch is run again, with a look at what every operation makes.

On each rank, in this order: are the samples finite, are the weights, and which operation is the first that makes NaN or
infinity out of finite numbers. One that gets such a value already has it from another rank, by a collective, a border of
a pipeline or a gathered weight; so the ranks that are named are those where it began. (Minus infinity is left out: masks
are made of it.) An operation belongs to the module whose forward runs, or whose output's gradient came last.
Gradients of the second run are thrown away; buffers and what compression keeps are put back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain.callbacks.replicas import tensors_of
from disttrain.models.micro_batch import runs_again
from disttrain.parallel import collectives
from disttrain.parallel.blocks import class_name
from disttrain.parallel.clock import Action
from disttrain.parallel.step import Step
from disttrain.parallel.strategy import Strategy
from disttrain.parallel.watch import Watcher, unwatch, watch

if TYPE_CHECKING:
    from disttrain.train.trainer import Trainer

LOSS = "the loss"
HALF = ("torch.float16", "torch.bfloat16")
STEEP = 10.0
"""A gradient norm so many times the median of those before says that training had begun to diverge."""
GROWN = 1e8
"""Numbers larger than this come of weights that have grown without bound."""
_MOVING = ("c10d", "fsdp")
"""Operations that fill memory later, or return some that is not filled yet."""
_DOMAIN = ("log", "sqrt", "div", "pow", "reciprocal", "acos", "asin", "atanh", "softmax", "norm")
"""Parts of the names of operations that take some numbers only."""
_ARITHMETIC = ("mm", "mul", "add", "sub", "conv", "sum", "linear")
"""Parts of the names of those that make minus infinity by overflow alone."""

Found = dict[str, Any]
"""What a rank knows of its first such value: kind (samples, weights, made, received), and where."""


def is_bad(x: Tensor) -> bool:
    """Whether `x` holds NaN or plus infinity. A host read."""
    return x.is_floating_point() and x.itemsize > 1 and x.numel() > 0 and not bool((x.detach() < math.inf).all())


def _is_below(x: Tensor) -> bool:
    """Whether `x` holds minus infinity. A host read."""
    return x.is_floating_point() and x.itemsize > 1 and bool((x.detach() == -math.inf).any())


class _Search(TorchDispatchMode, Watcher):
    """Looks at what each operation makes, until the first that is bad."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: Found | None = None
        self._names = {id(module): name for name, module in model.named_modules()}
        self._kinds = {name: class_name(module) for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._backward = ""
        self._micro = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        given = tensors_of(args)
        if self.found is None and given and func.namespace not in _MOVING and not func.is_view and "empty" not in func.name():
            made = next((x for x in tensors_of(outputs) if is_bad(x)), None)
            if made is None and any(part in func.name() for part in _ARITHMETIC):
                made = next((x for x in tensors_of(outputs) if _is_below(x)), None)
                made = None if any(map(_is_below, given)) else made  # a mask that was added
            if made is not None:
                self._note(func, made, given, outputs)
        return outputs

    def _note(self, func: Any, made: Tensor, given: Sequence[Tensor], outputs: Any) -> None:
        """An operation has made something bad: out of what? What it has written in place is not what it was given."""
        own = {id(x) for x in tensors_of(outputs)}
        numbers = [x for x in given if x.is_floating_point() and id(x) not in own]
        is_forward = bool(self._stack) or not runs_again()
        module = self._stack[-1] if self._stack else LOSS if is_forward else self._backward
        self.found = {
            "kind": "received" if any(is_bad(x) for x in numbers) else "made",
            "module": module,
            "class": self._kinds.get(module, ""),
            "direction": "forward" if is_forward else "backward",
            "micro": self._micro,
            "operation": func.name(),
            "bad": int((~made.detach().isfinite()).sum()),
            "size": made.numel(),
            "dtype": str(made.dtype),
            "largest": max((float(x.detach().abs().max()) for x in numbers if x.numel()), default=0.0),
            "time": time.time(),
        }

    # --- whose operation it is -------------------------------------------------------------------------------------------

    def enters(self, module: nn.Module, inputs: Any) -> None:
        """Before a module's forward. A gradient that leaves it again belongs to whoever called it."""
        caller = self._stack[-1] if self._stack else LOSS
        self._stack.append(self._names.get(id(module), LOSS))
        for x in tensors_of(inputs):
            self._mark(x, caller)

    def leaves(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """After it, also if it raised. A gradient that comes to what it returns enters its backward."""
        name = self._stack.pop()
        for x in tensors_of(outputs):
            self._mark(x, name)

    def _mark(self, x: Tensor, module: str) -> None:
        if x.grad_fn is None or hasattr(x, "_of_module"):
            return
        x._of_module = module  # type: ignore[attr-defined]

        def arrives(_: Tensor) -> None:
            self._backward = module

        x.register_hook(arrives)

    def acts(self, action: Action) -> None:
        """See `Watcher`."""
        self._micro = action[2]

    def passes(self, direction: str, micro: int) -> None:
        """See `Watcher`."""
        self._micro = micro


def can_explain(strategy: Strategy) -> bool:
    """Whether a step can be run again by itself: ranks agree at each (not so in local SGD), and no engine of DeepSpeed's keeps count."""
    return strategy.apart.size == 1 and strategy.options.deepspeed is None


def explain(trainer: Trainer, step: Step, norms: Sequence[float], key: str) -> str:
    """Where the first bad value of `step` arose, in words, with what to try. Every rank calls it, between two steps.

    `norms`: gradient norms up to that step's, NaN for none; `key`: where the config says what to do at such steps.
    """
    world = trainer.mesh.axis("world")
    by_rank: list[Found | None] = collectives.gather_json(_before(trainer, step), world, trainer.device)
    if not any(by_rank):
        by_rank = collectives.gather_json(_again(trainer, step), world, trainer.device)
    rate = float(trainer.update.rate)
    number = step.number + 1
    began = [(rank, found) for rank, found in enumerate(by_rank) if found is not None and found["kind"] != "received"]
    if not began:
        got = [rank for rank, found in enumerate(by_rank) if found is not None]
        seen = f"ranks {got} saw one come in, and none saw it arise" if got else "all was finite then"
        return (
            f"step {number} was not finite; run again it could not be explained: {seen} (weights may have had an update since, or a kernel "
            f"does not give the same twice: debug=deterministic)\n  {_state(rate, norms)}"
        )
    first = min((found for _, found in began), key=_order)
    same = [rank for rank, found in began if (found["kind"], found["module"]) == (first["kind"], first["module"])]
    where = [f"{axis} {index}" for axis, index in trainer.mesh.place(same[0]).items()] if len(same) == 1 else []
    who = f"rank{'s' if len(same) > 1 else ''} {', '.join(map(str, same))}" + (f" ({', '.join(where)})" if where else "")
    return (
        f"step {number}: the first value that is not finite arose on {who}, {_words(first)}\n  {_state(rate, norms)}\n"
        f"  try: {_remedy(first, rate, norms, key, trainer)}"
    )


def _order(found: Found) -> tuple[int, float]:
    """Samples come before weights, those before what is made of them, and that in time."""
    return ("samples", "weights", "made").index(found["kind"]), found.get("time", 0.0)


def _before(trainer: Trainer, step: Step) -> Found | None:
    """A bad value among this rank's samples or weights."""
    for index, batch in enumerate(step.micro):
        for x in (*tensors_of(batch.inputs), *tensors_of(batch.targets)):
            if is_bad(x):
                rows = (~(x.flatten(1) < math.inf).all(1)).nonzero().flatten().tolist()
                return {"kind": "samples", "module": "", "micro": index, "samples": batch.indices[rows].tolist()[:8]}
    for name, parameter in trainer.parameters.items():
        if is_bad(parameter):
            bad = int((~(parameter.detach() < math.inf)).sum())
            return {"kind": "weights", "module": name, "bad": bad, "size": parameter.numel()}
    return None


def _again(trainer: Trainer, step: Step) -> Found | None:
    """Forward and backward of `step` under a search, all of it undone."""
    strategy = trainer.strategy
    kept = [(x, x.clone()) for x in (*trainer.model.buffers(), *(one for of in strategy.compressors for one in of.state().values()))]
    search = _Search(trainer.model)
    with _hooked(search), _eager(strategy.options.compile):
        with search:
            local = Strategy.forward_backward(strategy, step)  # whatever stands in its place on this one
        strategy.finish(local, step)  # gradients that are under way arrive
    for parameter in trainer.parameters.values():
        parameter.grad = None
    with torch.no_grad():
        for x, before in kept:
            x.copy_(before)
    return search.found


@contextmanager
def _hooked(search: _Search) -> Iterator[None]:
    hooks = [register_module_forward_pre_hook(search.enters), register_module_forward_hook(search.leaves, always_call=True)]
    watch(search)
    try:
        yield
    finally:
        unwatch(search)
        for hook in hooks:
            hook.remove()


@contextmanager
def _eager(compiled: bool) -> Iterator[None]:
    """What is compiled runs as it is written: a fused kernel would hide who made a value."""
    if not compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _words(found: Found) -> str:
    if found["kind"] == "samples":
        return f"in the samples themselves: numbers {', '.join(map(str, found['samples']))} (micro-batch {found['micro']})"
    if found["kind"] == "weights":
        return f"before the forward: {found['bad']} of {found['size']} numbers of the weight '{found['module']}' are not finite already"
    module = f"module '{found['module']}' ({found['class']})" if found["class"] else found["module"] or "no module"
    return (
        f"in the {found['direction']} of micro-batch {found['micro']}, in {module}: {found['operation']} made {found['bad']} of "
        f"{found['size']} numbers ({found['dtype'].removeprefix('torch.')}) out of finite ones up to {found['largest']:.3g}"
    )


def _state(rate: float, norms: Sequence[float]) -> str:
    before = [f"{norm:.3g}" for norm in norms[:-1] if not math.isnan(norm)]
    return f"learning rate {rate:.3g}; gradient norms of the steps before: {', '.join(before) or 'none'}"


def _remedy(found: Found, rate: float, norms: Sequence[float], key: str, trainer: Trainer) -> str:
    """The override that most likely helps."""
    lower = f"optimizer.lr={rate / 3:.2g}" if rate > 0 else "scheduler.warmup_steps=<more>"
    if found["kind"] == "samples":
        return f"leave these samples out of the data set; {key}=skip goes on without their batches"
    if found["kind"] == "weights":
        return f"{key}=roll_back goes back to weights that were sound (callbacks.checkpoint.every=100); {lower}"
    clip = trainer.update.clip_norm
    finite = sorted(norm for norm in norms[:-1] if math.isfinite(norm))
    if (finite and max(finite) > STEEP * finite[len(finite) // 2]) or any(math.isinf(norm) for norm in norms[:-1]):
        return f"{lower}, as the gradients had begun to grow" + ("" if clip is not None else "; train.clip_norm=1.0")
    if found["largest"] > GROWN:
        return f"optimizer.lr={rate / 10:.2g}: numbers had grown to {found['largest']:.2g} before" + (
            "" if clip else "; train.clip_norm=1.0"
        )
    if found["dtype"] == HALF[0]:
        return "callbacks.amp.precision=bf16: fp16 ends at 65504"
    if any(part in found["operation"] for part in _DOMAIN):
        name = found["operation"].removeprefix("aten::")
        return f"keep what goes into {name} where it is defined, with a clamp or an epsilon in that module; else {lower}"
    if found["dtype"] == HALF[1]:
        return f"callbacks.amp.precision=fp32, to see whether it is the rounding; {lower}"
    return lower + ("" if clip is not None else "; train.clip_norm=1.0")
