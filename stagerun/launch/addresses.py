"""The addresses of this host, and the interface on the way to another. IPv4; Linux."""

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from stagerun.system.host import host_name, lines

_DISCARD = 9  # a port; nothing is sent to it


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    host: str  # its address


def interfaces() -> list[Interface]:
    """Return those that are up and have an address, without the loopback device."""
    state = psutil.net_if_stats()
    first = {name: held[0] for name, held in psutil.net_if_addrs().items() if name in state and state[name].isup}
    return [
        Interface(name, one.address)
        for name, one in first.items()
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]


def resolve(host: str) -> str:
    """Its first address. OSError for a name that this host doesn't know."""
    found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def towards(host: str, here: list[Interface]) -> Interface | None:
    """The one of `here` by which packets go to `host`, or that holds its address. None: by the loopback device, or no way is
    known."""
    try:
        source = resolve(host)
        if source not in {one.host for one in here}:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((source, _DISCARD))
                source = probe.getsockname()[0]
    except OSError:
        return None
    return next((one for one in here if one.host == source), None)


def by_default(here: list[Interface], routes: str | None = None) -> Interface | None:
    """The one of `here` that the default route takes, or else the only one. `routes`: as in /proc/net/route."""
    if routes is None:
        routes = "\n".join(lines(Path("/proc/net/route")))
    rows = [row for row in map(str.split, routes.splitlines()[1:]) if len(row) > 7 and row[1] == row[7] == "00000000"]
    for name, *_ in sorted(rows, key=lambda row: int(row[6])):  # by metric
        if (found := next((one for one in here if one.name == name), None)) is not None:
            return found
    return here[0] if len(here) == 1 else None


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to the loopback device of this host."""
    try:
        return ipaddress.ip_address(resolve(host)).is_loopback
    except OSError:
        return False


def own_name_misleads() -> bool:
    """Whether this host's own name leads to no address that others could use: 127.0.1.1, as Debian writes it into
    /etc/hosts, or none. Gloo would listen there."""
    try:
        return ipaddress.ip_address(resolve(host_name())).is_loopback
    except OSError:
        return True


def free_port() -> int:
    """One that no one listens at now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
