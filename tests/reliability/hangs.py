"""Each trial trains on 2 to 4 workers that nothing but the environment has brought together, each watched on its own standard
error. At a random moment of training one of them gets SIGSTOP. Wrong: a rank that lives and does not say, within its time-out and a
second, which rank hangs and where; another exit code than 69; a process that is left.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import processes
import small
import tiny
from processes import Spoken
from reliability.trial import Scenario, Trial

TIME_OUT_S = 5
# Seconds over the time-out that the aim allows.
OVER_S = 1.0
PEER = 69
WORKERS = (2, 2, 3, 4)
BEGIN_S, END_S = 180.0, 60.0
_TOLD = ("has not moved for", "can't be reached for", "have waited for each other")
_SECTIONS = ("iteration", "evaluation", "save")


@contextmanager
def ranks(
    schedule: Path,
    out: Path,
    count: int,
    *arguments: str,
    time_out: float = TIME_OUT_S,
    address: str = "127.0.0.1",
    environment: Sequence[Mapping[str, str]] = (),
    within: Sequence[Sequence[str]] = (),
) -> Iterator[list[Spoken]]:
    """`count` workers of a run without an end, killed afterwards if they still live. `within`: words before each one's command."""
    port = processes.free_port() if address == "127.0.0.1" else 29500
    started: list[Spoken] = []
    try:
        for rank in range(count):
            limits = [word for section in _SECTIONS for word in ("--timeout", f"{section}={time_out}s")]
            words = ["run", str(schedule), "--out", str(out), "--threads", "1", *small.ENDLESS, *limits, *arguments]
            world = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
            mine = environment[rank] if environment else {"GLOO_SOCKET_IFNAME": "lo"}
            run = processes.Run(words, {**world, **mine})
            started.append(Spoken(run.start(within[rank] if within else ())))
        yield started
    finally:
        for one in started:
            processes.kill_all(one.run.pids())
            with suppress(subprocess.TimeoutExpired):
                one.ended(END_S)


def wait_for_training(out: Path, started: Sequence[Spoken]) -> None:
    """Until the stage without an end has been trained for some iterations."""
    end = time.monotonic() + BEGIN_S
    log = out / "log.jsonl"
    while not (log.exists() and '"event": "Iterated", "stage": "early"' in log.read_text()):
        if any(one.run.process.poll() is not None for one in started) or time.monotonic() > end:
            raise RuntimeError("it does not train:\n" + "\n".join(one.text for one in started))
        time.sleep(0.02)


@dataclass
class Seen:
    """`wrong`: what of the aim is missed, '' if nothing. The most seconds, over the time-out, until a rank said it and until it ended."""

    wrong: str
    told: float
    ended: float

    def trial(self, word: str, what: str) -> Trial:
        counts = {word: 1, "raised and named": int(not self.wrong)}
        largest = {"seconds over the time-out": self.told, "until it had ended": self.ended}
        return Trial(counts=counts, largest=largest, wrong=f"{what}: {self.wrong}" if self.wrong else "")


def missed(living: Mapping[int, Spoken], at: float, guilty: Mapping[int, str]) -> Seen:
    """`guilty`: what each rank is to say."""
    over, ended, wrong = 0.0, 0.0, []
    for rank, one in living.items():
        try:
            code = one.ended(END_S)
        except subprocess.TimeoutExpired:
            return Seen(f"rank {rank} has not ended after {END_S} s:\n{one.text}", over, END_S)
        ended = max(ended, time.monotonic() - at - TIME_OUT_S)
        told = one.told(*_TOLD)
        if told is None or guilty[rank] not in told[1]:
            wrong.append(f"rank {rank} does not say that {guilty[rank]}:\n{one.text}")
            continue
        late = told[0] - at - TIME_OUT_S
        over = max(over, late)
        if late > OVER_S:
            wrong.append(f"rank {rank} says it {late:.2f} s after the time-out")
        if code != PEER:
            wrong.append(f"rank {rank} ended with {code}")
    return Seen("; ".join(wrong), over, ended)


def prepared(folder: Path) -> Path:
    """The schedule."""
    tiny.make_data(folder / "data")
    return small.make_schedule(folder / "schedule", folder / "data")


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    schedule, out = prepared(folder), folder / "out"
    while True:
        shutil.rmtree(out, ignore_errors=True)
        yield trial(rng, schedule, out)


def trial(rng: random.Random, schedule: Path, out: Path) -> Trial:
    count = rng.choice(WORKERS)
    victim, wait = rng.randrange(count), rng.uniform(0.0, 2.0)
    with ranks(schedule, out, count) as started:
        wait_for_training(out, started)
        time.sleep(wait)
        at = time.monotonic()
        os.kill(started[victim].run.process.pid, signal.SIGSTOP)
        living = {rank: one for rank, one in enumerate(started) if rank != victim}
        name = f"rank {victim} on {socket.gethostname()} has not moved"
        seen = missed(living, at, dict.fromkeys(living, name))
        if not seen.wrong and not all(one.run.gone(within=5.0) for one in started):
            seen.wrong = "processes are left"
    what = f"SIGSTOP to rank {victim} of {count} {wait:.2f} s after the last stage began"
    return seen.trial(f"ranks of {count} stopped", what)


# -- two hosts, as far as the network is concerned


@dataclass(frozen=True)
class Net:
    """Two network namespaces and the two ends of a link."""

    spaces: tuple[str, str]
    devices: tuple[str, str]
    addresses: tuple[str, str]
    hosts: tuple[str, str]

    def cut(self, side: int) -> None:
        ip("-n", self.spaces[side], "link", "set", self.devices[side], "down")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def namespaces() -> Iterator[Net]:
    """Gone afterwards, the link with them."""
    mine = f"sr{os.getpid()}"
    net = Net(
        spaces=(f"{mine}a", f"{mine}b"),
        devices=(f"{mine}u", f"{mine}v"),
        addresses=("10.231.77.1", "10.231.77.2"),
        hosts=("node-a", "node-b"),
    )
    try:
        for space in net.spaces:
            ip("netns", "add", space)
        ip("link", "add", net.devices[0], "netns", net.spaces[0], "type", "veth", "peer", "name", net.devices[1], "netns", net.spaces[1])  # fmt: skip
        for space, device, address in zip(net.spaces, net.devices, net.addresses, strict=True):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", space, "link", "set", device, "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield net
    finally:
        for space in net.spaces:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)


@contextmanager
def two_hosts(net: Net, schedule: Path, out: Path, *arguments: str) -> Iterator[list[Spoken]]:
    """A worker in each namespace, with a host name of its own."""
    within = [
        ["ip", "netns", "exec", space, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
        for space, host in zip(net.spaces, net.hosts, strict=True)
    ]
    devices = [{"GLOO_SOCKET_IFNAME": device} for device in net.devices]
    with ranks(schedule, out, 2, *arguments, address=net.addresses[0], environment=devices, within=within) as started:
        yield started


def no_namespaces() -> str:
    """Why there can't be network namespaces here; '' if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]:
        return f"network namespaces need {' and '.join(missing)}"
    try:
        with namespaces():
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces can't be made: {error.stderr.strip()}"


SCENARIO = Scenario(
    name="hangs",
    fault="SIGSTOP of a rank",
    aim="raised within time-out + 1 s, right rank named, 100 %",
    wanted=100,
    trials=trials,
)
