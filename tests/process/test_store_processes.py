"""The store and processes: killed at each call, stopped and gone on, holding a lock, on a disk that is full."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
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
from stagerun.system.process import living, look
from stagerun.train.status import _holder as status_holder

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


def test_a_full_disk(tmp_path: Path) -> None:
    """A real one, of 2 MB, in a mount namespace of its own; needs the right to mount."""
    script = textwrap.dedent(f"""
        import pathlib
        from stagerun import store
        from stagerun.base.errors import StorageError
        disk, out = store.LocalDisk(), pathlib.Path({str(tmp_path)!r}) / "out"
        store.prepare(disk, out)
        def commit(iter, size):
            about = store.Metadata(place=store.Place("s", iter, 1), parent="", identity={{}}, environment={{}})
            return store.commit(disk, out, about, files={{"model": bytes(size)}}, content=["model"])
        first = commit(1, 900_000)
        for _ in range(3):
            try:
                commit(2, 1_500_000)
            except StorageError as error:
                print(error.render())
        assert disk.names(out / "snapshots") == [first.name]
        store.read(disk, out, first)
        commit(3, 900_000)
    """)
    mount = f"mount -t tmpfs -o size=2m tmpfs {tmp_path}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("no right to mount a file system here")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(store.__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("write model of snapshot s-00000002-a0001") == 3
    assert "No space left on device (1.5 MB needed, 1." in done.stdout
    assert "hint: free some space" in done.stdout


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


def test_a_holder_without_a_name_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    process, _ = start_holder(tmp_path)
    kill(process)
    assert f"process {process.pid} on" in (tmp_path / "lock").read_text()
    with open(tmp_path / "lock", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        found = store.holder(tmp_path)
        assert found is not None and found.text == "" and found.pid is None
        with pytest.raises(FolderInUseError) as caught:
            Lock(tmp_path).acquire()
        assert re.fullmatch(
            rf"another run holds \S+: no name yet \(the last one, process {process.pid} on .*, has ended\)",
            caught.value.message,
        )


def as_nobody(work: Callable[[], object]) -> str:
    """What `work` gives, or the error that it raises, in a child process of a user who owns nothing."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        return stream.read()


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_another_user_learns_from_the_lives_who_holds_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o777)  # one that everybody reaches
        out = Path(base)
        lock, lease = Lock(out), store.Lease(LocalDisk(), out, LocalDisk())
        with lock:
            assert as_nobody(Lock(out).acquire).startswith("PermissionDenied: can't lock the output folder")
            lease.wait(True, print)
            lease.take("", [])
            me = f"process {os.getpid()} on {os.uname().nodename}, since 20"
            said = as_nobody(Lock(out).acquire)
            assert said.startswith(f"FolderInUseError: another run holds {out}: {me}")
            assert me in as_nobody(lambda: status_holder(out)[0])
            lease.release(75)
        said = as_nobody(Lock(out).acquire)
        assert said.startswith("PermissionDenied: ") and me in said and "has ended with exit code 75" in said
        assert as_nobody(lambda: status_holder(out)) == "(None, None)"


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


def test_a_zombie_lives_as_long_as_one_of_its_threads() -> None:
    """As after SIGKILL, when the first thread has ended and another one still writes to a disk."""
    script = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(300,)).start(); "
    script += "ctypes.CDLL(None).pthread_exit(None)"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        end = time.monotonic() + 60
        while (found := look(process.pid)) is None or found.state != "Z":
            assert time.monotonic() < end
            time.sleep(0.01)
        assert living(process.pid) is not None
        process.kill()
        while living(process.pid) is not None:
            assert time.monotonic() < end
            time.sleep(0.01)
