"""The tensor plan: {module name pattern: style}, stated by a model and applied here, which swaps the modules it names.

Parameters keep their names. A user's own model needs such a table and no parallel code.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from disttrain.errors import ConfigError
from disttrain.models.projections import Projections
from disttrain.parallel.experts import cut_width
from disttrain.parallel.layout import Cut, Placement, Sum
from disttrain.parallel.mesh import Axis
from disttrain.parallel.random import Streams
from disttrain.parallel.tensor import (
    ColumnLinear,
    ColumnProjections,
    OwnRandom,
    RowLinear,
    SequenceGather,
    SequencePart,
    SequenceSplit,
    WholeSequence,
)
from disttrain.parallel.vocabulary import VocabEmbedding

STYLES: Mapping[str, str] = {
    "column": "output features cut, input the same on all ranks (Linear, Projections)",
    "column_gather": "as column, output made whole again (Linear)",
    "row": "input features cut, output summed (Linear)",
    "vocab_embedding": "rows cut by vocabulary (Embedding)",
    "vocab_head": "rows cut by vocabulary, output stays cut (Linear)",
    "summed": "whole weights that work on cut activations (a norm of heads, a learned slope): their gradient is summed",
    "sequence_norm": "whole weights; input cut along tokens under sequence parallelism",
    "position_embedding": "whole weights; output cut along tokens under sequence parallelism (Embedding)",
    "sequence_split": "an Identity at which whole activations are cut along tokens under sequence parallelism",
    "sequence_gather": "an Identity at which activations cut along tokens are made whole again",
    "whole_sequence": "a module that counts over whole sequences: under sequence parallelism its input is made whole, its output cut",
    "experts": "stacked matrices [experts, ...]: cut by expert over strategy.ep; each expert's width cut (Experts)",
    "heads": "works on this rank's heads: random draws are its own",
    "residual_dropout": "one mask per tensor group; its own under sequence parallelism",
}
"""Styles that a plan may name, and what each means."""

HEADS = ("num_heads", "num_kv_heads", "num_key_value_heads", "num_attention_heads", "n_head", "n_heads", "n_kv_heads")
"""What models call their numbers of heads."""

ENTRIES = ("vocab_embedding", "sequence_split")
"""Styles at which activations become parts of a sequence under sequence parallelism."""

LOSS_KEY = "loss"
"""The plan's key that names no module: 'vocab_parallel' for a loss over cut logits."""


def match_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """{module name: style} of a plan; a later pattern wins over an earlier one. ConfigError for what fits nothing."""
    names = [name for name, _ in model.named_modules()]
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        if pattern == LOSS_KEY:
            continue
        if style not in STYLES:
            raise ConfigError(
                f"tensor plan: style '{style}' of '{pattern}' is unknown; styles are {', '.join(STYLES)}",
                f"'strategy.plan={{{pattern}: column}}'",
            )
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(f"tensor plan: no module is named '{pattern}'; modules are {', '.join(filter(None, names[:20]))}, ...")
        styles.update(dict.fromkeys(matched, style))
    return styles


def apply_tensor_plan(model: nn.Module, plan: Mapping[str, str], axis: Axis, sequence: bool, streams: Streams) -> dict[str, Placement]:
    """Swap the modules that `plan` names for their parallel forms; return the placement on `tp` of parameters that are not Copy.

    Parameters are still whole here (on the meta device, or as the user built them): who materialises cuts them.
    """
    styles = match_plan(model, plan)
    if sequence and not set(ENTRIES) & set(styles.values()):
        raise ConfigError(
            f"sequence parallel: the plan of {type(model).__name__} does not say where tokens are first cut, by {' or '.join(ENTRIES)}",
            "strategy.sequence_parallel=false",
        )
    placements: dict[str, Placement] = {}
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    owners = _owners(model)
    whole = tuple(f"{name}." for name, style in styles.items() if style == "whole_sequence")
    for name, style in styles.items():
        module = model.get_submodule(name)
        if list(module.parameters()):
            _must_be_plain(name, module, names[id(module)])
        if style == "column":
            _must_share_heads(model.get_submodule(name.rpartition(".")[0]), name, axis)
        swapped, by_parameter = _restyle(name, module, style, axis, sequence and not name.startswith(whole), streams)
        if swapped is not module:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, swapped)
        placements.update({f"{name}.{parameter}": placement for parameter, placement in by_parameter.items()})
    _must_agree(owners, placements)
    return placements


def vocabulary_stays_cut(model: nn.Module, plan: Mapping[str, str], loss_can: bool) -> tuple[dict[str, str], bool]:
    """The plan to apply, and whether the loss works on logits that are cut by vocabulary.

    It does if the plan says so, a head is cut so, and the task's loss can (`loss_can`). Else heads gather their logits.
    """
    loss = plan.get(LOSS_KEY, "whole")
    if loss not in ("whole", "vocab_parallel"):
        raise ConfigError(
            f"tensor plan: '{LOSS_KEY}: {loss}' is unknown; it is whole or vocab_parallel", f"'strategy.plan={{{LOSS_KEY}: whole}}'"
        )
    styles = match_plan(model, plan)
    if loss == "vocab_parallel" and loss_can and "vocab_head" in styles.values():
        return dict(plan), True
    heads = {name: "column_gather" for name, style in styles.items() if style == "vocab_head"}
    return {key: style for key, style in plan.items() if key != LOSS_KEY} | heads, False


