"""The addresses of this host, and the interface on the way to another. IPv4; Linux."""

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from stagerun.system.host import host_name

_GET_FLAGS, _GET_ADDRESS = 0x8913, 0x8915  # SIOCGIF...
_UP, _LOOPBACK = 0x1, 0x8  # IFF_...
_DISCARD = 9  # a port; nothing is sent to it


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    host: str  # its address


def interfaces() -> list[Interface]:
    """Those that are up and have an address, without the loopback device."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                flags = struct.unpack_from("H", _ask(probe, _GET_FLAGS, name), 16)[0]
                address = socket.inet_ntoa(_ask(probe, _GET_ADDRESS, name)[20:24])
            except OSError:
                continue  # it has no such address
            if flags & _UP and not flags & _LOOPBACK:
                found.append(Interface(name, address))
    return found


def _ask(probe: socket.socket, what: int, name: str) -> bytes:
    return fcntl.ioctl(probe.fileno(), what, struct.pack("256s", name.encode()[:15]))


def resolve(host: str) -> str:
    """Its first address. OSError for a name that this host doesn't know."""
    found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to the loopback device of this host."""
    try:
        return ipaddress.ip_address(resolve(host)).is_loopback
    except OSError:
        return False


def towards(host: str, here: list[Interface]) -> Interface | None:
    """The one of `here` by which packets go to `host`, or that holds its address. None: by the loopback device, or no way is
    known."""
    try:
        address = resolve(host)
        held = next((i for i in here if i.host == address), None)
        if held is not None:
            return held
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _DISCARD))
            source = probe.getsockname()[0]
    except OSError:
        return None
    return next((i for i in here if i.host == source), None)


def by_default(here: list[Interface], routes: str | None = None) -> Interface | None:
    """The one of `here` that the default route takes, or else the only one. `routes`: as in /proc/net/route."""
    if routes is None:
        try:
            routes = Path("/proc/net/route").read_text()
        except OSError:
            routes = ""
    rows = [line.split() for line in routes.splitlines()[1:]]
    names = [
        row[0]
        for row in sorted((r for r in rows if len(r) > 7 and r[1] == r[7] == "00000000"), key=lambda r: int(r[6]))
    ]
    ways = [interface for name in names for interface in here if interface.name == name]
    return ways[0] if ways else here[0] if len(here) == 1 else None


def own_name_misleads() -> bool:
    """Whether this host's own name leads to no address that others could use: 127.0.1.1, as Debian writes it into
    /etc/hosts, or none. Gloo would listen there."""
    try:
        resolve(host_name())
    except OSError:
        return True
    return is_loopback(host_name())


def free_port() -> int:
    """One that no one listens at now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
