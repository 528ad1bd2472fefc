"""Runs that hang: who is named, where, by whom, and what is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
import small
from processes import events, until

from stagerun import store
from stagerun.launch import monitor

HOST = socket.gethostname()
# Longer than a step may take on a busy machine.
TIME_OUTS = ("--timeout", "iteration=10s", "--timeout", "evaluation=10s", "--timeout", "save=10s")

# On the path of a process before anything else: what SIGUSR2 has its training thread do at its next device batch. The signal itself
# may find it in a collective, where all that is seen of it is that it waits for others. Its monitor ignores the signal.
HOOK = """
import ctypes, os, signal, sys, time
MUTEX = ctypes.create_string_buffer(64)  # locked twice, it waits for ever, and no signal ends that
DO = {
    "sleeps": lambda: time.sleep(1000),
    "holds Python's lock": lambda: [ctypes.PyDLL(None).pthread_mutex_lock(MUTEX) for _ in "ab"],
    "dawdles": lambda: (signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.2)), signal.setitimer(signal.ITIMER_REAL, 0.25, 0.25)),
}
def next_time(*_):
    from stagerun.system.pulse import Pulse
    beat = Pulse.beat
    def once(pulse):
        Pulse.beat = beat
        DO[os.environ["HOOK"]]()
        beat(pulse)
    Pulse.beat = once
signal.signal(signal.SIGUSR2, next_time)
"""


@pytest.fixture(scope="module")
def base(base):
    (base / "hook").mkdir()
    (base / "hook" / "sitecustomize.py").write_text(HOOK)
    return base


def training(base: Path, out: Path, nproc: int, *arguments: object, hook: str = "") -> processes.Run:
    """A run in the midst of a stage that has no end."""
    path = os.pathsep.join([str(base / "hook"), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "HOOK": hook} if hook else {}
    run = small.start(base / "schedule", out, *small.ENDLESS, *arguments, nproc=nproc, environment=environment)
    until(run, lambda: any(e["stage"] == "early" for e in events(out, "Iterated")))
    return run


def test_a_stopped_rank_is_named_and_nothing_is_left(base, tmp_path):
    out = tmp_path / "out"
    run = training(base, out, 2, *TIME_OUTS)
    os.kill(run.ranks()[1], signal.SIGSTOP)
    code, text = run.wait()
    assert code == 69, text
    told = text[text.index("rank 1 on ") :]
    assert told.startswith(f"rank 1 on {HOST} has not moved for ") and "(time-out 10 s) in section " in told
    assert "is stopped (state T)" in told and "the Python stack" not in told
    assert "hint: run the same command again" in told and text.count("has not moved") == 1
    assert "Traceback" not in text and "lost the other workers" not in text
    (failed,) = events(out, "Failed")
    assert failed["code"] == 69 and failed["text"] == told.strip()
    assert json.loads((out / "log.jsonl").read_text().splitlines()[-1]) == failed
    logged = {(e["stage"], e["iter"]) for e in events(out, "Iterated")}
    saved = {(ref.stage, ref.iter) for ref in store.inventory(store.LocalDisk(), out).snapshots}
    assert saved and saved <= logged, saved - logged
    assert run.gone(), run.pids()


WORKER = """
import faulthandler, os, threading, time
from stagerun.launch.monitor import STACK_SIGNAL
stack = os.memfd_create("stack")
faulthandler.register(STACK_SIGNAL, os.fdopen(stack, "wb", buffering=0), all_threads=True)
def hangs_here():
    print(stack, threading.get_ident(), flush=True)
    while True:
        time.sleep(1)
hangs_here()
"""


def test_a_workers_stack():
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            stack, thread = map(int, child.stdout.readline().split())
            memory, text, end = os.open(f"/proc/{child.pid}/fd/{stack}", os.O_RDONLY), "", time.monotonic() + 60
            while not text and time.monotonic() < end:  # a busy machine
                text = monitor.stack(child.pid, thread, memory)
            assert "in hangs_here" in text
            monitor.kill(child.pid)  # only a monitor's own worker
            time.sleep(0.1)
            assert child.poll() is None
            os.close(memory)
        finally:
            child.kill()


@pytest.mark.slow
@pytest.mark.parametrize("nproc, rank, what", [
    (1, 0, "stopped"), (3, 0, "stopped"), (2, 1, "sleeps"), (1, 0, "holds Python's lock"), (2, 1, "holds Python's lock"),
])  # fmt: skip
def test_a_rank_that_is_stopped_hangs_in_python_or_holds_its_lock(base, tmp_path, nproc, rank, what):
    """A worker that can't end itself is killed; where it is the command itself, with a word."""
    out, stopped = tmp_path / "out", what == "stopped"
    run = training(base, out, nproc, *TIME_OUTS, hook="" if stopped else what)
    os.kill(run.ranks()[rank] if nproc > 1 else run.process.pid, signal.SIGSTOP if stopped else signal.SIGUSR2)
    code, text = run.wait()
    assert code == (-signal.SIGKILL if nproc == 1 and what != "sleeps" else 69), text
    assert f"rank {rank} on {HOST} has not moved for" in text and ("(state T)" in text) == stopped and run.gone(), text
    # A busy machine may take longer to write a stack than there is time for.
    assert "the Python stack" not in text or ("sitecustomize.py" in text and not stopped)
    assert not stopped or len(list(events(out, "Failed"))) == 1
    if nproc == 3:
        small.run(base / "schedule", out, *small.AGAIN, nproc=nproc, code=0)


def goes_on(run: processes.Run, out: Path, iterations: int) -> None:
    """Trains so many more, and is killed."""
    before = len(list(events(out, "Iterated")))
    until(run, lambda: len(list(events(out, "Iterated"))) > before + iterations)
    processes.kill_all(run.pids())
    run.wait()


@pytest.mark.slow
@pytest.mark.parametrize("limits", [["off"], ["iteration=8s", "save=8s"]], ids=["off", "limited"])
def test_all_are_stopped_for_a_while_and_go_on(base, tmp_path, limits):
    """As Ctrl-Z does, and a machine that sleeps: who was stopped itself can't blame others."""
    run = training(base, tmp_path / "out", 2, *(word for limit in limits for word in ("--timeout", limit)))
    stopped = run.pids()
    assert limits != ["off"] or len(stopped) == 3, "a launcher and two workers"
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(14 if limits != ["off"] else 0)
    for pid in reversed(stopped):
        os.kill(pid, signal.SIGCONT)
    goes_on(run, tmp_path / "out", 9)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["a rank dawdles", "the monitors are killed"])
def test_a_slow_rank_or_a_lost_monitor_is_reported_and_the_run_goes_on(base, tmp_path, whom):
    slow, out = whom == "a rank dawdles", tmp_path / "out"
    run = training(base, out, 2, hook="dawdles")
    if slow:
        os.kill(run.ranks()[1], signal.SIGUSR2)
    for pid in run.pids():
        if not slow and processes.is_monitor(pid):
            os.kill(pid, signal.SIGKILL)
    words = f"rank 1 on {HOST} is slow" if slow else "watches this one is gone"
    until(run, lambda: any(words in e["text"] and e["warning"] for e in events(out, "Note")), 240)
    goes_on(run, out, 3)
