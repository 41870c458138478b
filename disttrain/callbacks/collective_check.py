"""Do all ranks of a group make the same collective? Asked before each one, over the rendezvous store instead of the network.

Every collective of the run is seen, whoever issues it (our functions, FSDP2, torch's pipelines, a model of the user's),
where torch dispatches its operator. Each rank writes down what it is about to do and reads what the others have written:
kind, reduction, root, type, shape, device and, on its own, whether the memory is contiguous. What differs is told by
rank, with the call sites, before anything can hang. Who does not come in time is named with what it is at. Of two ranks that
wait for each other in different collectives, that is certain at once. A send does not wait for its receipt, so of both
ends the one that comes second compares.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain.callbacks.calls import Call, call_of
from disttrain.config.limits import check_limits
from disttrain.errors import UserError
from disttrain.parallel.mesh import AXES, VIEWS, Mesh
from disttrain.train.hooks import Callback

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from disttrain.train.trainer import Trainer

KEY = "callbacks.collective_check"
PREFIX = "collective_check"
LOOKS = 0.05
"""Seconds between looks at what a rank that has not come is at."""
Note = dict[str, Any]
"""What a rank is about to do, as JSON."""


class CollectiveError(UserError):
    """Ranks are about to make collectives that don't fit each other."""


class CollectiveCheck(Callback):
    """Checks every collective of the run over its ranks, before it is made. For finding faults: each costs a meeting at the store."""

    def __init__(self, seconds: float = 60.0) -> None:
        """`seconds`: how long a rank may be missing."""
        check_limits("collective_check", {"seconds": seconds})
        self.seconds = seconds
        self._check: Check | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        """From here on."""
        if trainer.mesh.size > 1:
            store = dist.PrefixStore(PREFIX, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
            self._check = Check(trainer.mesh, store, self.seconds)
            self._check.__enter__()

    def on_fit_end(self, trainer: Trainer) -> None:
        """To here."""
        self._leave("has come to the end of its run")

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Others needn't wait, and say the same of a fault between ranks."""
        self._leave(f"has raised {type(error).__name__}", error.message if isinstance(error, CollectiveError) else "")

    def _leave(self, why: str, fault: str = "") -> None:
        if self._check is not None:
            self._check.__exit__(None, None, None)
            self._check.leave(why, fault)
            self._check = None


class Check(TorchDispatchMode):
    """Between enter and exit, looks at each collective of this rank."""

    def __init__(self, mesh: Mesh, store: Store, seconds: float) -> None:
        super().__init__()
        self.rank, self.store, self.seconds = mesh.rank, store, seconds
        self._axes: dict[tuple[int, ...], str] = {}
        for name in (*AXES, *VIEWS):
            self._axes.setdefault(mesh.axis(name).ranks, name)
        self._axes[mesh.axis("world").ranks] = self._axes.get(mesh.axis("world").ranks, "world")
        self._made: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (call := call_of(func, args, kwargs or {})) is not None:
            ranks = tuple(dist.get_process_group_ranks(call.group))
            self._is_contiguous(call, ranks)
            if call.kind in ("send", "receive"):
                self._between_two(call, ranks)
            elif len(ranks) > 1:
                self._of_a_group(call, ranks)
        return func(*args, **(kwargs or {}))

    def leave(self, why: str, fault: str = "") -> None:
        """Tell who may wait that this rank makes no more, and the fault between ranks that it has found, if it has."""
        self._is_at({"gone": why, "fault": fault})

    # --- what is compared ------------------------------------------------------------------------------------------------

    def _is_contiguous(self, call: Call, ranks: Sequence[int]) -> None:
        for tensor in call.all_tensors:
            if not tensor.is_contiguous():
                raise CollectiveError(
                    f"rank {self.rank} hands {call.kind} over {self._name(ranks)} a tensor that is not contiguous: shape "
                    f"{list(tensor.shape)}, strides {list(tensor.stride())}. Backends read the memory under it, not its elements\n"
                    f"  called at {call.site}",
                    "x.contiguous() before the call; and copy the result back, if it was meant to be in place",
                )

    def _of_a_group(self, call: Call, ranks: tuple[int, ...]) -> None:
        where = "-".join(map(str, ranks))
        number = self._made[where]
        self._made[where] += 1
        mine = self._note(call) | {"where": where, "number": number, "ranks": ranks}
        self._is_at(mine)  # first, so that who has come to the next one is never thought to be in this one
        self.store.set(f"{where}/{number}/{self.rank}", json.dumps(mine))
        notes = {self.rank: mine}
        for rank in ranks:
            if rank != self.rank:
                notes[rank] = self._read(rank, mine)
        if number:  # all have come, so nobody reads the one before any more
            self.store.delete_key(f"{where}/{number - 1}/{self.rank}")
        if fault := _differs(notes, ranks):
            shown = "\n".join(f"  {who}: {words}" for who, words in _grouped(notes).items())
            raise CollectiveError(f"ranks differ in {fault} in collective {number + 1} over {self._name(ranks)}:\n{shown}")

    def _between_two(self, call: Call, ranks: tuple[int, ...]) -> None:
        other = ranks[call.root]
        ends = (self.rank, other) if call.kind == "send" else (other, self.rank)
        where = f"{ends[0]}>{ends[1]}/{call.tag}"
        key, theirs = (f"{where}/{kind}" for kind in (("send", "receive") if call.kind == "send" else ("receive", "send")))
        number = self._made[key]
        self._made[key] += 1
        mine = self._note(call)
        self.store.set(f"{key}/{number}", json.dumps(mine))
        self._is_at(mine)
        if not self.store.check([f"{theirs}/{number}"]):
            return
        note = json.loads(self.store.get(f"{theirs}/{number}"))
        off = [name for name in ("dtype", "size", "device") if note[name] != mine[name]]
        if off:
            shown = "\n".join(f"  rank {rank}: {_words(one)}" for rank, one in ((self.rank, mine), (other, note)))
            raise CollectiveError(f"what rank {ends[0]} sends to rank {ends[1]} is not what that receives ({', '.join(off)}):\n{shown}")

    def _note(self, call: Call) -> Note:
        return {
            "kind": call.kind,
            "reduction": call.reduction,
            "root": call.root,
            "shape": [list(tensor.shape) for tensor in call.tensors],
            "size": sum(tensor.numel() for tensor in call.tensors),
            "dtype": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in call.tensors}),
            "device": sorted({tensor.device.type for tensor in call.tensors}),
            "sent": call.sent,
            "received": call.received,
            "site": call.site,
        }

    # --- who does not come -----------------------------------------------------------------------------------------------

    def _is_at(self, note: Note) -> None:
        self.store.set(f"at/{self.rank}", json.dumps(note))

    def _at(self, rank: int) -> Note:
        found: Note = json.loads(self.store.get(f"at/{rank}")) if self.store.check([f"at/{rank}"]) else {}
        return found

    def _read(self, rank: int, mine: Note) -> Note:
        """What `rank` is about to do in this collective. CollectiveError if it will not come."""
        key, began = f"{mine['where']}/{mine['number']}/{rank}", time.monotonic()
        looked = 0.0
        while not self.store.check([key]):
            now = time.monotonic()
            if not looked:
                self._is_at(mine | {"waits": rank})
                looked = now
            elif now - looked > LOOKS:
                looked = now
                if fault := self._at(rank).get("fault"):
                    raise CollectiveError(fault)
                if why := self._absent(rank, now - began):
                    what = f"collective {mine['number'] + 1} over {self._name(mine['ranks'])}"
                    raise CollectiveError(
                        f"rank {self.rank} is in {what}, and rank {rank} does not come: {why}\n  rank {self.rank}: {_words(mine)}"
                    )
            time.sleep(min(0.02, max(0.0005, (now - began) / 10)))
        found: Note = json.loads(self.store.get(key))
        return found

    def _absent(self, rank: int, waited: float) -> str:
        """Why `rank` will not come; empty while it still may."""
        at = self._at(rank)
        if "gone" in at:
            return f"it {at['gone']}"
        if circle := self._circle(rank):
            others = [f"waits for rank {note['waits']}" for _, note in circle]
            shown = "\n".join(f"  rank {one}: {_words(note)}, over {self._name(note['ranks'])}" for one, note in circle)
            return f"it {', which '.join(others)}\n{shown}"
        if waited < self.seconds:
            return ""
        last = f"; its last was\n  rank {rank}: {_words(at)}" if at else ", and has made none yet"
        return f"for {waited:.0f} s it has made no other either ({KEY}.seconds){last}"

    def _circle(self, rank: int) -> list[tuple[int, Note]]:
        """Who waits for whom, from `rank` back to this one; empty if that is not so. Certain: nobody in a circle can move."""
        found: list[tuple[int, Note]] = []
        while rank != self.rank:
            note = self._at(rank)
            if "waits" not in note or rank in dict(found):
                return []
            found.append((rank, note))
            rank = note["waits"]
        came = [f"{note['where']}/{note['number']}/{note['waits']}" for _, note in found]
        return [] if any(self.store.check([key]) for key in came) else found

    def _name(self, ranks: Sequence[int]) -> str:
        axis = self._axes.get(tuple(ranks))
        return f"{axis} (ranks {', '.join(map(str, ranks))})" if axis else f"ranks {', '.join(map(str, ranks))}"


