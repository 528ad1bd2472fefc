"""One run per output folder; one command at a time in a folder that is thrown away; and a folder that can be written."""

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import audited
import pytest
from facade import FolderInUseError, StorageError

from stagerun import store
from stagerun.store import LocalDisk, Lock


def test_released_it_is_free_and_the_file_stays(tmp_path):
    lock = Lock(tmp_path)
    for _ in range(3):
        lock.acquire()
        with pytest.raises(FolderInUseError):
            Lock(tmp_path).acquire()
        lock.release()
        lock.release()
    assert (tmp_path / "lock").exists()


def test_a_holder_without_a_readable_name(tmp_path):
    feb31 = "process 7 on h, since 2026-02-31 10:00:00 +0000"
    with Lock(tmp_path):
        for written, shown in ((b"", ""), (b"\x1b[31mprocess x", "[31mprocess x"), (feb31.encode(), feb31)):
            (tmp_path / "lock").write_bytes(written)
            assert store.holder(tmp_path) == store.Holder(shown)


@contextmanager
def looking(out: Path) -> Iterator[int]:
    """Somebody else has the lock of `out`, whose file names a run that was killed."""
    (out / "lock").write_text("the killed one")
    with open(out / "lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield file.fileno()


@pytest.mark.parametrize("then", ["free", "named"])
def test_while_it_tries_again_the_lock_may_come_free_or_get_the_name_of_its_holder(tmp_path, then):
    """Who only looks has the lock for a moment itself; a run that was killed has left its name, and the next one takes the lock."""
    for _ in range(9):  # a busy machine may come too late
        with looking(tmp_path) as fd:
            do = {"free": (fcntl.flock, (fd, fcntl.LOCK_UN)), "named": ((tmp_path / "lock").write_text, ("the next",))}
            timer = threading.Timer(0.01, *do[then])
            timer.start()
            try:
                with Lock(tmp_path):
                    assert then == "free"
                    return
            except FolderInUseError as error:
                timer.join()
                if then == "named" and "the next" in error.message:
                    return
    pytest.fail("it gives up at once")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_nothing_is_held_on_a_file_system_without_locks(tmp_path, code):
    with audited.no_flock(code), Lock(tmp_path) as lock:
        assert not lock.held


@pytest.mark.parametrize("folder, lock", [(0o755, 0o600), (0o777, 0o660), (0o2775, 0o660), (0o700, 0o600)])
@pytest.mark.parametrize("before", [None, 0o644, 0o666])
def test_who_may_not_write_to_the_folder_cannot_hold_its_lock(tmp_path, folder, lock, before):
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


def test_a_link_in_place_of_the_lock_file_is_not_followed(tmp_path):
    (tmp_path / "precious").write_bytes(b"x")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError):
        Lock(tmp_path).acquire()
    assert (tmp_path / "precious").read_bytes() == b"x"


def test_prepare_where_a_file_is(tmp_path):
    (tmp_path / "out").write_bytes(b"")
    with pytest.raises(StorageError, match="Not a directory") as caught:
        store.prepare(LocalDisk(), tmp_path / "out")
    assert "--out" in caught.value.hint
