"""Changing over between an LMDB and its copy while it is read: the bytes stay, and a copy that fails ends no run."""

import errno
import os
from pathlib import Path

import pytest
from facade import DataError, StorageError, write_lmdb

from stagerun.data.records import Room, SwitchingRecords
from stagerun.data.scratch import Copy, Original, look, stage

RECORDS = 300
VALUES = [i.to_bytes(4, "little") * 700 for i in range(RECORDS)]


@pytest.fixture
def original(tmp_path: Path) -> Original:
    write_lmdb(str(tmp_path / "db"), VALUES)
    return look(str(tmp_path / "db"))


@pytest.fixture
def copy(original: Original, tmp_path: Path) -> Copy:
    (tmp_path / "scratch").mkdir()
    return stage([original], str(tmp_path / "scratch"), 0)[0]


def test_a_copy_that_fails_is_left_for_the_original(original: Original, copy: Copy) -> None:
    records = SwitchingRecords(original, RECORDS, copy)
    os.truncate(Path(copy.path, "data.mdb"), 1 << 13)
    assert [bytes(records.read(i, Room())) for i in range(RECORDS)] == VALUES
    [trouble] = records.trouble
    assert "the copy in scratch can't be read" in trouble and copy.path in trouble
    assert trouble.endswith(f"{original.path} is read from now on")
    again = stage([original], str(Path(copy.path).parents[1]), 0)[0]
    assert again.bytes, "the next one that wants it doesn't believe it"


def test_a_disk_that_fails_under_a_copy(original: Original, copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    records = SwitchingRecords(original, RECORDS, copy)
    read = os.preadv

    def preadv(fd: int, buffers: object, at: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(copy.path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, at)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "preadv", preadv)
    assert [bytes(records.read(i, Room())) for i in range(RECORDS)] == VALUES
    assert len(records.trouble) == 1 and "can't be read: Input/output error" in records.trouble[0]
    monkeypatch.undo()
    again = stage([original], str(Path(copy.path).parents[1]), 0)[0]
    assert again.bytes == 0, "it is read whole before anybody believes it again"


@pytest.mark.parametrize("what, text", [("gone", "no such folder"), ("changed", "was changed since it was copied")])
def test_where_the_original_is_gone_too_both_are_named(original: Original, copy: Copy, what: str, text: str) -> None:
    records = SwitchingRecords(original, RECORDS, copy)
    os.truncate(Path(copy.path, "data.mdb"), 1 << 13)
    if what == "gone":
        Path(original.path).rename(original.path + ".away")
    else:
        os.utime(Path(original.path, "data.mdb"), ns=(1, 1))
    with pytest.raises(StorageError, match=text) as error:
        records.get(200)
    assert copy.path in error.value.message and "the same command goes on" in error.value.hint


def test_an_original_that_fails_says_so_itself(original: Original) -> None:
    records = SwitchingRecords(original, RECORDS)
    os.truncate(Path(original.path, "data.mdb"), 1 << 13)
    with pytest.raises(DataError, match="cut off while it was read"):
        records.get(200)
