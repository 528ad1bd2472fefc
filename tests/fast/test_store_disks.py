"""Disks: the one of the machine and the one in memory do the same."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import ModelDisk

from stagerun.store import Disk, LocalDisk


@pytest.fixture(params=["local", "model"])
def disk_and_root(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, Path]:
    if request.param == "local":
        return LocalDisk(), tmp_path
    return ModelDisk(), Path("/")


def write(disk: Disk, path: Path, data: bytes) -> None:
    file = disk.create(path)
    file.write(memoryview(data))
    file.sync()
    file.close()


def test_what_is_written_is_read(disk_and_root: tuple[Disk, Path]) -> None:
    disk, root = disk_and_root
    disk.mkdir(root / "a")
    write(disk, root / "a" / "f", b"12345")
    disk.sync_folder(root / "a")
    disk.rename(root / "a", root / "b")
    assert disk.names(root) == ["b"]
    assert disk.read(root / "b" / "f", 5) == b"12345"
    assert disk.size(root / "b" / "f") == 5
    assert disk.free(root) > 0
    disk.link(root / "b" / "f", root / "b" / "g")
    assert disk.read(root / "b" / "g", 5) == b"12345"
    disk.unlink(root / "b" / "f")
    assert disk.names(root / "b") == ["g"]
    disk.unlink(root / "b" / "g")
    disk.rmdir(root / "b")
    assert disk.names(root) == []


def test_errors_are_those_of_the_system(disk_and_root: tuple[Disk, Path]) -> None:
    disk, root = disk_and_root
    disk.mkdir(root / "d")
    disk.mkdir(root / "full")
    write(disk, root / "full" / "f", b"12")
    wrong: list[tuple[int, Callable[[], object]]] = [
        (errno.EEXIST, lambda: disk.mkdir(root / "d")),
        (errno.EEXIST, lambda: disk.create(root / "d")),
        (errno.EEXIST, lambda: disk.link(root / "full" / "f", root / "d")),
        (errno.ENOENT, lambda: disk.link(root / "none", root / "new")),
        (errno.ENOENT, lambda: disk.mkdir(root / "none" / "d")),
        (errno.ENOENT, lambda: disk.read(root / "none" / "f", 1)),
        (errno.ENOENT, lambda: disk.names(root / "none")),
        (errno.ENOENT, lambda: disk.rename(root / "none", root / "new")),
        (errno.ENOENT, lambda: disk.unlink(root / "none")),
        (errno.ENOTDIR, lambda: disk.names(root / "full" / "f")),
        (errno.ENOTEMPTY, lambda: disk.rename(root / "d", root / "full")),
        (errno.ENOTEMPTY, lambda: disk.rmdir(root / "full")),
        (errno.EISDIR, lambda: disk.unlink(root / "d")),
        (errno.EINVAL, lambda: disk.size(root / "d")),
        (errno.EINVAL, lambda: disk.read(root / "d", 1)),
        (errno.EFBIG, lambda: disk.read(root / "full" / "f", 1)),
        (errno.EINVAL, lambda: disk.digest(root / "d", 1)),
        (errno.EFBIG, lambda: disk.digest(root / "full" / "f", 1)),
    ]
    for code, call in wrong:
        with pytest.raises(OSError) as caught:
            call()
        assert errno.errorcode[caught.value.errno] == errno.errorcode[code]


def test_a_power_cut_takes_what_was_not_synced() -> None:
    disk, a = ModelDisk(), Path("/a")
    disk.mkdir(a)
    disk.sync_folder(Path("/"))
    write(disk, a / "synced", b"12")
    disk.sync_folder(a)
    disk.create(a / "unsynced").write(memoryview(b"34"))
    disk.rename(a / "synced", a / "renamed")
    assert disk.after_power_cut(lambda f: 0, "kept").names(a) == ["synced"]
    assert disk.after_power_cut(lambda f: 1, "half").read(a / "unsynced", 9) == b"3"
    assert disk.after_power_cut(lambda f: 1, "lost").read(a / "unsynced", 9) == b""
    assert disk.after_power_cut(lambda f: 9, "lost").read(a / "renamed", 9) == b"12"
