"""Workers that the others go on without: what our launcher and the monitors do when one is gone, in real processes.

Run as a program, this file is the launcher, an agent of a host, and each worker, of three: what they do has a name.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from stagerun.base.errors import DataError, Diverged, ExitCode, PeerError
from stagerun.launch import StopRequest, local, sparing
from stagerun.launch.addresses import free_port
from stagerun.launch.agent import Agent
from stagerun.launch.hostfile import Host
from stagerun.launch.remote import Remote
from stagerun.launch.restarting import Asking, Lived
from stagerun.launch.ssh import Way
from stagerun.launch.start import Orders, start, work
from stagerun.launch.watch.worker import Monitored
from stagerun.launch.wire import ALIVE_S
from stagerun.system.pulse import Limits, Section
from stagerun.system.world import World

LONG_S = 60.0
Step = Callable[[World, StopRequest, Monitored, Path], object]


# -- what the workers do


class Files:
    """As much of a Comm as the monitors need, through a folder."""

    def __init__(self, world: World, folder: Path) -> None:
        self.rank, self.size, self.file = world.rank, world.size, folder / "met"

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        if data is not None:
            self.file.with_suffix(".new").write_bytes(data)
            self.file.with_suffix(".new").rename(self.file)
        wait_for(self.file)
        return self.file.read_bytes()


def wait_for(file: Path, seconds: float = LONG_S) -> None:
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, file
        time.sleep(0.02)


def train(watch: Monitored, seconds: float, stop: Callable[[], object] = lambda: False) -> bool:
    """Whether it was not stopped."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watch.pulse.beat()
        while watch.pulse.news:
            print(f"news: {watch.pulse.news.popleft()}", file=sys.stderr, flush=True)
        if stop():
            return False
        time.sleep(0.05)
    return True


def dies(number: signal.Signals) -> Step:
    """Rank 2 ends by the signal, while the others go on."""

    def work(world: World, stop: StopRequest, watch: Monitored, folder: Path) -> None:
        if world.rank == 2:
            os.kill(os.getpid(), number)
        train(watch, 5 if number == signal.SIGSTOP else 2)

    return work


def own_error(world: World, stop: StopRequest, watch: Monitored, folder: Path) -> None:
    if world.rank == 2:
        raise DataError("record 7 is damaged", "make it anew")
    train(watch, 2)


def diverges(world: World, stop: StopRequest, watch: Monitored, folder: Path) -> None:
    raise Diverged("the loss is nan")


def first_dies(world: World, stop: StopRequest, watch: Monitored, folder: Path) -> None:
    if world.rank == 0:
        (folder / "pid").write_text(str(os.getpid()))
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(folder / "pid")
    time.sleep(0.3)
    raise PeerError("lost worker 0")  # a little before its process has ended


def is_stopped(world: World, stop: StopRequest, watch: Monitored, folder: Path) -> int:
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"{world.rank}.pid").write_text(str(os.getpid()))
    return ExitCode.DONE if train(watch, LONG_S, stop) else ExitCode.SAVED


def dies_afterwards(world: World, stop: StopRequest, watch: Monitored, folder: Path) -> None:
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    train(watch, 1.5)


def host_dies(world: World, stop: StopRequest, watch: Monitored, folder: Path) -> None:
    train(watch, ALIVE_S + 1)  # its agent has said who can be spared
    if world.rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    train(watch, 2)


STEPS: dict[str, Step] = {
    "killed": dies(signal.SIGKILL),
    "stopped": dies(signal.SIGSTOP),
    "own error": own_error,
    "diverges": diverges,
    "first dies": first_dies,
    "is stopped": is_stopped,
    "dies afterwards": dies_afterwards,
    "host dies": host_dies,
}


def job(world: World, stop: StopRequest, watch: Monitored | None) -> int:
    name, folder = sys.argv[1], Path(sys.argv[2])
    assert watch is not None
    stop.begin()
    watch.meet(Files(world, folder))  # type: ignore[arg-type]
    for section in (Section.FIRST_ITERATION, Section.ITERATION):
        watch.pulse.enter(section)
    with sparing.sparing(world.rank, watch.pulse, world.rank > 0):
        (folder / f"in {world.rank}").touch()
        for rank in range(world.size):
            wait_for(folder / f"in {rank}")
        code = STEPS[name](world, stop, watch, folder)
    if name == "dies afterwards" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "dies afterwards":
        train(watch, LONG_S, stop)
        raise PeerError("lost worker 1")
    (folder / f"done {world.rank}").touch()
    return int(code or 0)  # type: ignore[call-overload]


def on_hosts(orders: Orders, folder: Path) -> int:
    """The first ranks on host a, the others on b, whose agents are started by a script in the place of ssh."""
    ssh = folder / "ssh"
    ssh.write_text(f"#!/bin/sh\nexec {sys.executable} {__file__} agent\n")
    ssh.chmod(0o755)

    def show(host: str, stream: str, text: str) -> None:
        print(text, end="", file=sys.stderr)

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    with Remote([Host("a"), Host("b")], Way((str(ssh),)), show) as remote:
        endpoint = f"127.0.0.1:{free_port()}"
        workers = {"a": 2, "b": 1} if sys.argv[-2] == "killed" else {"a": 1, "b": 2}
        life = Lived(remote, workers, endpoint, uuid.uuid4().hex, orders, Asking(), say)
        end = life.to_its_end(lambda: "")
    say(end.text or f"lost: {', '.join(end.lost) or 'no host'}")
    return end.code


