"""LMDBs: written whole or not at all, read in key order, and never opened when something is missing."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import contract
import lmdb
import numpy as np
import pytest
from facade import DataError, LmdbSource, StorageError, write_lmdb
from made_images import raw

VALUES = [bytes([i % 251]) * (100 + i) for i in range(300)]
RECORDS = [raw(np.full((5, 7 + i, 1), i % 251, np.uint8), i % 9) for i in range(300)]


@pytest.fixture
def made(tmp_path):
    write_lmdb(str(tmp_path / "db"), VALUES)
    return str(tmp_path / "db")


def test_what_is_written_is_read(made):
    source = LmdbSource(made, 300)
    assert len(source) == 300
    assert [source.get(i) for i in range(300)] == [(b"%08d" % i, value) for i, value in enumerate(VALUES)]
    with pytest.raises(IndexError):
        source.get(300)


def test_records_come_in_byte_order_of_their_keys_whoever_wrote_them(tmp_path):
    keys = [b"00000001_b.jpg", b"00000000_z.jpg", b"00000001_a.jpg", "00000002_ü".encode()]
    with lmdb.open(str(tmp_path)) as env, env.begin(write=True) as txn:
        for key in keys:
            txn.put(key, key[::-1])
    source = LmdbSource(str(tmp_path))
    assert [source.get(i) for i in range(4)] == [(key, key[::-1]) for key in sorted(keys)]


def test_the_map_grows_as_needed(tmp_path):
    """It begins with 64 MiB."""
    assert write_lmdb(str(tmp_path / "db"), (bytes(5 << 20) for _ in range(15))) == 15
    assert len(LmdbSource(str(tmp_path / "db"), 15)) == 15


def not_at(path: Path, content: bytes | None = None) -> str:
    path.mkdir()
    if content is not None:
        (path / "data.mdb").write_bytes(content)
    return str(path)


def test_what_is_no_lmdb_or_another_one_is_said(tmp_path, made):
    with lmdb.open(str(tmp_path / "none")) as env:
        env.sync()
    long = str(tmp_path / "long")
    shutil.copytree(made, long)
    with lmdb.open(long) as env, env.begin(write=True) as txn:
        txn.put(b"99999999", bytes(50_000))
    assert len(LmdbSource(long)) == 301  # by the newer meta page
    os.truncate(Path(long, "data.mdb"), Path(long, "data.mdb").stat().st_size - 4096)
    broken = (b"", b"not an LMDB", bytes(100_000), os.urandom(100_000))
    for path, images, words in (
        (str(tmp_path / "nowhere"), None, "no such folder"),
        (not_at(tmp_path / "empty"), None, "no data.mdb"),
        (f"{made}/data.mdb", None, "the folder that holds data.mdb"),
        *((not_at(tmp_path / str(i), content), None, "not an LMDB") for i, content in enumerate(broken)),
        (str(tmp_path / "none"), None, "is empty"),
        (made, 299, "holds 300 records, but the schedule says images: 299"),
        (long, None, "is cut off"),
    ):
        with pytest.raises(DataError) as error:
            LmdbSource(path, images)
        assert path in error.value.message and error.value.hint and words in error.value.render()


def test_a_cut_off_lmdb_is_an_error_not_a_bus_error(made):
    file = Path(made, "data.mdb")
    whole = file.read_bytes()
    for length in (len(whole) - 1, len(whole) - 4096, len(whole) // 2, 8193, 8192, 4096):
        file.unlink()
        file.write_bytes(whole[:length])
        with pytest.raises(DataError, match="is cut off" if length > 4096 else None):
            source = LmdbSource(made)
            [source.get(i) for i in range(len(source))]


def test_an_error_half_way_leaves_no_lmdb(tmp_path):
    def broken() -> Iterator[bytes]:
        yield from VALUES
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_lmdb(str(tmp_path / "db"), broken())
    assert [path.name for path in tmp_path.iterdir()] == ["db.partial"]
    assert write_lmdb(str(tmp_path / "db"), VALUES) == 300
    assert [path.name for path in tmp_path.iterdir()] == ["db"]


def test_an_existing_folder_is_left_alone(tmp_path, made):
    with pytest.raises(DataError, match="exists already"):
        write_lmdb(made, [b"x"])
    assert len(LmdbSource(made)) == 300
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match="link: exists already"):
        write_lmdb(str(tmp_path / "link"), (pytest.fail("it has begun") for _ in range(1)))


def test_the_side_file_says_where_records_are_and_a_stale_one_is_refused(made):
    shutil.rmtree(made)
    write_lmdb(made, RECORDS)
    assert contract.stagerun(["data", "verify", "--index", made], Path(made).parent).exit_code == 0
    source = LmdbSource(made)
    assert source.index is not None
    assert [source.get(i) for i in range(300)] == [(b"%08d" % i, value) for i, value in enumerate(RECORDS)]
    with lmdb.open(made) as env, env.begin(write=True) as txn:
        txn.put(b"99999999", b"one more")
    with pytest.raises(DataError) as error:
        LmdbSource(made)
    assert "stagerun data verify --index" in error.value.hint


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error_with_the_key(made):
    source, file = LmdbSource(made), Path(made, "data.mdb")
    stamp = file.stat()
    os.truncate(file, 3 * 4096)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # a server that tells no new time
    with pytest.raises(DataError, match="record `00000299`: the file ends before it"):
        source.get(299)


def test_an_lmdb_that_is_written_to_while_it_is_read_is_an_error(made):
    source = LmdbSource(made)
    os.utime(Path(made, "data.mdb"))
    assert source.get(7)[1] == VALUES[7]  # touched, but not changed
    copy = shutil.copytree(made, f"{made}2")
    removed = LmdbSource(copy)
    Path(copy, "data.mdb").unlink()
    assert removed.get(250)[1] == VALUES[250]
    with lmdb.open(made) as env, env.begin(write=True) as txn:
        txn.delete(b"00000003")
    with pytest.raises(DataError, match="was changed while it was read"):
        source.get(7)


def test_reads_in_parts_are_put_together_and_a_disk_that_fails_is_a_storage_error(made, monkeypatch):
    def parts(fd: int, buffers: list[memoryview], at: int) -> int:
        if whole is None:
            raise OSError(errno.EIO, "Input/output error")
        return whole(fd, [buffers[0][:37]], at)

    source, whole = LmdbSource(made), os.preadv
    monkeypatch.setattr(os, "preadv", parts)
    assert source.get(123)[1] == VALUES[123]
    whole = None
    with pytest.raises(StorageError, match="record `00000007`: can't be read: Input/output error"):
        source.get(7)
