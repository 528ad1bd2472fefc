"""A worker that is stopped, and a link that is taken down between two hosts. What is counted: RESULTS.md."""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import processes
import small
import tiny
from processes import Spoken
from reliability.trial import Trial

TIME_OUT_S = 5
# Seconds over the time-out that the aim allows.
OVER_S = 1.0
PEER = 69
WORKERS = (2, 2, 3, 4)
BEGIN_S, END_S = 180.0, 60.0
_TOLD = ("has not moved for", "can't be reached for", "have waited for each other")
LIMITS = [word for part in ("iteration", "evaluation", "save") for word in ("--timeout", f"{part}={TIME_OUT_S}s")]


@contextmanager
def ranks(
    schedule: Path,
    out: Path,
    count: int,
    address: str = "127.0.0.1",
    environment: Sequence[Mapping[str, str]] = (),
    within: Sequence[Sequence[str]] = (),
) -> Iterator[list[Spoken]]:
    """`count` workers of a run without an end, killed afterwards if they still live. `within`: words before each one's command."""
    port = processes.free_port() if address == "127.0.0.1" else 29500
    started: list[Spoken] = []
    try:
        for rank in range(count):
            words = ["run", str(schedule), "--out", str(out), "--threads", "1", *small.ENDLESS, *LIMITS]
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


def wait_for_training(out: Path, started: Sequence[Spoken], seconds: float) -> None:
    """Until the stage without an end has been trained for so long."""
    end = time.monotonic() + BEGIN_S
    log = out / "log.jsonl"
    while not (log.exists() and '"event": "Iterated", "stage": "early"' in log.read_text()):
        if any(one.run.process.poll() is not None for one in started) or time.monotonic() > end:
            raise RuntimeError("it does not train:\n" + "\n".join(one.text for one in started))
        time.sleep(0.02)
    time.sleep(seconds)


def harmed(started: Sequence[Spoken], harm: Callable[[], object], guilty: Mapping[int, str]) -> Trial:
    """`harm` is done now, in training. `guilty`: what each rank that lives is to say."""
    at, wrong = time.monotonic(), []
    over = ended = 0.0  # the most seconds over the time-out, until a rank said it and until it ended
    harm()
    for rank, name in guilty.items():
        one = started[rank]
        try:
            code = one.ended(END_S)
        except subprocess.TimeoutExpired:
            wrong, ended = [f"rank {rank} has not ended after {END_S} s:\n{one.text}"], END_S
            break
        ended = max(ended, time.monotonic() - at - TIME_OUT_S)
        told = one.told(*_TOLD)
        if told is None or name not in told[1]:
            wrong.append(f"rank {rank} does not say that {name}:\n{one.text}")
            continue
        late = told[0] - at - TIME_OUT_S
        over = max(over, late)
        if late > OVER_S:
            wrong.append(f"rank {rank} says it {late:.2f} s after the time-out")
        if code != PEER:
            wrong.append(f"rank {rank} ended with {code}")
    if not wrong and not all(one.run.gone(within=5.0) for one in started):
        wrong = ["processes are left"]
    largest = {"seconds over the time-out": over, "until it had ended": ended}
    return Trial(counts={"raised and named": int(not wrong)}, largest=largest, wrong="; ".join(wrong))


def named(trial: Trial, word: str, what: str) -> Trial:
    wrong = f"{what}: {trial.wrong}" if trial.wrong else ""
    return replace(trial, counts={word: 1, **trial.counts}, wrong=wrong)


def endless(trial: Callable[[random.Random, Path, Path], Trial], rng: random.Random, folder: Path) -> Iterator[Trial]:
    tiny.make_data(folder / "data")
    schedule, out = small.make_schedule(folder / "schedule", folder / "data"), folder / "out"
    while True:
        shutil.rmtree(out, ignore_errors=True)
        yield trial(rng, schedule, out)


def trial(rng: random.Random, schedule: Path, out: Path) -> Trial:
    count = rng.choice(WORKERS)
    victim, wait = rng.randrange(count), rng.uniform(0.0, 2.0)
    name = f"rank {victim} on {socket.gethostname()} has not moved"
    with ranks(schedule, out, count) as started:
        wait_for_training(out, started, wait)
        stop = partial(os.kill, started[victim].run.process.pid, signal.SIGSTOP)
        done = harmed(started, stop, {rank: name for rank in range(count) if rank != victim})
    what = f"SIGSTOP to rank {victim} of {count} {wait:.2f} s after the last stage began"
    return named(done, f"ranks of {count} stopped", what)


# -- two hosts, as far as the network is concerned


SPACES = (f"sr{os.getpid()}a", f"sr{os.getpid()}b")
DEVICES = (f"sr{os.getpid()}u", f"sr{os.getpid()}v")  # the two ends of the link
ADDRESSES, HOSTS = ("10.231.77.1", "10.231.77.2"), ("node-a", "node-b")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def namespaces() -> Iterator[None]:
    """Two networks and a link, gone afterwards."""
    try:
        for space in SPACES:
            ip("netns", "add", space)
        link = ("link", "add", DEVICES[0], "netns", SPACES[0], "type", "veth")
        ip(*link, "peer", "name", DEVICES[1], "netns", SPACES[1])
        for space, device, address in zip(SPACES, DEVICES, ADDRESSES, strict=True):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", space, "link", "set", device, "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield
    finally:
        for space in SPACES:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)


@contextmanager
def two_hosts(schedule: Path, out: Path) -> Iterator[list[Spoken]]:
    """A worker in each namespace, with a host name of its own."""
    named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
    within = [["ip", "netns", "exec", space, *named, host] for space, host in zip(SPACES, HOSTS, strict=True)]
    devices = [{"GLOO_SOCKET_IFNAME": device} for device in DEVICES]
    with namespaces(), ranks(schedule, out, 2, ADDRESSES[0], devices, within) as started:
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


def cut(rng: random.Random, schedule: Path, out: Path) -> Trial:
    wait, side = rng.uniform(0.0, 2.0), rng.randrange(2)
    a, b = HOSTS
    with two_hosts(schedule, out) as started:
        wait_for_training(out, started, wait)
        down = partial(ip, "-n", SPACES[side], "link", "set", DEVICES[side], "down")
        names = {0: f"rank 1 on {b} can't be reached", 1: f"rank 0 on {a} can't be reached"}
        done = harmed(started, down, names)
    return named(done, "links cut", f"link down at host {side} {wait:.2f} s after the last stage began")
