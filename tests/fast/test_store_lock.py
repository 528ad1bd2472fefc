"""One run per output folder, and a folder that can be written."""

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from stagerun import store
from stagerun.base.errors import FolderInUseError, StorageError
from stagerun.store import LocalDisk, Lock


def test_released_it_is_free_and_the_file_stays(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    for _ in range(3):
        lock.acquire()
        with pytest.raises(FolderInUseError):
            Lock(tmp_path).acquire()
        lock.release()
        lock.release()
    assert (tmp_path / "lock").exists()


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


def test_prepare_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"")
    with pytest.raises(StorageError, match="Not a directory") as caught:
        store.prepare(LocalDisk(), tmp_path / "out")
    assert "--out" in caught.value.hint
