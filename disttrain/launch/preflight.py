"""Before a run on several machines: can they all reach each other on a port of the system's choice, and is one much slower?

The first rank of each host listens, tells the others where over the rendezvous store, passes 1 MB to the next few hosts and back, and
takes part in an all-reduce of 1 MB; every rank times a matrix product on its device. Rank 0 hears all and says one
conclusion, by the host's name, within seconds, where a collective would wait for `launch.timeout_seconds` and name nobody.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from disttrain.errors import LaunchError
from disttrain.launch.environment import Environment, leave_out
from disttrain.launch.network import own_addresses

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

NUM_BYTES = 1 << 20
"""Passed to each neighbour and back, and summed over all hosts: more than fits into one packet, whatever the network."""
CONNECT_SECONDS, SUM_SECONDS = 5.0, 20.0
NUM_NEIGHBOURS = 8
"""Hosts, in the order of their ranks, that each host tries."""
SLOW = 3.0
"""Times the median of the hosts."""
QUICK_SECONDS = 0.01
"""An exchange that takes less is not slow, whatever the others' take."""
WIDTH, CUDA_WIDTH = 384, 4096
"""Of the matrix product, on the CPU and on a GPU."""
NUM_TRIES, TRY_SECONDS = 5, 0.3
"""Products, and seconds of them, at the least: one may find its core taken for a while."""
NODE = " (node "
"""Tells machines of one name apart."""
AFTER = "on a port beside that of the rendezvous: a firewall, or another network"


@dataclass
class Report:
    """What a host has found; a rank that is not its first leaves out the name and tells of its device only."""

    host: str
    closed: dict[str, str] = field(default_factory=dict)
    """{host that it can't reach: why}."""
    exchange: float = 0.0
    """Seconds of its quickest exchange with a neighbour: its own link is in all of them."""
    product: float = 0.0
    """Seconds of the matrix product on the slowest of its devices."""


class Preflight:
    """The check as one rank takes part in it."""

    def __init__(self, store: Store, environment: Environment, host: str, timeout_seconds: float, device: str = "cpu") -> None:
        """Every rank of the world makes one; `store` serves this check alone; `device`: 'cpu' or 'cuda'."""
        self._store, self._world, self._host, self._device = store, environment, host, device
        self._timeout = timeout_seconds

    def run(self) -> str | None:
        """Every rank. What rank 0 should say of slow hosts, if of any; LaunchError on all ranks for hosts that are cut off."""
        self._say("came", [self._world.node, self._world.local_rank, self._host])
        if self._world.rank == 0:
            self._say("hosts", _firsts(self._hear("came", range(self._world.world_size))))
        hosts = {int(rank): str(name) for rank, name in self._hear("hosts", [0], seconds=self._timeout + SUM_SECONDS)[0].items()}
        if len(hosts) == 1:
            return None
        words = self._look(hosts)
        self._sum(hosts)
        return words

    def _look(self, hosts: dict[int, str]) -> str | None:
        """The hosts' doors and products; `hosts`: {first rank: host}."""
        rank, firsts = self._world.rank, list(hosts)
        report = Report(hosts.get(rank, ""))
        with contextlib.ExitStack() as stack:
            if rank in hosts:
                door = stack.enter_context(Door())
                self._say("door", [own_addresses(self._world.address), door.port])
                neighbours = [
                    firsts[(firsts.index(rank) + step) % len(firsts)] for step in range(1, min(NUM_NEIGHBOURS, len(firsts) - 1) + 1)
                ]
                _visit({hosts[one]: where for one, where in self._hear("door", neighbours, hosts).items()}, report)
            report.product = product_seconds(self._device)
            self._say("report", [self._world.node, asdict(report)])
            everybody = range(self._world.world_size)
            return self._conclude("look", lambda: conclude(_by_host(self._hear("report", everybody, hosts).values())))

    def _sum(self, hosts: dict[int, str]) -> None:
        """The all-reduce, over the interface that gloo is to use in the run."""
        from disttrain.parallel.collectives import trial_sum

        if self._world.rank in hosts:
            index = list(hosts).index(self._world.rank)
            self._say("sum", trial_sum(self._store, index, len(hosts), NUM_BYTES, timedelta(seconds=min(SUM_SECONDS, self._timeout))))
        self._conclude("summed", lambda: conclude_sum({hosts[rank]: why for rank, why in self._hear("sum", hosts, hosts).items()}))

    def _conclude(self, name: str, draw: Callable[[], str | None]) -> str | None:
        """Rank 0's conclusion, which it draws from what it hears; LaunchError on all for what forbids a run."""
        if self._world.rank == 0:
            words, remedy = None, None
            try:
                words = draw()
            except LaunchError as error:
                words, remedy = error.message, error.remedy or ""
            self._say(name, [words, remedy])
        words, remedy = self._hear(name, [0], seconds=self._timeout + SUM_SECONDS)[0]
        if remedy is not None:
            raise LaunchError(words, remedy)
        return str(words) if words is not None else None

    def _say(self, what: str, value: Any) -> None:
        self._store.set(f"{what}/{self._world.rank}", json.dumps(value))

    def _hear(self, what: str, ranks: Iterable[int], hosts: Mapping[int, str] | None = None, seconds: float = 0.0) -> dict[int, Any]:
        keys, seconds = {rank: f"{what}/{rank}" for rank in ranks}, seconds or self._timeout
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=seconds))
        except Exception as error:
            silent = [rank for rank, key in keys.items() if not self._store.check([key])]
            names = list(dict.fromkeys((hosts or {}).get(rank, f"rank {rank}") for rank in silent))
            found = f"before training: no word from {', '.join(names)} within {seconds:g} s ('{what}')"
            raise LaunchError(found, f"see its log, or leave it out: {_without(names)}") from error
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items()}


