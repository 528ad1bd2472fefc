"""The store and processes: stopped and gone on, holding a lock."""

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import audited
import pytest
from facade import ExitCode, FolderInUseError, StagerunError, this_process
from test_store_lease import HERE, NODE7, Clock, commit, life, taken
from test_store_lease import out as out

from stagerun import store
from stagerun.store import Lease, LocalDisk, Lock

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@contextmanager
def child(work: Callable[[Callable[[str], object]], object]) -> Iterator[tuple[int, Callable[[], str]]]:
    """A process that does `work(say)`: its number, and what reads a line that it says. Killed at the end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work(lambda text: os.write(writing, f"{text}\n".encode()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        try:
            yield pid, lambda: said.readline().rstrip()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_stopped_process_that_wakes_up_publishes_nothing(out):
    def work(say: Callable[[str], object]) -> None:
        one = Lease(LocalDisk(), out, replace(NODE7, pid=os.getpid()), beat_s=0.005)
        one.wait(False, print)
        one.take("", ())
        one.keep_beating()
        say("taken")
        while life(out, 1).taken_by is None:  # asleep, when it comes to that
            time.sleep(0.01)
        try:
            commit(out, one, 9, attempt=1)
        except StagerunError as error:
            say(f"{type(error).__name__} {error}")
        one.release(0)
        say("released")

    with child(work) as (pid, said):
        assert said() == "taken"
        while life(out, 1).beat < 2:
            time.sleep(0.001)
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        name = commit(out, taken(out))
        os.kill(pid, signal.SIGCONT)
        told = said()
        assert told.startswith("FolderInUseError another run has taken over") and "life 2" in told
        assert said() == "released"
    assert os.listdir(out / "snapshots") == [name] and life(out, 1).code is None


def test_without_locks_a_dead_process_of_this_machine_is_not_waited_for(out):
    with child(lambda say: say(str(this_process().born)) and signal.pause()) as (pid, said):
        born = int(said())
    for dead in (
        replace(HERE, pid=pid, born=born),
        replace(HERE, born=HERE.born - 1),  # the number went to another process since: this one
    ):
        assert not dead.alive()
        taken(out, dead)
        clock = Clock()
        with audited.no_flock(errno.ENOLCK):
            taken(out, locked=False, clock=clock).release(0)
        assert clock.now == 1000
    assert HERE.alive()


def test_a_second_process_is_refused_with_the_holders_name(tmp_path):
    def holds(say: Callable[[str], object]) -> None:
        lock = Lock(tmp_path)
        lock.acquire()
        say(str(lock.held))
        signal.pause()

    assert store.holder(tmp_path) is None and not (tmp_path / "lock").exists()
    before = time.time()
    with child(holds) as (pid, said):
        assert said() == "True"
        with pytest.raises(FolderInUseError) as caught:
            Lock(tmp_path).acquire()
        assert f"process {pid} on {os.uname().nodename}, since 20" in caught.value.message
        assert caught.value.exit_code == ExitCode.IN_USE and "--out" in caught.value.hint
        found = store.holder(tmp_path)
        assert found is not None and found.since is not None and int(before) <= found.since <= time.time()
        assert (found.pid, found.host) == (pid, os.uname().nodename)
    assert store.holder(tmp_path) is None
    with Lock(tmp_path):
        pass


def test_the_lock_dies_with_its_process_though_a_forked_worker_lives_on(tmp_path):
    def holds(say: Callable[[str], object]) -> None:
        with Lock(tmp_path):
            if os.fork() == 0:
                say(str(os.getpid()))
            signal.pause()

    with child(holds) as (_, said):
        worker = int(said())
        with pytest.raises(FolderInUseError):
            Lock(tmp_path).acquire()
    with Lock(tmp_path):
        os.kill(worker, signal.SIGKILL)  # it lived


def test_a_program_started_meanwhile_does_not_hold_it(tmp_path):
    with Lock(tmp_path):
        other = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with Lock(tmp_path):
            pass
    finally:
        other.kill()
        other.wait()