def _owners(model: nn.Module) -> list[list[str]]:
    """The names of each parameter, several where it is tied."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return list(owners.values())


def _must_be_plain(name: str, module: nn.Module, names: list[str]) -> None:
    """Refuse what a swap would lose: other names of the module, hooks, an embedding's extras. Subclasses fit no style."""
    lost = []
    if len(names) > 1:
        lost.append(f"it stands in the model under several names ({', '.join(names)})")
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        lost.append("it has hooks")
    if isinstance(module, nn.Embedding) and (module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq):
        lost.append("it has padding_idx, max_norm or scale_grad_by_freq")
    if lost:
        raise ConfigError(f"tensor plan: '{name}' can't be cut, because {' and '.join(lost)}", "leave it out of the plan: strategy.plan")


def _must_agree(owners: list[list[str]], placements: Mapping[str, Placement]) -> None:
    """Refuse a tied parameter that is cut under one of its names and not, or otherwise, under another."""
    for names in owners:
        if len({placements.get(name) for name in names}) > 1:
            raise ConfigError(
                f"tensor plan: {' and '.join(names)} are one parameter, but the plan cuts them differently",
                "give both styles that cut the same way, as vocab_embedding and vocab_head",
            )


def _restyle(
    name: str, module: nn.Module, style: str, axis: Axis, sequence: bool, streams: Streams
) -> tuple[nn.Module, dict[str, Placement]]:
    """The parallel form of one module, and its parameters' placements."""
    own = dict(module.named_parameters())
    if style in ("column", "vocab_head", "column_gather") and type(module) is nn.Linear:
        _must_divide(name, "output features", module.out_features, axis)
        return ColumnLinear(module, axis, sequence, style == "column_gather"), {parameter: Cut(0) for parameter in own}
    if style == "column" and isinstance(module, Projections):
        for size in module.segments:
            _must_divide(name, "output features", size, axis)
        cut = Cut(0, module.segments if module.merged else ())
        return ColumnProjections(module, axis, sequence), dict.fromkeys(own, cut)
    if style == "row" and type(module) is nn.Linear:
        _must_divide(name, "input features", module.in_features, axis)
        placements: dict[str, Placement] = {"weight": Cut(1)}
        return RowLinear(module, axis, sequence), placements | ({"bias": Sum()} if sequence and module.bias is not None else {})
    if style == "vocab_embedding" and type(module) is nn.Embedding:
        _must_divide(name, "rows", module.num_embeddings, axis)
        return VocabEmbedding(module, axis, sequence), {"weight": Cut(0)}
    if style == "summed":
        return module, {parameter: Sum() for parameter, _ in module.named_parameters(recurse=False)}
    if style == "sequence_norm":
        return module, dict.fromkeys(own, Sum()) if sequence else {}
    if style == "position_embedding" and type(module) is nn.Embedding:
        return (SequencePart(module, axis), {"weight": Sum()}) if sequence else (module, {})
    if style in ("sequence_split", "sequence_gather") and isinstance(module, nn.Identity):
        made = SequenceSplit(axis) if style == "sequence_split" else SequenceGather(axis)
        return (made if sequence else module), {}
    if style == "experts":
        if sequence:
            raise ConfigError(
                f"sequence parallel: the experts '{name}' work on whole sequences; a module around them has no style whole_sequence",
                "strategy.sequence_parallel=false",
            )
        return module, cut_width(module, axis)
    if style == "whole_sequence":
        if sequence:
            module.forward = WholeSequence(module.forward, axis)
        return module, {}
    if style in ("heads", "residual_dropout") and not own:
        own_draws = draws(module) and (style == "heads" or sequence)
        return (OwnRandom(module, streams) if own_draws else module), {}
    raise ConfigError(f"tensor plan: style '{style}' does not fit '{name}', a {type(module).__name__}; {style}: {STYLES[style]}")


def _must_share_heads(attention: nn.Module, name: str, axis: Axis) -> None:
    """Refuse to cut through a head: the module that holds a layer to cut says how many it has, if it has any."""
    for attribute in HEADS:
        heads = getattr(attention, attribute, None)
        if isinstance(heads, int) and not isinstance(heads, bool):
            _must_divide(name, f"heads ({attribute})", heads, axis)


def draws(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training: it, or a module in it, has a rate of dropout."""
    return any(rates(part) for part in module.modules())


def rates(module: nn.Module) -> dict[str, float]:
    """Rates of dropout of one module, its children's left out, by attribute: `drop...`, or `p` of a module that is named so."""
    kind = type(module).__name__.lower()
    is_mask = "drop" in kind or "stochastic" in kind
    values = {name: value for name, value in vars(module).items() if isinstance(value, float) and 0 < value <= 1}
    return {name: value for name, value in values.items() if "drop" in name or (is_mask and name == "p")}


def _must_divide(name: str, what: str, size: int, axis: Axis) -> None:
    if size % axis.size:
        raise ConfigError(
            f"tensor parallel: the {size} {what} of '{name}' are not divisible by strategy.tp={axis.size}",
            f"strategy.tp={max(d for d in range(1, axis.size) if size % d == 0)}",
        )
