"""Names, addresses and interfaces of this host, before anything is sent to another one. No torch here."""

from __future__ import annotations

import ipaddress
import os
import socket
import time

from disttrain.errors import LaunchError

DEFAULT_ROUTE = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737): the way to it is the way out."""
RETRY_SECONDS = 1.0


def resolve(name: str, seconds: float, host: str) -> None:
    """Come back when `name` has an address here; a pod's own may come to be known seconds after it. LaunchError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{host} knows no address of '{name}', where the ranks are to meet (MASTER_ADDR), after {seconds:g} s: {error}",
                    "MASTER_ADDR=<an address that all hosts know>; torchrun takes --master-addr or --rdzv-endpoint",
                ) from error
        time.sleep(min(RETRY_SECONDS, max(0.0, deadline - time.monotonic())))


def loopback() -> str:
    """The interface that nobody outside can reach."""
    return "lo" if os.path.isdir("/sys/class/net/lo") else "lo0"


def own_addresses(reached_at: str) -> list[str]:
    """This host's addresses, that on the way to `reached_at` first: a host may know itself by a loopback address only."""
    first = _address_towards(reached_at)
    found = [address for held in _interfaces().values() for address in held if not _is_loopback(address)]
    return list(dict.fromkeys([*([first] if first is not None else []), *found]))


def interface_towards(reached_at: str) -> str | None:
    """The interface by which other hosts reach this one: on the way to `reached_at`, or out of here if that is this host; None if unknown.

    gloo by itself takes the address of the host's name, which on many systems is a loopback address.
    """
    for target in (reached_at, DEFAULT_ROUTE):
        address = _address_towards(target)
        if address is not None and not _is_loopback(address):
            return next((name for name, held in _interfaces().items() if address in held), None)
    return None


def _address_towards(target: str) -> str | None:
    """This host's address on the way there; None without a way. Nothing is sent."""
    try:
        family, _, _, _, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect(where)
            return str(asked.getsockname()[0])
    except OSError:
        return None


def _interfaces() -> dict[str, list[str]]:
    """{interface: its addresses}."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {name: [one.address.partition("%")[0] for one in held if one.family in families] for name, held in psutil.net_if_addrs().items()}


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
