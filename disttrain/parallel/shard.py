"""Sharded data parallelism: ranks that see different samples share out the weights, on torch's FSDP2 (`fully_shard`).

ZeRO: Rajbhandari et al. 2020 (arXiv:1910.02054), stages 1 to 3 in its section 5. FSDP: Zhao et al. 2023 (arXiv:2304.11277).

What is cut: every parameter by rows (dimension 0 of what tensor parallelism leaves on this rank), n ranks of `dp_shard` taking
ceil(rows / n) each while there are any, so that the last ones may hold fewer or none; with it its gradient and the
optimizer's moments. What each rank holds at rest: 1/n of all three. What moves: a unit (a block of the model, or the root: the
rest) is one flat buffer, padded to n equal parts. It is all-gathered before it computes and its gradients are
reduce-scattered. With P the bytes of all units and R those of the root's, m micro-batches a step, what crosses the
axis in a step (a rank moves (n-1)/n of it, see `collectives`) and what a rank holds at the most beside its shards:

    strategy.zero    all-gather      reduce-scatter   whole weights            whole gradients
    1                P               P                P                        P
    2                P               m P              P                        a unit's or two
    3                m (2 P - R)     m P              R + a unit's or two      a unit's or two

1 keeps whole weights and whole gradients until the last micro-batch; 2 keeps whole weights, and hands gradients on
micro-batch by micro-batch; 3 also lets a unit's weights go after its forward and its backward. The root's stay between
forward and backward, because backward begins with them. Replicas of the shards (`dp_replicate`, `cp`) sum theirs once a
step, P / n in an all-reduce a unit, while the last backward goes on.

Optimizers, checkpoints, `verify` and the norm see plain local tensors: `parameters` are handles on the memory of FSDP2's
own shards, and `finish` hands each its gradient. Gradients are sums: nothing is divided by a number of ranks.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from disttrain.errors import ConfigError
from disttrain.parallel import collectives
from disttrain.parallel.blocks import blocks_named
from disttrain.parallel.layout import Layout
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.options import Options
from disttrain.parallel.unit import REPLICATE, SHARD, Place, Unit, at, places_of, took_no_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_sharded(layout: Layout) -> bool:
    """Whether the rows of a parameter are shared out over data ranks."""
    return SHARD in layout.placements


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks; none for one that names none, which is then one unit."""
    return list(blocks_named(model).values())


def shard_all(
    roots: Sequence[nn.Module],
    blocks: Sequence[nn.Module],
    parameters: Mapping[str, nn.Parameter],
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    options: Options,
) -> list[Sharder]:
    """A sharder for each of `roots`: a model, or the stages of it that a rank holds. ConfigError for a weight that two of them use."""
    assert mesh.axis("pp").size == 1 or options.zero == 1, "a pipeline's schedule keeps weights whole from its first forward"
    twice = [name for name, p in parameters.items() if sum(any(p is own for own in root.parameters()) for root in roots) > 1]
    if twice:
        raise ConfigError(
            f"'{twice[0]}' stands in two pipeline stages of one rank (strategy.schedule={options.schedule}), and strategy.dp_shard "
            "gathers a weight for one stage at a time",
            "model.tie_embeddings=false, or strategy.schedule=1f1b",
        )
    sharders = []
    for root in roots:
        inside, own = set(root.modules()), set(root.parameters())
        held = {name: parameter for name, parameter in parameters.items() if parameter in own}
        sharders.append(Sharder(root, [block for block in blocks if block in inside], held, layouts, mesh, options))
    return sharders


