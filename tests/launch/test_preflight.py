"""Several machines, played by threads on one: all come to the same conclusion, and it names the host."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from disttrain.errors import LaunchError
from disttrain.launch import network, preflight
from disttrain.launch.environment import Environment, host_name, leave_out
from disttrain.launch.place import Place
from disttrain.launch.preflight import Door, Preflight, Report, conclude, exchange
from disttrain.parallel import collectives
from disttrain.parallel.collectives import trial_sum


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product and a sum that take no time, and leave no threads in this process."""
    monkeypatch.setattr(preflight, "product_seconds", lambda device: 0.01)
    monkeypatch.setattr(collectives, "trial_sum", lambda *_: "")


def fly(num_hosts: int, ranks_a_host: int = 1, by_turns: bool = False) -> list[str | LaunchError | None]:
    """By rank, what each concludes; `by_turns`: ranks are dealt out to hosts like cards."""
    store, size = HashStore(), num_hosts * ranks_a_host
    store.set_timeout(timedelta(seconds=20))

    def live(rank: int) -> str | LaunchError | None:
        node, local_rank = (rank % num_hosts, rank // num_hosts) if by_turns else divmod(rank, ranks_a_host)
        world = Environment("slurm", rank, size, local_rank, ranks_a_host, "127.0.0.1", node=node, num_nodes=num_hosts)
        try:
            return Preflight(store, world, f"node{node}", timeout_seconds=20).run()
        except LaunchError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(live, range(size)))


@pytest.mark.parametrize("by_turns", [False, True])
def test_hosts_that_reach_each_other_are_let_through(by_turns: bool) -> None:
    assert fly(3, ranks_a_host=2, by_turns=by_turns) == [None] * 6
    assert fly(1, ranks_a_host=2) == [None] * 2


def test_a_host_that_is_cut_off_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    doors = set[int]()

    def cut(addresses: list[str], port: int) -> float | str:
        doors.add(port)
        return exchange(addresses, port) if len(doors) == 1 else "no route"  # one of the two ways is left open

    monkeypatch.setattr(preflight, "exchange", cut)
    found = fly(2)
    assert all(isinstance(one, LaunchError) for one in found)
    assert re.search(r"node\d can't reach node\d \(no route\).*\n.*launch\.interface=.*--exclude=node", str(found[0]))
    assert str(found[0]) == str(found[1])


def test_hosts_that_connect_and_can_not_sum_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "trial_sum", lambda store, index, *_: "refused" if index == 1 else "")
    found = fly(2, ranks_a_host=2)
    assert {str(one) for one in found} == {str(found[0])}
    assert "2 hosts reach each other, but can't sum 1 MB by gloo (node1: refused)" in str(found[0])


def test_of_three_the_one_that_two_can_not_reach_is_to_be_left_out() -> None:
    reports = [Report("a", {"c": "refused"}), Report("b", {"c": "refused"}), Report("c")]
    with pytest.raises(LaunchError, match=r"exclude=c$"):
        conclude(reports)


@pytest.mark.parametrize(("what", "where"), [("product", "a matrix product"), ("exchange", "passing 1 MB on")])
def test_a_slow_host_is_named_with_what_leaves_it_out(what: str, where: str) -> None:
    reports = [Report(f"n{number}", **{what: seconds}) for number, seconds in enumerate([1.0, 1.1, 5.0])]
    assert conclude(reports[:2]) is None
    words = str(conclude(reports))
    assert f"n2 is 4.5 times slower than the median host at {where}" in words
    assert words.endswith("#SBATCH --exclude=n2")


def test_the_slowest_device_is_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([0.01, 0.01, 0.01, 0.01, 0.01, 0.2])
    monkeypatch.setattr(preflight, "product_seconds", lambda device: next(took))
    assert "20.0 times slower" in str(fly(3, ranks_a_host=2)[0])


def test_what_is_passed_comes_back_and_a_closed_door_has_a_reason() -> None:
    with Door() as door:
        assert isinstance(exchange(["127.0.0.1"], door.port), float)
        port = door.port
    assert "127.0.0.1: " in str(exchange(["127.0.0.1"], port))


@pytest.mark.world(2)
def test_a_real_sum_and_one_whose_other_half_never_comes(run_world: Callable[..., list[str]]) -> None:
    def entry(place: Place) -> str:
        assert place.make_store is not None
        store = place.make_store(timedelta(seconds=10))
        whole = trial_sum(store, place.rank, 2, 1 << 20, timedelta(seconds=10))
        half = "" if place.rank else trial_sum(HashStore(), 0, 2, 1 << 20, timedelta(seconds=1))
        return f"{whole}|{half}"

    whole, half = run_world(entry)[0].split("|")
    assert whole == ""
    assert half


# --- names ------------------------------------------------------------------------------------------------------


def test_a_name_that_nobody_knows_is_told_with_the_host_that_asked() -> None:
    with pytest.raises(LaunchError, match=r"node7 knows no address of 'nobody.invalid', where the ranks are to meet \(MASTER_ADDR\)"):
        network.resolve("nobody.invalid", 0.0, "node7")
    network.resolve("127.0.0.1", 0.0, "node7")


def test_the_interface_is_the_one_that_others_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.2"], "ib0": ["10.1.0.2"]}
    ways = {"10.1.0.1": "10.1.0.2", "me": "127.0.1.1", network.DEFAULT_ROUTE: "10.0.0.2"}
    monkeypatch.setattr(network, "_interfaces", lambda: held)
    monkeypatch.setattr(network, "_address_towards", ways.get)
    assert network.interface_towards("10.1.0.1") == "ib0"
    assert network.interface_towards("me") == "eth0", "a host's own name leads to loopback, which is no way for others"
    assert network.own_addresses("10.1.0.1") == ["10.1.0.2", "10.0.0.2"]
    monkeypatch.setattr(network, "_address_towards", lambda target: None)
    assert network.interface_towards("me") is None


def test_a_host_bears_its_schedulers_name_and_is_left_out_in_its_schedulers_words() -> None:
    assert host_name({"SLURMD_NODENAME": "n1"}) == "n1"
    assert host_name({"NODE_NAME": "pool-3"}) == "pool-3"
    assert host_name({}) == socket.gethostname()
    assert leave_out(["a", "b"], {}) == "#SBATCH --exclude=a,b"
    assert leave_out(["a", "b"], {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "kubectl cordon a b"
