"""What joins the hosts: the kernel's bridge in a network namespace of its own."""

import subprocess
import time
from contextlib import suppress

from cluster import pids

_BURST, _LATENCY = "256k", "50ms"


class Bridge:
    """Frames are forwarded by the kernel. Hosts are told by their names."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ports: dict[str, tuple[str, int]] = {}  # the port's name and the host's process, by host

    @classmethod
    def start(cls) -> "Bridge":
        process = subprocess.Popen(
            [*pids.DYING, "unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"],
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
        """Makes the host's eth0, in the network namespace of its process `pid`; up. `address`: with /BITS. `key` differs between two
        lives of a host, `mac` doesn't."""
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
        """Drops whatever comes from it or goes to it, and tells nobody; or no longer does. Not by taking the link down, which the host would
        see."""
        until = time.monotonic() + 5
        while True:
            try:
                return _ip(self.pid, f"bridge link set dev {self.ports[name][0]} state {0 if down else 3}", quiet=True)
            except subprocess.CalledProcessError:  # a link that was made just now is not yet up
                if time.monotonic() > until:
                    raise
            time.sleep(0.02)

    def shape(self, name: str, rate_mbit: float) -> None:
        """Limits both directions; 0: no longer."""
        port, host = self.ports[name]
        for pid, device in ((self.pid, port), (host, "eth0")):
            if rate_mbit:
                limit = f"root tbf rate {rate_mbit}mbit burst {_BURST} latency {_LATENCY}"
                _ip(pid, f"tc qdisc replace dev {device} {limit}")
            else:
                with suppress(subprocess.CalledProcessError):  # there was none
                    _ip(pid, f"tc qdisc del dev {device} root", quiet=True)


def _ip(pid: int, command: str, quiet: bool = False) -> None:
    """Runs a command in the network namespace of a process."""
    words = ["nsenter", "-t", str(pid), "-n", *command.split()]
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL if quiet else None)
