"""IPv4 addresses of this host, and the interface of the route to another. Linux."""

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# A port and a documentation address (RFC 5737); nothing is sent.
_DISCARD, _ELSEWHERE = 9, "203.0.113.1"


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    host: str  # its address


def interfaces() -> list[Interface]:
    """Return the interfaces that are up and have an address, without the loopback device and aliases."""
    up = {name for _, name in socket.if_nameindex() if _is_up(name)}
    first = [(name, addresses[0]) for name, addresses in psutil.net_if_addrs().items() if name in up]
    return [
        Interface(name, one.address)
        for name, one in first
        if one.family == socket.AF_INET and not is_loopback(one.address)
    ]


def _is_up(name: str) -> bool:
    """Return the flag IFF_UP. psutil's `net_if_stats` asks for more, which some devices refuse. If /sys shows another namespace: True."""
    with suppress(OSError, ValueError):
        return bool(int(Path("/sys/class/net", name, "flags").read_text(), 16) & 1)
    return True


def resolve(host: str) -> str:
    """Return a host's first address. OSError for a name that doesn't resolve."""
    return str(socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)[0][4][0])


def towards(host: str, here: list[Interface]) -> Interface | None:
    """Return the interface that holds `host`'s address or routes to it; None for the loopback device, or without a route."""
    try:
        source = resolve(host)
        if source not in {one.host for one in here}:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((source, _DISCARD))
                source = probe.getsockname()[0]
    except (OSError, UnicodeError):
        return None
    return next((one for one in here if one.host == source), None)


def by_default(here: list[Interface]) -> Interface | None:
    """Return the interface of the default route, or else the only one."""
    return towards(_ELSEWHERE, here) or (here[0] if len(here) == 1 else None)


def is_loopback(host: str) -> bool:
    """Return whether a name or address resolves to the loopback device."""
    try:
        return ipaddress.ip_address(resolve(host)).is_loopback
    except OSError:
        return False


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