class Door:
    """A port of the system's choice, where who comes is sent back what it brings, `NUM_BYTES` at a time."""

    def __enter__(self) -> Door:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=4 * NUM_NEIGHBOURS)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                visitor, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(visitor,), daemon=True).start()

    @staticmethod
    def _answer(visitor: socket.socket) -> None:
        with visitor, contextlib.suppress(OSError):
            visitor.settimeout(CONNECT_SECONDS)
            visitor.sendall(_read(visitor))

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()


def _read(connection: socket.socket) -> bytearray:
    data = bytearray()
    while len(data) < NUM_BYTES:
        part = connection.recv(NUM_BYTES)
        if not part:
            raise ConnectionError("closed on the way")
        data += part
    return data


def _visit(doors: Mapping[str, tuple[Sequence[str], int]], report: Report) -> None:
    """Try the doors, all at once; `doors`: {host: (its addresses, port)}."""
    with ThreadPoolExecutor(len(doors)) as pool:
        found = dict(zip(doors, pool.map(lambda door: exchange(*door), doors.values()), strict=True))
    report.closed = {host: one for host, one in found.items() if isinstance(one, str)}
    report.exchange = min((one for one in found.values() if isinstance(one, float)), default=0.0)


def exchange(addresses: Sequence[str], port: int) -> float | str:
    """Seconds to pass `NUM_BYTES` to a door at one of these addresses and back; else why that can't be done."""
    reasons = []
    for address in addresses:
        start = time.perf_counter()
        try:
            with socket.create_connection((address, port), CONNECT_SECONDS) as connection:
                connection.settimeout(CONNECT_SECONDS)
                connection.sendall(b"\0" * NUM_BYTES)
                _read(connection)
        except OSError as error:
            reasons.append(f"{address}: {error}")
        else:
            return time.perf_counter() - start
    return reasons[0] if reasons else "it has no address but loopback's"


def product_seconds(device: str) -> float:
    """The quickest of many matrix products of one size on this rank's device; on the CPU by one thread, whose core others share."""
    import torch

    on_gpu, threads = device == "cuda", torch.get_num_threads()
    x = torch.ones(CUDA_WIDTH, CUDA_WIDTH, device="cuda", dtype=torch.bfloat16) if on_gpu else torch.ones(WIDTH, WIDTH)
    took: list[float] = []
    torch.set_num_threads(1)
    while len(took) < NUM_TRIES or sum(took) < TRY_SECONDS:
        before = time.perf_counter()
        x @ x
        if on_gpu:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - before)
    torch.set_num_threads(threads)
    return min(took)


def _firsts(came: Mapping[int, Sequence[Any]]) -> dict[int, str]:
    """{first rank of each machine: its name}, by rank; machines of one name are told apart by number."""
    firsts = {rank: (node, name) for rank, (node, local_rank, name) in sorted(came.items()) if local_rank == 0}
    names = Counter(name for _, name in firsts.values())
    return {rank: name if names[name] == 1 else f"{name}{NODE}{node})" for rank, (node, name) in firsts.items()}


def _without(hosts: Sequence[str]) -> str:
    """What leaves these hosts out, by the names that their scheduler knows."""
    return leave_out(list(dict.fromkeys(host.partition(NODE)[0] for host in hosts)))


def _by_host(said: Iterable[tuple[int, Mapping[str, Any]]]) -> list[Report]:
    """A report a machine from those of all its ranks: the doors were the first's, the product is the slowest's."""
    found: dict[int, Report] = {}
    for node, fields in said:
        one = Report(**fields)
        whole = found.setdefault(node, one)
        whole.host, whole.product = whole.host or one.host, max(whole.product, one.product)
        whole.closed, whole.exchange = whole.closed | one.closed, max(whole.exchange, one.exchange)
    return list(found.values())


def conclude(reports: Sequence[Report]) -> str | None:
    """Words about hosts that are slow; LaunchError for one that others can't reach, or that reaches none."""
    cut = Counter(name for report in reports for name in (*report.closed, *([report.host] * len(report.closed))))
    if cut:
        most = max(cut.values())
        worst = sorted(name for name, count in cut.items() if count == most)
        ways = "; ".join(f"{report.host} can't reach {name} ({why})" for report in reports for name, why in report.closed.items())
        remedy = f"launch.interface=<the one that all hosts share>, or leave a host out: {_without(worst)}"
        raise LaunchError(f"before training: {ways}, {AFTER}", remedy)
    slow: dict[str, str] = {}
    for what, floor, seconds in (
        ("a matrix product", 0.0, {report.host: report.product for report in reports}),
        ("passing 1 MB on", QUICK_SECONDS, {report.host: report.exchange for report in reports}),
    ):
        median = statistics.median_low(seconds.values())
        slow |= {
            host: f"{host} is {took / median:.1f} times slower than the median host at {what}"
            for host, took in seconds.items()
            if took > max(SLOW * median, floor)
        }
    return f"warning: {'; '.join(slow.values())}, and all wait for the slowest: {_without(list(slow))}" if slow else None


def conclude_sum(errors: Mapping[str, str]) -> None:
    """LaunchError if the all-reduce failed on a host; `errors`: {host: why it did, or ''}."""
    failed = {host: why for host, why in errors.items() if why}
    if failed:
        ways = "; ".join(f"{host}: {why}" for host, why in failed.items())
        raise LaunchError(
            f"before training: {len(errors)} hosts reach each other, but can't sum 1 MB by gloo ({ways})",
            f"launch.interface=<the one that all hosts share>, or leave a host out: {_without(list(failed))}",
        )
