"""scratch: one complete copy per node, whoever asks and whatever is killed."""

import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from stagerun.data import scratch
from stagerun.data.lmdb_source import LmdbSource
from stagerun.data.scratch import stage_in
from stagerun.data.write import write_lmdb
from stagerun.errors import DataError, PermissionDenied, StagerunError, StorageError


@pytest.fixture
def source(tmp_path: Path) -> str:
    write_lmdb(str(tmp_path / "db"), [bytes(10_000) for _ in range(500)])
    return str(tmp_path / "db")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def copies(disk: Path) -> list[str]:
    home = disk / f"stagerun-{os.getuid()}"
    return sorted(path.name for path in home.iterdir() if path.is_dir())


def test_a_copy_is_made_once_and_used_again(source: str, disk: Path) -> None:
    calls: list[tuple[int, int]] = []
    copy = stage_in(source, str(disk), lambda done, total: calls.append((done, total)))
    size = Path(source, "data.mdb").stat().st_size
    assert calls[-1] == (size, size)
    assert Path(copy, "data.mdb").read_bytes() == Path(source, "data.mdb").read_bytes()
    assert len(LmdbSource(copy, 500)) == 500
    calls.clear()
    assert stage_in(source, str(disk), lambda done, total: calls.append((done, total))) == copy
    assert not calls and copies(disk) == [Path(copy).name]
    assert (disk / f"stagerun-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_a_changed_source_gets_a_copy_of_its_own(source: str, disk: Path) -> None:
    first = stage_in(source, str(disk))
    os.utime(Path(source, "data.mdb"), ns=(1, 1))
    second = stage_in(source, str(disk))
    assert first != second and len(copies(disk)) == 2


def test_a_copy_of_the_wrong_size_is_made_again(source: str, disk: Path) -> None:
    copy = stage_in(source, str(disk))
    os.truncate(Path(copy, "data.mdb"), 4096)
    assert stage_in(source, str(disk)) == copy
    assert len(LmdbSource(copy, 500)) == 500


def test_many_processes_at_once_make_one_copy(source: str, disk: Path) -> None:
    program = (
        "import sys\n"
        "from stagerun.data.scratch import stage_in\n"
        "made = []\n"
        "path = stage_in(sys.argv[1], sys.argv[2], lambda done, total: made.append(done))\n"
        "print(path, bool(made))\n"
    )
    command = [sys.executable, "-c", program, source, str(disk)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    lines = [process.communicate(timeout=60)[0].split() for process in running]
    assert len({path for path, _ in lines}) == 1
    assert sorted(copied for _, copied in lines) == ["False"] * 4 + ["True"]
    assert len(copies(disk)) == 1


def test_a_killed_copy_is_swept_and_made_again(source: str, disk: Path) -> None:
    program = (
        "import sys, time\n"
        "from stagerun.data import scratch\n"
        "scratch._CHUNK = 1 << 20\n"
        "def progress(done, total):\n"
        "    print(done, flush=True)\n"
        "    time.sleep(60)\n"
        "scratch.stage_in(sys.argv[1], sys.argv[2], progress)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, source, str(disk)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [".partial-" in name for name in copies(disk)] == [True]
        # A copy that is being made belongs to a living process and is left alone by other sources' runs.
        write_lmdb(source + "2", [b"x"])
        stage_in(source + "2", str(disk))
        assert sum(".partial-" in name for name in copies(disk)) == 1
        process.send_signal(signal.SIGKILL)
    os.utime(Path(source + "2", "data.mdb"), ns=(1, 1))
    stage_in(source + "2", str(disk))
    assert not any(".partial-" in name for name in copies(disk))
    assert len(LmdbSource(stage_in(source, str(disk)), 500)) == 500


def test_no_room_is_said_before_anything_is_written(source: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with pytest.raises(StorageError, match=r"0\.0 GB free") as error:
        stage_in(source, str(disk))
    assert "scratch" in error.value.hint and copies(disk) == []


def test_a_failing_disk_leaves_no_copy(source: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scratch.os, "fsync", fail)
    with pytest.raises(StorageError, match="No space left"):
        stage_in(source, str(disk))
    assert copies(disk) == []


def test_a_source_that_is_not_whole_is_not_copied(source: str, disk: Path) -> None:
    os.truncate(Path(source, "data.mdb"), 1 << 20)
    with pytest.raises(DataError, match="is cut off"):
        stage_in(source, str(disk))


def test_scratch_must_exist_and_be_ours(source: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such folder"):
        stage_in(source, str(tmp_path / "nowhere"))
    shared = tmp_path / "shared"
    shared.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (shared / f"stagerun-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(PermissionDenied, match="belongs to another user, or is no folder"):
        stage_in(source, str(shared))


def test_waiting_for_another_copy_ends_when_it_is_killed(source: str, disk: Path) -> None:
    home = disk / f"stagerun-{os.getuid()}"
    home.mkdir(mode=0o700)
    lock = home / f"{scratch._fingerprint(Path(source, 'data.mdb'))}.lock"
    program = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        command = f"from stagerun.data.scratch import stage_in; stage_in({source!r}, {str(disk)!r})"
        with subprocess.Popen([sys.executable, "-c", command]) as waiting:
            time.sleep(0.5)
            assert waiting.poll() is None
            process.kill()
            assert waiting.wait(30) == 0
    assert len(copies(disk)) == 1


def test_errors_are_stageruns_own(source: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StagerunError):
        stage_in(source, str(tmp_path / "file"))