def _differs(notes: Mapping[int, Note], ranks: Sequence[int]) -> str:
    """In what the ranks' notes of one collective differ; empty if they fit."""
    for name, words in (("kind", "the collective"), ("reduction", "the reduction"), ("dtype", "type"), ("device", "device")):
        if len({json.dumps(note[name]) for note in notes.values()}) > 1:
            return words
    first = notes[ranks[0]]
    if first["kind"] in ("broadcast", "reduce", "gather", "scatter") and len({note["root"] for note in notes.values()}) > 1:
        return "the root"
    if first["kind"] == "all_to_all":
        if len({json.dumps([shape[1:] for shape in note["shape"]]) for note in notes.values()}) > 1:
            return "shape"
        return "the parts sent and received" if _parts_off(notes, ranks) else ""
    return "shape" if len({json.dumps(note["shape"]) for note in notes.values()}) > 1 else ""


def _parts_off(notes: Mapping[int, Note], ranks: Sequence[int]) -> bool:
    """Whether some rank sends another number of rows than the other end expects; even parts, if not said."""

    def rows(rank: int, which: str, place: int) -> float:
        note = notes[rank]
        return float(note[which][place]) if note[which] else sum(shape[0] for shape in note["shape"]) / len(ranks)

    pairs = [(i, j) for i in range(len(ranks)) for j in range(len(ranks))]
    return any(rows(ranks[i], "sent", j) != rows(ranks[j], "received", i) for i, j in pairs)


def _grouped(notes: Mapping[int, Note]) -> dict[str, str]:
    """{who: what}, ranks that say the same together."""
    said: dict[str, list[int]] = {}
    for rank, note in notes.items():
        said.setdefault(_words(note), []).append(rank)
    return {f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}": words for words, ranks in said.items()}


def _words(note: Note) -> str:
    """A note, to be read."""
    shapes = ", ".join(map(str, note["shape"]))
    parts = f", parts sent {note['sent']}, received {note['received']}" if note["sent"] or note["received"] else ""
    of = f" of {shapes} {' '.join(note['dtype'])} on {' '.join(note['device'])}" if shapes else ""
    reduction = f" ({note['reduction']})" if note["reduction"] else ""
    root = f", root {note['root']}" if note["kind"] in ("broadcast", "reduce", "gather", "scatter") else ""
    return f"{note['kind']}{reduction}{of}{root}{parts}, called at {note['site'] or 'no place in Python'}"
