"""One run per output folder, and a folder that can be written."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stagerun import store
from stagerun.cli.status import _holder as status_holder
from stagerun.errors import ExitCode, FolderInUseError, PermissionDenied, StorageError
from stagerun.store import LocalDisk, Lock

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

HOLDER = """
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
        [sys.executable, "-c", HOLDER, str(out), fork],
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


def test_a_worker_that_ends_does_not_take_the_lock_along(tmp_path: Path) -> None:
    with Lock(tmp_path):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(FolderInUseError):
            Lock(tmp_path).acquire()


def test_a_program_started_meanwhile_does_not_hold_it(tmp_path: Path) -> None:
    with Lock(tmp_path):
        other = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with Lock(tmp_path):
            pass
    finally:
        other.kill()
        other.wait()


def test_released_it_is_free_and_the_file_stays(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    for _ in range(3):
        lock.acquire()
        with pytest.raises(FolderInUseError):
            Lock(tmp_path).acquire()
        lock.release()
        lock.release()
    assert (tmp_path / "lock").exists()


def test_a_refused_run_leaves_the_holders_name_alone(tmp_path: Path) -> None:
    with Lock(tmp_path):
        before = (tmp_path / "lock").read_bytes()
        for _ in range(2):
            with pytest.raises(FolderInUseError, match=str(os.getpid())):
                Lock(tmp_path).acquire()
        assert (tmp_path / "lock").read_bytes() == before


def test_control_characters_in_the_lock_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    with Lock(tmp_path):
        (tmp_path / "lock").write_bytes(b"\x1b[31mred\xff\n" * 1000)
        with pytest.raises(FolderInUseError) as caught:
            Lock(tmp_path).acquire()
        assert "\x1b" not in caught.value.message
        assert len(caught.value.message) < 600


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


def test_a_holder_without_a_readable_name(tmp_path: Path) -> None:
    with Lock(tmp_path):
        for written, shown in (
            (b"", ""),
            (b"\x1b[31mprocess x", "[31mprocess x"),
            (b"process 7 on h, since 2026-02-31 10:00:00 +0000", "process 7 on h, since 2026-02-31 10:00:00 +0000"),
        ):
            (tmp_path / "lock").write_bytes(written)
            assert store.holder(tmp_path) == store.Holder(shown)


def test_who_only_looks_does_not_keep_a_run_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment in which `holder` has the lock itself ends while the run waits to try again."""
    with Lock(tmp_path):
        pass
    with open(tmp_path / "lock", "rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(looking, fcntl.LOCK_UN))
        with Lock(tmp_path):
            pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        with pytest.raises(StorageError, match="has no locks") as caught:
            Lock(tmp_path).acquire()
    assert "flock" in caught.value.hint
    with Lock(tmp_path):
        pass


@pytest.mark.parametrize("folder, lock", [(0o755, 0o600), (0o777, 0o660), (0o2775, 0o660), (0o700, 0o600)])
@pytest.mark.parametrize("before", [None, 0o644, 0o666])
def test_who_may_not_write_to_the_folder_cannot_hold_its_lock(
    tmp_path: Path, folder: int, lock: int, before: int | None
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(folder)
    if before is not None:
        (tmp_path / "out" / "lock").touch(before)
    mask = os.umask(0o027)
    try:
        with Lock(tmp_path / "out"):
            assert (tmp_path / "out" / "lock").stat().st_mode & 0o777 == lock
        assert (tmp_path / "out" / "lock").read_bytes() == b"", "the next holder must not be taken for this one"
    finally:
        os.umask(mask)


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


def test_a_link_in_place_of_the_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"x")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError):
        Lock(tmp_path).acquire()
    assert (tmp_path / "precious").read_bytes() == b"x"


# ---- prepare


def test_prepare_makes_the_folders_and_leaves_no_trace(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "out"
    for _ in range(2):
        store.prepare(LocalDisk(), out)
        assert os.listdir(out) == ["snapshots"]
        assert os.listdir(out / "snapshots") == []


def test_prepare_beside_one_that_is_always_faster(tmp_path: Path) -> None:
    """Of two runs that start at once it is the lock that lets one of them in, and the other ends with 73."""

    class Overtaken(LocalDisk):
        def mkdir(self, path: Path) -> None:
            if path.parent.exists():
                path.mkdir()
            super().mkdir(path)

    store.prepare(Overtaken(), tmp_path / "a" / "b" / "out")
    assert os.listdir(tmp_path / "a" / "b" / "out") == ["snapshots"]


def test_prepare_does_not_disturb_a_run(tmp_path: Path) -> None:
    store.prepare(LocalDisk(), tmp_path)
    with Lock(tmp_path):
        store.prepare(LocalDisk(), tmp_path)


def test_prepare_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"")
    with pytest.raises(StorageError, match="Not a directory") as caught:
        store.prepare(LocalDisk(), tmp_path / "out")
    assert "--out" in caught.value.hint


def test_prepare_where_a_link_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "unmounted" / "out")
    with pytest.raises(StorageError, match="No such file"):
        store.prepare(LocalDisk(), tmp_path / "out")


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