class Sharder:
    """Shards one module (a model, or a pipeline's stage) and sums its gradients over the ranks that see different samples.

    A `GradientSync`. A schedule of torch.distributed.pipelining sets FSDP2's flags itself, because the module that it is
    given is `root`: weights and gradients stay whole until its last backward, as under `zero=1`, and `finish` hands over.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Sequence[nn.Module],
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, Layout],
        mesh: Mesh,
        options: Options,
    ) -> None:
        """Shard `root`; its modules `blocks` become units of their own.

        `parameters`: all of `root`, by the names that `layouts` has them under. Those that are cut over `dp_shard`
        hold this rank's rows already (see `materialise`); others stay as they are.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        self.parameters: dict[str, nn.Parameter] = {}
        """Handles: plain tensors on the memory of this rank's rows."""
        self._zero = options.zero
        self._find_unused = options.find_unused_parameters
        self._grad = mesh.axis("grad")
        self._held: dict[str, nn.Parameter] = {}
        self._units: list[Unit] = []
        names = {parameter: name for name, parameter in parameters.items() if is_sharded(layouts[name])}
        kept = {parameter for parameter in parameters.values() if parameter not in names}
        self._device = next(iter(names)).device
        ranks = device_mesh(mesh, self._device.type)
        offload = CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if options.offload else OffloadPolicy()
        for module in (*_apart(root, blocks), root):
            places = {names[parameter]: place for parameter, place in places_of(module) if parameter in names}
            rows = {name: _grow(place, layouts[name], mesh) for name, place in places.items()}
            again = options.zero == 3 and module is not root
            fully_shard(module, mesh=ranks, reshard_after_forward=again, offload_policy=offload, ignored_params=kept)
            for name, place in places.items():
                self._held[name] = at(place)
                self.parameters[name] = _handle(at(place), rows[name])
            self._units.append(Unit(module, places, mesh, options))
        root.register_forward_hook(self._after_forward)
        # its outputs may be a view: the loss reads them, and changes nothing in place
        warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({type(root).__name__}\) returned a view", UserWarning)
        self._accumulate()

    # --- a step, in time order ------------------------------------------------------------------------------------------

    def _accumulate(self) -> None:
        """Before a step's first backward: others follow it."""
        for unit in self._units:
            unit.heard.clear()
            unit.fsdp.set_requires_gradient_sync(self._zero > 1, recurse=False)
            unit.fsdp.set_requires_all_reduce(False, recurse=False)
            unit.fsdp.set_reshard_after_backward(self._zero == 3, recurse=False)

    def arm(self) -> None:
        """The backward that follows is the step's last: sum all, over replicas too, and keep shards alone."""
        for unit in self._units:
            unit.fsdp.set_requires_gradient_sync(True, recurse=False)
            unit.fsdp.set_reshard_after_backward(True, recurse=False)

    @torch.no_grad()
    def finish(self) -> None:
        """Hand each handle the gradient that FSDP2 has summed. ConfigError names parameters that took no part, unless they may."""
        unused = self._used_nowhere() if self._find_unused else set()
        missing = []
        for name, held in self._held.items():
            gradient, held.grad = held.grad, None
            if gradient is not None:
                self.parameters[name].grad = None if name in unused else gradient.to_local()  # type: ignore[attr-defined]
            elif held.requires_grad and name not in unused:
                missing.append(name)
        if missing:
            raise took_no_part(missing)
        self._accumulate()

    def _used_nowhere(self) -> set[str]:
        """Parameters that no rank used in this step: they have no gradient, as on one device. One host read a step."""
        unheard = {name for unit in self._units for name in unit.unheard()}
        trained = [name for name, held in self._held.items() if held.requires_grad]
        used = torch.tensor([float(name not in unheard) for name in trained], device=self._device)
        anywhere = collectives.all_reduce_(used, self._grad, "max").tolist()
        return {name for name, is_used in zip(trained, anywhere, strict=True) if not is_used}

    def _after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """No backward follows a forward without gradients, so nobody else would let go of the whole weights."""
        if not torch.is_grad_enabled():
            for unit in self._units:
                unit.fsdp.reshard()


# --- laying out ---------------------------------------------------------------------------------------------------------


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """FSDP2's view of our mesh, on our groups: [shard], or [replicate, shard]. Made once for a mesh."""
    if mesh not in _device_meshes:
        _device_meshes[mesh] = _device_mesh(mesh, device_type)
    return _device_meshes[mesh]


_device_meshes = weakref.WeakKeyDictionary[Mesh, "DeviceMesh"]()


def _device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    shard, replicate = mesh.axis(SHARD), mesh.axis(REPLICATE)
    assert shard.group is not None, "an axis of one rank has nothing to share out"
    if replicate.group is None:
        return DeviceMesh.from_group(shard.group, device_type)
    by_axis = torch.tensor(mesh.axis("grad").ranks).view(mesh.degrees["dp_replicate"], shard.size, mesh.degrees["cp"])
    ranks = by_axis.movedim(1, 2).reshape(replicate.size, shard.size)
    return DeviceMesh.from_group([replicate.group, shard.group], device_type, ranks, mesh_dim_names=(REPLICATE, SHARD))


def _apart(root: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that share no parameter with the rest of `root`; what is shared lies in the root's unit."""
    everywhere = Counter(parameter for parameter, _ in places_of(root))
    return [block for block in blocks if all(everywhere[p] == times for p, times in Counter(p for p, _ in places_of(block)).items())]


def _grow(place: Place, layout: Layout, mesh: Mesh) -> Tensor:
    """This rank's rows; in the parameter's place, memory of the size that it has before rows are cut, for FSDP2 to take its part of."""
    parameter = at(place)
    rows = parameter.data
    cut = {axis: one for axis, one in layout.placements.items() if axis != SHARD}
    shape = Layout(layout.shape, cut, layout.degrees).local_shape(mesh.coordinate())
    parameter.data = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    return rows


@torch.no_grad()
def _handle(sharded: nn.Parameter, rows: Tensor) -> nn.Parameter:
    """A plain parameter on the memory of FSDP2's shard, filled with `rows`."""
    local: Tensor = sharded.to_local()  # type: ignore[attr-defined]
    assert local.shape == rows.shape, f"FSDP2 cuts {tuple(local.shape)}, our layout says {tuple(rows.shape)}"
    return nn.Parameter(local.copy_(rows), requires_grad=sharded.requires_grad)
