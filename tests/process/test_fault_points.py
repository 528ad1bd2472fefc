"""STAGERUN_FAULT: what it says, what it does to the disk of a run, and what the run says of it."""

import errno
import os
import signal
from pathlib import Path

import pytest
import small
import tiny
from disks import HookedDisk

from stagerun import store
from stagerun.base.errors import StorageError, UsageError
from stagerun.store.faults import ERRORS, Fault, FaultyDisk, planned_fault


@pytest.mark.parametrize("said", ["kill@17", "ENOSPC@1", "EIO@17+", "EROFS@2+"])
def test_a_fault_is_read_as_it_is_printed(said: str) -> None:
    assert str(planned_fault({"STAGERUN_FAULT": said})) == said


def test_without_it_the_disk_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned_fault({}) is planned_fault({"STAGERUN_FAULT": ""}) is None
    monkeypatch.delenv("STAGERUN_FAULT", raising=False)
    assert type(store.disk_of_run()) is store.LocalDisk


@pytest.mark.parametrize(
    "said, hint",
    [
        ("kill", "kill@17"),
        ("kill@0", "kill@17"),
        ("kill@-1", "kill@17"),
        ("kill@1e3", "kill@17"),
        ("kill@\N{ARABIC-INDIC DIGIT THREE}", "kill@17"),
        ("ENOSP@3", "`ENOSPC`"),
        ("Kill@3", "`kill`"),
        ("kill@3+", "kill@3"),
        ("nonsense@3", "known are kill, ENOSPC"),
    ],
)
def test_mistakes(said: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned_fault({"STAGERUN_FAULT": said})
    assert f"STAGERUN_FAULT={said}" in caught.value.message
    assert hint in caught.value.hint


def commit(disk: store.Disk, out: Path, iter: int) -> None:
    files = {"model": b"m" * 1000}
    store.commit(
        disk,
        out,
        store.Metadata(place=store.Place("a", iter, 1), parent="", identity={}, environment={}),
        files=files,
        content=["model"],
    )


def test_the_call_that_is_named_fails_and_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store.prepare(store.LocalDisk(), tmp_path)
    calls = HookedDisk(store.LocalDisk())
    commit(calls, tmp_path, 1)
    for n, name in enumerate(calls.calls, 1):
        disk = FaultyDisk(store.LocalDisk(), Fault("ENOSPC", n))
        raised = None
        try:
            commit(disk, tmp_path, n + 1)
        except StorageError as error:
            raised = error
        assert disk.missed() == ""
        assert capfd.readouterr().err == f"STAGERUN_FAULT: ENOSPC at call {n} of the disk, {name}\n"
        assert raised is not None and "No space left on device" in raised.message
        assert not [entry for entry in os.listdir(tmp_path / "snapshots") if entry.startswith(".tmp-")]
    disk = FaultyDisk(store.LocalDisk(), Fault("ENOSPC", n + 1))
    commit(disk, tmp_path, n + 2)
    assert f"the disk was called {n} times" in disk.missed()


@pytest.mark.parametrize("name", ERRORS)
def test_from_a_call_on(name: str, tmp_path: Path) -> None:
    """What a full disk still does, it does: without that nothing could be cleared away."""
    disk = FaultyDisk(store.LocalDisk(), Fault(name, 2, on=True))
    file = disk.create(tmp_path / "old")
    for failing in (lambda: disk.mkdir(tmp_path / "new"), lambda: file.write(memoryview(b"1234"))):
        with pytest.raises(OSError) as caught:
            failing()
        assert caught.value.errno == getattr(errno, name)
    assert (tmp_path / "old").read_bytes() == b"12", "a torn write"
    reads = name not in ("EIO", "ESTALE")
    for still, allowed in (
        (lambda: disk.names(tmp_path), reads),
        (lambda: disk.unlink(tmp_path / "old"), name in ("ENOSPC", "EDQUOT")),
    ):
        try:
            still()
            assert allowed
        except OSError:
            assert not allowed


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_kill_ends_the_process_in_the_call(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        FaultyDisk(store.LocalDisk(), Fault("kill", 1)).mkdir(tmp_path / "a")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not (tmp_path / "a").exists()


def test_a_run_says_what_is_to_come(tmp_path: Path) -> None:
    tiny.make_data(tmp_path / "data")
    schedule = small.make_schedule(tmp_path / "schedule", tmp_path / "data")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    wrong = small.run(schedule, tmp_path / "out", env={**env, "STAGERUN_FAULT": "ENOSPC"})
    assert wrong.returncode == 64 and "STAGERUN_FAULT=ENOSPC is not a fault" in wrong.stderr
    assert not (tmp_path / "out").exists()
    full = small.run(schedule, tmp_path / "out", env={**env, "STAGERUN_FAULT": "ENOSPC@40+"})
    assert full.returncode == 74
    assert "warning: STAGERUN_FAULT=ENOSPC@40+: the disk fails at call 40 of the disk, on purpose" in full.stdout
    assert "No space left on device" in full.stderr and "hint: free some space" in full.stderr
