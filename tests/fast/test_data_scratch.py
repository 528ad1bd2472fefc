"""scratch: one complete copy per node, whoever asks, whatever is killed, full or damaged; nothing else is touched, and a copy that fails
ends no run."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest
from facade import (
    SIDE_FILE,
    CopyStopped,
    DataError,
    LmdbSource,
    PermissionDenied,
    StagerunError,
    StorageError,
    write_lmdb,
)

from stagerun.data import scratch
from stagerun.data.records import Room, SwitchingRecords
from stagerun.data.scratch import Copy, Progress, look, stage
from stagerun.data.write import held_now

BLOCK = 1 << 16
HOME = f"stagerun-{os.getuid()}"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(scratch, "BLOCK", BLOCK)
    monkeypatch.setattr(scratch, "_STREAMS", 1)


@pytest.fixture
def source(tmp_path):
    return make(tmp_path / "db", 500)


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def make(folder: Path, records: int = 100) -> str:
    write_lmdb(str(folder), [i.to_bytes(4, "little") * 500 for i in range(records)])
    return str(folder)


def one(source: str, disk: Path, **options: object) -> Copy:
    [copy] = stage([look(source)], str(disk), 0, **options)
    return copy


def folders(disk: Path) -> list[str]:
    return sorted(path.name for path in (disk / HOME).iterdir() if path.is_dir())


def data(folder: str) -> bytes:
    return Path(folder, "data.mdb").read_bytes()


def fails_below(monkeypatch: pytest.MonkeyPatch, folder: str, after: int = 0) -> None:
    """Of the files in `folder` so many reads succeed, and then the disk fails."""
    read, reads = os.preadv, [0]

    def preadv(fd: int, buffers: object, at: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(folder):
            reads[0] += 1
            if reads[0] > after:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_copy_is_made_once_and_used_again(source, disk):
    calls: list[Progress] = []
    copy = one(source, disk, watch=calls.append)
    size = Path(source, "data.mdb").stat().st_size
    assert calls[-1] == Progress(size, size) and copy.bytes == size
    assert data(copy.path) == data(source) and len(LmdbSource(copy.path, 500)) == 500
    assert (disk / HOME).stat().st_mode & 0o777 == 0o700
    calls.clear()
    again = one(source, disk, watch=calls.append)
    assert (again.path, again.bytes, calls) == (copy.path, 0, [])
    assert folders(disk) == [Path(copy.path).name]


def test_a_changed_source_gets_a_copy_of_its_own(source, disk):
    first = one(source, disk)
    os.utime(Path(source, "data.mdb"), ns=(1, 1))
    assert {first.path, one(source, disk).path} == {str(disk / HOME / name) for name in folders(disk)}
    assert len(folders(disk)) == 2


def test_the_side_file_follows_the_sources(source, disk):
    copy = one(source, disk)
    for content in (b"first", b"second"):
        Path(source, SIDE_FILE).write_bytes(content)
        assert one(source, disk).bytes == 0 and Path(copy.path, SIDE_FILE).read_bytes() == content
    Path(source, SIDE_FILE).unlink()
    assert one(source, disk).bytes == 0 and not Path(copy.path, SIDE_FILE).exists()


def test_what_a_killed_copy_left_is_not_believed(source, disk):
    done = [0]

    def watch(progress: Progress) -> None:
        done[0] = progress.done

    with pytest.raises(CopyStopped):
        one(source, disk, watch=watch, stop=lambda: done[0] >= 4 * BLOCK)
    partial = disk / HOME / f"{look(source).name}.partial"
    flip(partial / "data.mdb", 100)
    with (partial / "blocks").open("a") as journal:
        journal.write(f"8 {'0' * 64}\n99999 {'0' * 64}\nnonsense\n\xe9 ".encode().decode("latin-1") + "7 abc")
    assert data(one(source, disk).path) == data(source)


@pytest.mark.parametrize("damage", ["cut off", "deleted", "manifest", "suspect"])
def test_a_copy_that_is_seen_to_be_damaged_is_mended_before_it_is_used(source, disk, damage):
    copy = one(source, disk)
    file = Path(copy.path, "data.mdb")
    if damage == "cut off":
        os.truncate(file, 5 * BLOCK + 1)
    elif damage == "deleted":
        file.unlink()
    elif damage == "manifest":
        Path(copy.path, "stagerun-copy.json").write_text('{"version": 1, "source": [')
    else:
        flip(file, 9)
        copy.suspect()
    again = one(source, disk)
    size = look(source).size
    assert again.bytes == {"manifest": size, "deleted": size, "cut off": size - 5 * BLOCK, "suspect": BLOCK}[damage]
    assert data(again.path) == data(source) and one(source, disk).bytes == 0


def test_a_disk_that_gives_back_other_bytes_is_named(source, disk, monkeypatch):
    write, bad = os.pwrite, [1]

    def pwrite(fd: int, piece: memoryview, at: int) -> int:
        if at >= BLOCK and bad[0]:
            bad[0] -= 1
            return write(fd, bytes(len(piece)), at)
        return write(fd, piece, at)

    monkeypatch.setattr(scratch.os, "pwrite", pwrite)
    copy = one(source, disk)  # once may have been a bit in memory: it is written again
    assert data(copy.path) == data(source)
    shutil.rmtree(disk / HOME)
    bad[0] = 10**6
    with pytest.raises(StorageError, match="gives back other bytes than were written"):
        one(source, disk)
    assert folders(disk) == []


def with_free(monkeypatch: pytest.MonkeyPatch, disk: Path, free: int) -> None:
    """A disk of which `free` bytes are free while no copy is on it."""

    def free_bytes(home: Path) -> int:
        return free - sum(f.stat().st_blocks * 512 for f in disk.rglob("data.mdb"))

    monkeypatch.setattr(scratch, "free_bytes", free_bytes)


def test_both_sets_must_fit_before_the_first_byte(source, disk, monkeypatch):
    other = make(disk.parent / "other", 400)
    sizes = look(source).size + look(other).size
    with_free(monkeypatch, disk, sizes + 10**6 - 1)
    with pytest.raises(StorageError, match=r"no room for the images: .* needed, .* free; 1.0 MB stay free") as error:
        stage([look(source), look(other)], str(disk), 0.001)
    assert "`scratch`" in error.value.hint and folders(disk) == []
    with_free(monkeypatch, disk, sizes + 10**6)
    assert len(stage([look(source), look(other)], str(disk), 0.001)) == 2


@pytest.mark.parametrize(
    ("where", "call", "number"),
    [(os, "pwrite", errno.ENOSPC), (os, "pwrite", errno.EIO), (fcntl, "flock", errno.ENOLCK)],
)
def test_a_disk_that_is_full_or_fails_or_has_no_locks_leaves_no_copy(source, disk, monkeypatch, where, call, number):
    def fail(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(where, call, fail)
    with pytest.raises(StorageError, match=os.strerror(number)) as error:
        one(source, disk)
    assert folders(disk) == []
    assert ("a disk of the node itself" if call == "flock" else "scratch") in error.value.hint


def test_a_source_that_fails_half_way_keeps_what_is_there(source, disk, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(DataError, match=r"data.mdb: can't be read: Input/output error"):
        fails_below(patch, source, after=4)
        one(source, disk)
    assert one(source, disk).bytes == look(source).size - 4 * BLOCK


def test_a_source_that_changes_meanwhile_is_refused(source, disk):
    with pytest.raises(DataError, match="the LMDB was changed while it was copied"):
        one(source, disk, watch=lambda progress: os.utime(Path(source, "data.mdb"), ns=(1, 1)))
    assert folders(disk) == []
    before = look(source)
    os.utime(Path(source, "data.mdb"), ns=(2, 2))
    with pytest.raises(DataError, match="the LMDB was changed"):
        stage([before], str(disk), 0)


def test_scratch_must_exist_and_be_ours(source, tmp_path):
    with pytest.raises(StorageError, match="no such folder"):
        one(source, tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(StagerunError):
        one(source, tmp_path / "file")
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir()
    elsewhere.mkdir()
    (shared / HOME).symlink_to(elsewhere)
    with pytest.raises(PermissionDenied, match="belongs to another user, or is not a folder"):
        one(source, shared)
    (shared / HOME).unlink()
    (shared / HOME).mkdir()
    for mode in (0o777, 0o775):
        (shared / HOME).chmod(mode)
        with pytest.raises(PermissionDenied, match=f"others may write to it \\(mode {mode:04o}\\)") as error:
            one(source, shared)
        assert "chmod 700" in error.value.hint
    (shared / HOME).chmod(0o755)
    (shared / HOME / look(source).name).symlink_to(elsewhere)
    (elsewhere / "data.mdb").write_text("keep")
    with pytest.raises(StorageError, match="symbolic link"):
        one(source, shared)
    assert (elsewhere / "data.mdb").read_text() == "keep"


def test_a_lock_whose_file_was_removed_is_not_taken_for_held(tmp_path):
    path = tmp_path / "lock"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with held_now(path) as held:
        assert not held
    path.unlink()
    with held_now(path) as held:
        assert held and path.exists()
    os.close(fd)


@pytest.mark.parametrize("how", ["cut off", "fails"])
def test_a_copy_that_fails_is_left_for_the_original(source, disk, monkeypatch, how):
    copy = one(source, disk)
    records = SwitchingRecords(look(source), 500, copy)
    with monkeypatch.context() as patch:
        if how == "cut off":
            os.truncate(Path(copy.path, "data.mdb"), 1 << 13)
        else:
            fails_below(patch, copy.path)
        assert all(bytes(records.read(i, Room())) == i.to_bytes(4, "little") * 500 for i in range(500))
    [trouble] = records.trouble
    assert "the copy in scratch can't be read" in trouble and copy.path in trouble
    assert trouble.endswith(f"{source} is read from now on")
    again = one(source, disk)  # it is read whole before anybody believes it again
    assert (again.bytes > 0) == (how == "cut off")


@pytest.mark.parametrize("what, text", [("gone", "no such folder"), ("changed", "was changed since it was copied")])
def test_where_the_original_is_gone_too_both_are_named(source, disk, what, text):
    copy = one(source, disk)
    records = SwitchingRecords(look(source), 500, copy)
    os.truncate(Path(copy.path, "data.mdb"), 1 << 13)
    if what == "gone":
        Path(source).rename(source + ".away")
    else:
        os.utime(Path(source, "data.mdb"), ns=(1, 1))
    with pytest.raises(StorageError, match=text) as error:
        records.get(200)
    assert copy.path in error.value.message and "the same command resumes" in error.value.hint
