"""A switch in user space, where the kernel has no netem: delay, jitter, rate, loss and cuts for each pair of hosts.

Each host's eth0 is a TAP device with checksum and segmentation offload, so frames have up to 64 kB and 1 Gbit/s are 2000 frames a
second. So loss strikes 64 kB at once, not packets. Delays are good to some tenths of a millisecond on a quiet machine.

It reads orders from a unix socket, one per datagram, and answers each:
    attach NAME PID ADDRESS/BITS MAC     makes eth0 in the network namespace of process PID
    detach NAME
    set FROM TO delay_ms=1 jitter_ms=0 rate_mbit=1000 loss=0.01 down=1     one direction; `*` for any
    clear                            no limits any more
    stats                            frames, bytes and drops of each direction, as JSON
"""

import ctypes
import errno
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 2, 0x1000, 0x4000
CLONE_NEWNET = 0x40000000
HEADER, FRAME = 12, 70000
MAX_QUEUE_S = 0.1  # what waits longer for its turn is dropped, as in a switch
AT_ONCE = 64  # frames that are taken from one host before the others' turn


@dataclass
class Direction:
    """From one host to another."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    rate_mbit: float = 0.0  # 0: as fast as it goes
    loss: float = 0.0  # of frames, 0 .. 1
    down: float = 0.0
    free: float = 0.0  # when the wire is free again
    last: float = 0.0  # when the newest frame arrives: jitter does not change the order
    frames: int = 0
    bytes: int = 0
    drops: int = 0

    def arrival(self, size: int, now: float) -> float | None:
        """When a frame of `size` bytes that is sent now arrives; None if it is lost."""
        self.frames, self.bytes = self.frames + 1, self.bytes + size
        queued = self.rate_mbit and self.free - now > MAX_QUEUE_S
        if self.down or queued or (self.loss and random.random() < self.loss):
            self.drops += 1
            return None
        at = now
        if self.rate_mbit:
            at = self.free = max(self.free, now) + size * 8e-6 / self.rate_mbit
        at += (self.delay_ms + random.random() * self.jitter_ms) / 1e3
        self.last = max(at, self.last)
        return self.last


def tap(pid: int, address: str, mac: str) -> int:
    """The file of a new eth0, which is up, in the network namespace of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    own, target = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(target, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22s", b"eth0", IFF_TAP | IFF_NO_PI | IFF_VNET_HDR, b""))
        fcntl.ioctl(file, TUNSETVNETHDRSZ, struct.pack("i", HEADER))
        fcntl.ioctl(file, TUNSETOFFLOAD, 1 | 2 | 4)  # checksums, and segmentation of both IP versions
        for command in (
            f"ip link set eth0 address {mac}",
            f"ip addr add {address} dev eth0",
            "ip link set eth0 txqueuelen 5000 up",
            "ip link set lo up",
        ):
            subprocess.run(command.split(), check=True)
    finally:
        libc.setns(own, CLONE_NEWNET)
        os.close(own)
        os.close(target)
    return file


class Switch:
    def __init__(self, orders: str) -> None:
        self.orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.orders.bind(orders)
        self.files: dict[str, int] = {}
        self.macs: dict[bytes, str] = {}
        self.directions: dict[tuple[str, str], Direction] = {}
        self.numbers = itertools.count(1)
        self.under_way: list[tuple[float, int, str, bytes]] = []

    def direction(self, source: str, target: str) -> Direction:
        return self.directions.setdefault((source, target), Direction())

    def detach(self, name: str) -> None:
        file = self.files.pop(name, None)
        if file is not None:
            os.close(file)
        self.macs = {mac: other for mac, other in self.macs.items() if other != name}

    def obey(self, words: list[str]) -> str:
        match words:
            case ["attach", name, pid, address, mac]:
                self.detach(name)
                self.files[name] = tap(int(pid), address, mac)
                self.macs[bytes.fromhex(mac.replace(":", ""))] = name
            case ["detach", name]:
                self.detach(name)
            case ["set", source, target, *values]:
                for a, b in itertools.permutations(self.files, 2):
                    if source in ("*", a) and target in ("*", b):
                        for key, value in (word.split("=") for word in values):
                            setattr(self.direction(a, b), key, float(value))
            case ["clear"]:
                self.directions.clear()
            case ["stats"]:
                of = self.directions.items()
                return json.dumps({f"{a} {b}": [d.frames, d.bytes, d.drops] for (a, b), d in of})
            case _:
                return f"what is `{' '.join(words)}`?"
        return "ok"

    def send(self, source: str, target: str, frame: bytes, now: float) -> None:
        at = self.direction(source, target).arrival(len(frame), now)
        if at is None:
            return
        if at <= now:
            self.write(target, frame)
        else:
            heapq.heappush(self.under_way, (at, next(self.numbers), target, frame))

    def write(self, target: str, frame: bytes) -> None:
        if target in self.files:
            with suppress(OSError):  # its queue is full, or it is gone
                os.write(self.files[target], frame)

    def read(self, source: str, now: float) -> None:
        for _ in range(AT_ONCE):
            try:
                frame = os.read(self.files[source], FRAME)
            except OSError as error:
                if error.errno != errno.EAGAIN:  # the host is gone
                    self.detach(source)
                return
            mac = frame[HEADER : HEADER + 6]
            if mac in self.macs:
                self.send(source, self.macs[mac], frame, now)
            elif mac[0] & 1:  # for all
                for target in [name for name in self.files if name != source]:
                    self.send(source, target, frame, now)

    def serve(self) -> None:
        while True:
            now = time.monotonic()
            while self.under_way and self.under_way[0][0] <= now:
                _, _, target, frame = heapq.heappop(self.under_way)
                self.write(target, frame)
            wait = max(0.0, self.under_way[0][0] - time.monotonic()) if self.under_way else None
            ready, _, _ = select.select([self.orders, *self.files.values()], [], [], wait)
            now = time.monotonic()
            if self.orders in ready:
                order, sender = self.orders.recvfrom(4096)
                try:
                    answer = self.obey(order.decode().split())
                except (OSError, ValueError, AttributeError, subprocess.CalledProcessError) as error:
                    answer = f"{type(error).__name__}: {error}"
                if sender:
                    self.orders.sendto(answer.encode(), sender)
                continue
            for name in [name for name, file in self.files.items() if file in ready]:
                self.read(name, now)


if __name__ == "__main__":
    Switch(sys.argv[1]).serve()
