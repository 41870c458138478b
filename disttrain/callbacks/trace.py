"""Traces of single ranks made one: a Chrome trace (JSON) that https://ui.perfetto.dev and chrome://tracing open.

Each rank is a process, in the order of ranks, named by its place on the mesh. Above its threads lie tracks of their own:
steps, micro-batches, a pipeline's actions, and one track an axis with its collectives, and the waits for them. Times are
those of rank 0's clock: each rank marks its trace with its own, and says how far that is behind (`timing.offset`).
Format: "Trace Event Format" (Google, 2016), as torch's profiler (Kineto) writes it.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "disttrain"
CLOCK = "clock"
_PIDS_A_RANK = 1000
_TRACKS = 1 << 30
"""Thread numbers of our tracks, which no thread has."""
_PEER_TO_PEER = {"c10d::send": "send", "c10d::recv_": "receive"}
"""Torch's own, which the pipeline's schedules issue."""
_SUMS = {"c10d::allreduce_": "all_reduce"}
"""Torch's own, which FSDP2 issues over replicas of its shards."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """What happens, from a begin to an end on one thread."""

    kind: str
    """step, micro-batch, action, collective or wait."""
    title: str
    axis: str = ""
    """Of a collective."""
    num_bytes: int = 0
    """Of a collective's whole tensor."""

    def mark(self) -> str:
        """As the name of a profiler's range; `read_mark` reads it back."""
        return "|".join((MARK, self.kind, self.title, self.axis, str(self.num_bytes)))


def read_mark(name: str) -> Span:
    """What `Span.mark` wrote."""
    _, kind, title, axis, num_bytes = name.split("|")
    return Span(kind, title, axis, int(num_bytes))


def clock_mark(nanoseconds: int) -> str:
    """A range that begins at this time of the rank's clock (`time.perf_counter_ns`)."""
    return f"{MARK}|{CLOCK}|{nanoseconds}"


@dataclass
class Rank:
    """One rank's trace, and what its names mean."""

    number: int
    place: str
    """Its coordinates in words."""
    path: Path
    groups: Mapping[str, str] = field(default_factory=dict)
    """Axis by name of the process group."""
    behind: float = 0.0
    """Seconds by which its clock is behind rank 0's."""


def merge(ranks: Sequence[Rank], path: Path, note: Mapping[str, Any] | None = None) -> None:
    """Write the traces of `ranks` as one to `path` (.json.gz), time 0 where the first one begins. `note` is kept beside the events."""
    loaded = [_events_of(rank) for rank in ranks]
    start = min((event["ts"] for events in loaded for event in events if "ts" in event), default=0.0)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ms", "disttrain": {json.dumps(dict(note or {}))}, "traceEvents": [\n')
        separator = ""
        for rank, events in zip(ranks, loaded, strict=True):
            for event in _arranged(rank, events):
                if "ts" in event:
                    event["ts"] = round(event["ts"] - start, 3)
                file.write(separator + json.dumps(event))
                separator = ",\n"
        file.write("\n]}\n")


def read(path: Path) -> dict[str, Any]:
    """A trace, packed or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        found: dict[str, Any] = json.loads(file.read(), strict=False)
    return found


def _events_of(rank: Rank) -> list[Event]:
    """Its events, microseconds of rank 0's clock. ValueError for one without the mark of its clock."""
    trace = read(rank.path)
    events: list[Event] = trace["traceEvents"]
    clock = next((event for event in events if _is_mark(event) and event["name"].split("|")[1] == CLOCK), None)
    if clock is None:
        raise ValueError(f"{rank.path.name} has no mark of its clock, so its place in time is not known")
    shift = int(clock["name"].split("|")[2]) / 1e3 + rank.behind * 1e6 - clock["ts"]
    for event in events:
        if "ts" in event:
            event["ts"] += shift
    # Kineto notes what it does itself under a process that is a word
    return [event for event in events if event is not clock and (event.get("ph") == "M" or isinstance(event.get("pid"), int))]


def _is_mark(event: Event) -> bool:
    return event.get("ph") == "X" and str(event.get("name", "")).startswith(f"{MARK}|")