def main() -> int:
    limits = Limits({Section.ITERATION: 1.5})
    orders = Orders(("run", *sys.argv[-2:]), threads=1, grace=30, limits=limits)
    if "RANK" in os.environ:
        del sys.argv[1]
        return work(job, orders)
    local.program = lambda name: [__file__]  # type: ignore[assignment]
    sparing.LEFT_S = 0.5
    if sys.argv[1] == "agent":
        Agent({}).run()
    return on_hosts(orders, Path(sys.argv[-1])) if sys.argv[1] == "hosts" else start(job, orders, 3)


# -- what is asserted of it


class Launched:
    def __init__(self, name: str, folder: Path, *way: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, __file__, *way, name, str(folder)],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def end(self) -> tuple[int, str]:
        try:
            _, said = self.process.communicate(timeout=LONG_S)
        finally:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode, said

    def done(self) -> list[int]:
        return [rank for rank in range(3) if (self.folder / f"done {rank}").exists()]


GO_ON = "; the others go on without it"


def test_the_others_go_on_when_one_is_killed(tmp_path: Path) -> None:
    run = Launched("killed", tmp_path)
    assert run.end() == (0, f"warning: worker 2 was killed by SIGKILL{GO_ON}\n")
    assert run.done() == [0, 1]


def test_what_one_says_of_its_own_error_is_shown(tmp_path: Path) -> None:
    run = Launched("own error", tmp_path)
    said = "\n  it said: record 7 is damaged\n  hint: make it anew\n"
    assert run.end() == (0, f"warning: worker 2 ended with exit code 65{GO_ON}{said}")
    assert run.done() == [0, 1]


def test_one_that_is_stopped_for_ever_is_a_warning_and_nothing_waits_for_it(tmp_path: Path) -> None:
    run = Launched("stopped", tmp_path)
    code, said = run.end()
    news, end = said.splitlines()
    assert code == 0, said
    assert news.startswith("news: rank 2 on ") and "is stopped (state T)" in news and news.endswith(GO_ON)
    assert end == f"warning: worker 2 was killed by SIGKILL{GO_ON}"
    assert run.done() == [0, 1]


def test_one_that_is_needed_ends_all_as_ever(tmp_path: Path) -> None:
    code, said = Launched("dies afterwards", tmp_path).end()
    warning, *verdict = said.splitlines()
    assert (code, warning) == (69, f"warning: worker 2 was killed by SIGKILL{GO_ON}")
    assert verdict[0].startswith("worker 1 was killed by SIGKILL")


@pytest.mark.parametrize(
    "name, code, begins", [("first dies", 69, "worker 0 was killed by SIGKILL"), ("diverges", 79, "the loss is nan")]
)
def test_nothing_is_said_of_those_that_end_since_all_do(name: str, code: int, begins: str, tmp_path: Path) -> None:
    found, said = Launched(name, tmp_path).end()
    assert found == code and said.startswith(begins) and "go on" not in said, said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_heard_while_the_others_go_on(number: signal.Signals, tmp_path: Path) -> None:
    run = Launched("is stopped", tmp_path)
    for rank in (0, 1):
        wait_for(tmp_path / f"{rank}.pid")
    time.sleep(2)
    run.process.send_signal(number)
    code, said = run.end()
    assert code == 75 and f"{number.name}: stopping" in said, said
    assert run.done() == [0, 1]


def test_they_die_with_their_launcher(tmp_path: Path) -> None:
    run = Launched("is stopped", tmp_path)
    for rank in (0, 1):
        wait_for(tmp_path / f"{rank}.pid")
    time.sleep(2)
    pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in (0, 1)]
    run.process.kill()
    run.process.wait()
    end = time.monotonic() + 5
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)
    run.end()


def test_on_several_hosts_one_that_is_killed(tmp_path: Path) -> None:
    run = Launched("killed", tmp_path, "hosts")
    assert run.end() == (0, f"warning: worker 2 on b was killed by SIGKILL{GO_ON}\nlost: no host\n")
    assert run.done() == [0, 1]


def test_on_several_hosts_nothing_is_said_of_those_that_end_since_rank_0_does(tmp_path: Path) -> None:
    code, said = Launched("first dies", tmp_path, "hosts").end()
    assert code == 69 and said.startswith("worker 0 on a was killed by SIGKILL") and "go on" not in said, said


@pytest.mark.slow
def test_on_several_hosts_one_that_is_stopped_for_ever(tmp_path: Path) -> None:
    run = Launched("stopped", tmp_path, "hosts")
    code, said = run.end()
    assert code == 0 and "is stopped (state T)" in said, said
    assert said.endswith(f"warning: worker 2 on b was killed by SIGKILL{GO_ON}\nlost: no host\n")
    assert run.done() == [0, 1]


def test_a_host_with_none_but_such_workers_may_be_lost(tmp_path: Path) -> None:
    run = Launched("host dies", tmp_path, "hosts")
    warning = "warning: b is gone: its connection ended (ranks 1 2)"
    assert run.end() == (0, f"{warning}{GO_ON}\nlost: no host\n")
    assert run.done() == [0]


if __name__ == "__main__":
    sys.exit(main())
