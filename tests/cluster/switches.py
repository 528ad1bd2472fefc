"""What joins the hosts: the kernel's bridge in a network namespace of its own, or a switch in user space, which can do more."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from cluster import pids

_BURST, _LATENCY = "256k", "50ms"
_ORDERS = "switch.sock"


class Switch(Protocol):
    """Hosts are told by their names."""

    pid: int

    def attach(self, name: str, key: str, pid: int, address: str, mac: str) -> None:
        """Makes the host's eth0, in the network namespace of its process `pid`; up. `address`: with /BITS. `key` differs between two
        lives of a host, `mac` doesn't."""

    def detach(self, name: str) -> None: ...

    def cut(self, name: str, down: bool) -> None:
        """Drops whatever comes from it or goes to it, and tells nobody; or no longer does."""

    def shape(self, name: str, **values: float) -> None:
        """Limits of both directions: rate_mbit, delay_ms, jitter_ms, loss; as of `user_switch.Direction`. 0 takes one away."""

    def state(self) -> dict[str, Any]:
        """What another process makes the same one of, with `known`."""


class Bridge:
    """Frames are forwarded by the kernel. It has no delay and no loss to give: only rates."""

    def __init__(self, pid: int, ports: dict[str, Any] | None = None) -> None:
        self.pid = pid
        self.ports = ports or {}  # the port's name and the host's process, by host

    @classmethod
    def start(cls, folder: Path, dying: list[str]) -> "Bridge":
        process = subprocess.Popen(
            [*dying, "unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        pids.keep(process)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.stdout.close()
        _ip(process.pid, "ip link set lo up")
        _ip(process.pid, "ip link add br0 type bridge")
        _ip(process.pid, "ip link set br0 up")
        return cls(process.pid)

    def attach(self, name: str, key: str, pid: int, address: str, mac: str) -> None:
        self.ports[name] = (key, pid)
        _ip(self.pid, f"ip link add eth0 address {mac} netns {pid} type veth peer name {key} netns {self.pid}")
        _ip(self.pid, f"ip link set {key} master br0 up")
        _ip(pid, f"ip addr add {address} dev eth0")
        _ip(pid, "ip link set lo up")
        _ip(pid, "ip link set eth0 up")

    def detach(self, name: str) -> None:
        port, _ = self.ports.pop(name, (None, None))
        with suppress(subprocess.CalledProcessError):  # it goes with the host's namespace
            if port is not None:
                _ip(self.pid, f"ip link del {port}", quiet=True)

    def cut(self, name: str, down: bool) -> None:
        # Not by taking the link down, which the host would see.
        until = time.monotonic() + 5
        while True:
            try:
                return _ip(self.pid, f"bridge link set dev {self.ports[name][0]} state {0 if down else 3}", quiet=True)
            except subprocess.CalledProcessError:  # a link that was made just now is not yet up
                if time.monotonic() > until:
                    raise
            time.sleep(0.02)

    def shape(self, name: str, **values: float) -> None:
        rate = values.pop("rate_mbit", 0.0)
        if any(values.values()):
            raise ValueError(f"the kernel's bridge has rates alone; use the switch in user space for {values}")
        port, host = self.ports[name]
        for pid, device in ((self.pid, port), (host, "eth0")):
            if rate:
                limit = f"root tbf rate {rate}mbit burst {_BURST} latency {_LATENCY}"
                _ip(pid, f"tc qdisc replace dev {device} {limit}")
            else:
                with suppress(subprocess.CalledProcessError):  # there was none
                    _ip(pid, f"tc qdisc del dev {device} root", quiet=True)

    def state(self) -> dict[str, Any]:
        return {"pid": self.pid, "ports": self.ports}


class UserSwitch:
    """user_switch.py, in a process of its own. It takes half a core at 1 Gbit/s."""

    def __init__(self, pid: int, orders: str) -> None:
        self.pid, self.orders = pid, orders

    @classmethod
    def start(cls, folder: Path, dying: list[str]) -> "UserSwitch":
        orders = str(folder / _ORDERS)
        with open(folder / "switch.log", "wb") as log:
            process = subprocess.Popen(
                [*dying, sys.executable, str(Path(__file__).parent / "user_switch.py"), orders],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        pids.keep(process)
        until = time.monotonic() + 10
        while not os.path.exists(orders):
            assert process.poll() is None and time.monotonic() < until, (folder / "switch.log").read_text()
            time.sleep(0.02)
        return cls(process.pid, orders)

    def order(self, words: str) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as here, tempfile.TemporaryDirectory() as own:
            here.bind(f"{own}/answer")
            here.settimeout(10)
            here.sendto(words.encode(), self.orders)
            return here.recv(65536).decode()

    def _done(self, words: str) -> None:
        answer = self.order(words)
        assert answer == "ok", f"{words}: {answer}"

    def attach(self, name: str, key: str, pid: int, address: str, mac: str) -> None:
        self._done(f"attach {name} {pid} {address} {mac}")
        self.cut(name, False)  # it may have been cut off when it lost its power

    def detach(self, name: str) -> None:
        self._done(f"detach {name}")

    def cut(self, name: str, down: bool) -> None:
        self.shape(name, down=float(down))

    def shape(self, name: str, **values: float) -> None:
        said = " ".join(f"{key}={value}" for key, value in values.items())
        self._done(f"set {name} * {said}")
        self._done(f"set * {name} {said}")

    def stats(self) -> dict[str, list[int]]:
        """Frames, bytes and drops, by `FROM TO`."""
        return json.loads(self.order("stats"))

    def state(self) -> dict[str, Any]:
        return {"pid": self.pid, "orders": self.orders}


KINDS: dict[str, type[Bridge] | type[UserSwitch]] = {"bridge": Bridge, "user": UserSwitch}


def known(state: dict[str, Any]) -> Switch:
    """The one that another process started, of its `state`."""
    return UserSwitch(**state) if "orders" in state else Bridge(**state)


def _ip(pid: int, command: str, quiet: bool = False) -> None:
    """Runs a command in the network namespace of a process."""
    words = ["nsenter", "-t", str(pid), "-n", *command.split()]
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL if quiet else None)