def _arranged(rank: Rank, events: list[Event]) -> Iterator[Event]:
    """The rank's events under processes of its own, with the tracks above them."""
    pids: dict[Any, int] = {}
    for event in events:  # the process that computes comes first
        if _is_mark(event):
            pids.setdefault(event["pid"], rank.number * _PIDS_A_RANK)
            break
    tracks: dict[str, list[Event]] = defaultdict(list)
    spoken = _spoken(events)
    for event in events:
        if event.get("ph") == "M":
            continue
        event["pid"] = pids.setdefault(event.get("pid"), rank.number * _PIDS_A_RANK + len(pids))
        if "id" in event:  # a number: Perfetto reads a text as a hexadecimal one
            event["id"] = (rank.number << 32) + (int(str(event["id"]), 0) & 0xFFFFFFFF)
        _name(rank, event, tracks, spoken)
        yield event
    yield from _labels(rank, pids, events)
    yield from _track_events(rank.number * _PIDS_A_RANK, tracks)


def _spoken(events: list[Event]) -> dict[Any, list[tuple[float, float]]]:
    """By thread, when collectives that are named already were handed over: torch's own ranges in there are the same ones."""
    found: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if _is_mark(event) and event["name"].split("|")[1] == "collective":
            found[event.get("tid")].append((event["ts"], event["ts"] + event["dur"]))
    return {thread: sorted(spans) for thread, spans in found.items()}


def _name(rank: Rank, event: Event, tracks: dict[str, list[Event]], spoken: Mapping[Any, list[tuple[float, float]]]) -> None:
    """Give an event its name in our words, and a place on a track."""
    if _is_mark(event):
        span = read_mark(event["name"])
        event["name"], event["cat"] = span.title, f"{span.kind},{event.get('cat', '')}"
        event["args"] = event.get("args", {}) | ({"axis": span.axis, "bytes": span.num_bytes} if span.kind == "collective" else {})
        over = f"collectives over {span.axis}"
        track = {"collective": over, "wait": over, "action": "pipeline"}.get(span.kind, span.kind)
        if not str(event["cat"]).endswith("gpu_user_annotation"):
            tracks[track].append(dict(event))
        return
    name, args = event.get("name", ""), event.get("args", {})
    if name in _PEER_TO_PEER or name in _SUMS:
        if not _is_inside(event, spoken.get(event.get("tid"), [])):
            axis = "pp" if name in _PEER_TO_PEER else "replicate"
            title = f"{_PEER_TO_PEER.get(name) or _SUMS[name]} over {axis}"
            event["args"] = args | {"axis": axis}
            tracks[f"collectives over {axis}"].append(event | {"name": title})
    elif "Process Group Name" in args and (of_group := rank.groups.get(str(args["Process Group Name"]))):
        event["name"], event["args"] = f"{name} over {of_group}", args | {"axis": of_group}
    elif name == "[memory]" and "Total Allocated" in args:
        where = "host" if args.get("Device Type") == 0 else f"device {args.get('Device Id', 0)}"
        event |= {"name": f"memory of {where}", "ph": "C", "args": {"bytes": args["Total Allocated"]}}
        event.pop("s", None)


def _is_inside(event: Event, spans: Sequence[tuple[float, float]]) -> bool:
    index = bisect_right(spans, (event["ts"], float("inf"))) - 1
    return index >= 0 and event["ts"] <= spans[index][1]


def _labels(rank: Rank, pids: Mapping[Any, int], events: Sequence[Event]) -> Iterator[Event]:
    """What processes and threads are called, and their order."""
    for place, (pid, number) in enumerate(pids.items()):
        what = "" if place == 0 else f": device {pid}"
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"rank {rank.number} ({rank.place}){what}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
    for event in events:
        if event.get("ph") == "M" and event["name"] in ("thread_name", "thread_sort_index") and event.get("pid") in pids:
            yield event | {"pid": pids[event["pid"]]}


def _track_events(pid: int, tracks: Mapping[str, Sequence[Event]]) -> Iterator[Event]:
    """Tracks of their own, above the threads: copies, without what torch says beside them."""
    order = [name for name in ("step", "micro-batch", "pipeline") if name in tracks]
    order += sorted(name for name in tracks if name not in order)
    for number, name in enumerate(order):
        tid = _TRACKS + number
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": number - len(order)}}
        for event in tracks[name]:
            args = {key: event["args"][key] for key in ("axis", "bytes") if key in event.get("args", {})}
            yield {
                "ph": "X",
                "cat": name,
                "name": event["name"],
                "pid": pid,
                "tid": tid,
                "ts": event["ts"],
                "dur": event["dur"],
                "args": args,
            }
