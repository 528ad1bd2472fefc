"""The store and processes: killed at each call, stopped and gone on, holding a lock, on a disk that is full."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from disks import (
    HookedDisk,
)
from test_store_crash import Operation as Operation
from test_store_crash import all_read as all_read
from test_store_crash import goes_on as goes_on
from test_store_crash import iters as iters
from test_store_crash import operations as operations
from test_store_crash import small_chunks as small_chunks
from test_store_crash import two_snapshots as two_snapshots
from test_store_lease import HERE as HERE
from test_store_lease import Clock as Clock
from test_store_lease import commit as commit
from test_store_lease import life as life
from test_store_lease import no_locks as no_locks
from test_store_lease import out as out
from test_store_lease import taken as taken

from stagerun import store
from stagerun.base.errors import ExitCode, FolderInUseError, PermissionDenied
from stagerun.store import LocalDisk, Lock

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@operations
def test_a_process_killed_at_every_call(
    operate: Operation, afterwards: list[int], two_snapshots: Path, tmp_path: Path
) -> None:
    for at in count(1):
        out = tmp_path / str(at)
        shutil.copytree(two_snapshots, out)

        def kill(call: int, name: str, at: int = at) -> None:
            if call == at:
                os.kill(os.getpid(), signal.SIGKILL)

        child = os.fork()
        if child == 0:
            with store.Lock(out):
                operate(HookedDisk(LocalDisk(), kill), out)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = iters(all_read(LocalDisk(), out))
        assert found in ([100, 200], afterwards)
        with store.Lock(out):
            goes_on(LocalDisk(), out)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert found == afterwards
            return
        assert os.WTERMSIG(status) == signal.SIGKILL


HOLDER = """
import sys
from pathlib import Path
from stagerun import store
from stagerun.store.lease import Lease
from stagerun.system.process import Identity
out = Path(sys.argv[1])
one = Lease(store.LocalDisk(), out, store.LocalDisk(), Identity("node7", "boot", "pid:[1]", 12, 34), beat_s=0.005)
one.wait(False, print)
attempt = one.take("", ())
one.keep_beating()
print(attempt, flush=True)
sys.stdin.readline()
try:
    about = store.Metadata(place=store.Place("cyc1", 9, attempt), parent="", identity={}, environment={})
    store.commit(
        store.LocalDisk(), out, about, files={"w": b"w"}, content=("w",), require_held=one.require_held
    )
except Exception as error:
    print(type(error).__name__, error)
one.release(0)
"""


def test_a_stopped_process_that_wakes_up_publishes_nothing(out: Path) -> None:
    path = str(Path(store.__file__).parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == "1\n"
    while life(out, 1).beat < 2:
        assert child.poll() is None
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    second = taken(out)
    name = commit(out, second)
    os.kill(child.pid, signal.SIGCONT)
    said, _ = child.communicate("go\n", timeout=60)
    assert said.startswith("FolderInUseError another run has taken over") and "life 2" in said
    assert os.listdir(out / "snapshots") == [name]
    assert life(out, 1).code is None


def test_without_locks_a_dead_process_of_this_machine_is_not_waited_for(out: Path, no_locks: None) -> None:
    script = "from stagerun.system.process import this_process; print(this_process().born)"
    path = str(Path(store.__file__).parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    born = int(child.communicate(timeout=60)[0])
    for dead in (
        replace(HERE, pid=child.pid, born=born),
        replace(HERE, born=HERE.born - 1),  # the number went to another process since: this one
    ):
        assert not dead.alive()
        taken(out, dead)
        clock = Clock()
        taken(out, locked=False, clock=clock).release(0)
        assert clock.now == 1000
    assert HERE.alive()


LOCK_HOLDER = """
import os, pathlib, signal, sys
from stagerun.store import Lock
lock = Lock(pathlib.Path(sys.argv[1]))
lock.acquire()
if sys.argv[2] != "fork" or os.fork() == 0:
    print(os.getpid(), flush=True)
signal.pause()
"""


def start_holder(out: Path, fork: str = "") -> tuple[subprocess.Popen[str], int]:
    """A process that holds the lock, and the id of the worker it forked."""
    path = str(Path(store.__file__).parents[2])
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCK_HOLDER, str(out), fork],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert holder.stdout is not None
    return holder, int(holder.stdout.readline())


def kill(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.communicate()


def test_a_second_process_is_refused_with_the_holders_name(tmp_path: Path) -> None:
    holder, _ = start_holder(tmp_path)
    try:
        with pytest.raises(FolderInUseError) as caught:
            Lock(tmp_path).acquire()
        assert f"process {holder.pid} on {os.uname().nodename}, since 20" in caught.value.message
        assert caught.value.exit_code == ExitCode.IN_USE
        assert "--out" in caught.value.hint
    finally:
        kill(holder)
    with Lock(tmp_path):
        pass


def test_the_lock_dies_with_its_process_though_a_forked_worker_lives_on(tmp_path: Path) -> None:
    holder, worker = start_holder(tmp_path, "fork")
    with pytest.raises(FolderInUseError):
        Lock(tmp_path).acquire()
    try:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        with Lock(tmp_path):
            os.kill(worker, 0)  # it lives
    finally:
        os.kill(worker, signal.SIGKILL)
        holder.communicate()


def test_a_program_started_meanwhile_does_not_hold_it(tmp_path: Path) -> None:
    with Lock(tmp_path):
        other = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with Lock(tmp_path):
            pass
    finally:
        other.kill()
        other.wait()


def test_the_holder_is_told_to_whoever_asks(tmp_path: Path) -> None:
    assert store.holder(tmp_path) is None and not (tmp_path / "lock").exists()
    before = time.time()
    process, _ = start_holder(tmp_path)
    found = store.holder(tmp_path)
    kill(process)
    assert found is not None and found.since is not None
    assert (found.pid, found.host) == (process.pid, os.uname().nodename)
    assert int(before) <= found.since <= time.time()
    assert store.holder(tmp_path) is None


def test_prepare_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:  # who may do everything
                os.setuid(65534)
            store.prepare(LocalDisk(), tmp_path / "out")
        except PermissionDenied as error:
            os._exit(0 if error.exit_code == ExitCode.PERMISSION and "Permission denied" in error.message else 2)
        except BaseException:
            os._exit(3)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    tmp_path.chmod(0o755)
    assert os.WEXITSTATUS(status) == 0
