"""The addresses of this host, and the interface on the way to another. IPv4; Linux."""

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# A port, and an address that is nowhere (RFC 5737); nothing is sent to them.
_DISCARD, _ELSEWHERE = 9, "203.0.113.1"


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    host: str  # its address


def interfaces() -> list[Interface]:
    """Return those that are up and have an address, without the loopback device."""
    up = {name for _, name in socket.if_nameindex() if _is_up(name)}
    first = [(name, held[0]) for name, held in psutil.net_if_addrs().items() if name in up]
    return [
        Interface(name, one.address)
        for name, one in first
        if one.family == socket.AF_INET and not is_loopback(one.address)
    ]


def _is_up(name: str) -> bool:
    """By the flag IFF_UP. psutil's `net_if_stats` asks for more, which some devices refuse. Where /sys shows another namespace: yes."""
    with suppress(OSError, ValueError):
        return bool(int(Path("/sys/class/net", name, "flags").read_text(), 16) & 1)
    return True


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
    except (OSError, UnicodeError):
        return None
    return next((one for one in here if one.host == source), None)


def by_default(here: list[Interface]) -> Interface | None:
    """The one of `here` that the default route takes, or else the only one."""
    return towards(_ELSEWHERE, here) or (here[0] if len(here) == 1 else None)


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to the loopback device of this host."""
    try:
        return ipaddress.ip_address(resolve(host)).is_loopback
    except OSError:
        return False


def free_port() -> int:
    """One that no one listens at now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
