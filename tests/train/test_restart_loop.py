"""A run that is started again and again and gets nowhere is refused the fourth time; and one that another host takes over ends."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import disks
import pytest
import small
import stored_help
import torch
from facade import (
    Context,
    Event,
    ExitCode,
    FolderInUseError,
    Identity,
    Keeper,
    Lineage,
    Progress,
    ResumeRefused,
    Schedule,
    SnapshotFailed,
    SnapshotWritten,
    World,
    run,
)

from stagerun import store
from stagerun.comm import SoloComm
from stagerun.language import load
from stagerun.store import Life

LIMIT = 3  # lives
DISK = store.LocalDisk()
NODE7 = Identity("node7", "another boot", "pid:[1]", 12, 34)


@pytest.fixture
def schedule(base):
    return load(str(base / "schedule"), ())


def live(schedule: Schedule, out: Path, code: int | None, retry: bool = False) -> None:
    """A process life that ends with `code`, or without a word."""
    keeper = Keeper(schedule, out, retry=retry)
    keeper.open()
    keeper.close(code)


def refused(schedule: Schedule, out: Path) -> str:
    """Why the next life is; '' if it isn't, and then it ends well."""
    keeper = Keeper(schedule, out)
    try:
        keeper.open()
    except ResumeRefused as error:
        assert error.exit_code == 78 and "--retry" in error.hint
        assert (f"{out}/log.jsonl" in error.hint) == (out / "log.jsonl").exists()
        return error.message
    finally:
        keeper.close()
    return ""


def test_the_fourth_life_is_refused_and_hears_how_the_others_ended(schedule, tmp_path):
    for code in (None, 69, 70):
        live(schedule, tmp_path, code)
    for _ in range(3):  # it leaves no life itself, or the fifth would go on
        message = refused(schedule, tmp_path)
        assert f"the last 3 runs in {tmp_path} wrote no snapshot and no result" in message
        assert f"life 1 (process {os.getpid()} on" in message and "was killed, or crashed; life 2" in message
        assert "ended with exit code 69; life 3" in message and message.endswith("ended with exit code 70")
    assert len(os.listdir(tmp_path / "lives")) == 3


def test_retry_goes_on_and_what_comes_of_it_counts_again(schedule, tmp_path):
    for _ in range(LIMIT):
        live(schedule, tmp_path, None)
    live(schedule, tmp_path, None, retry=True)
    assert "life 4" in refused(schedule, tmp_path)
    live(schedule, tmp_path, 0, retry=True)
    assert not refused(schedule, tmp_path)


@pytest.mark.parametrize(
    "code", sorted({*ExitCode} - {ExitCode.PEER, ExitCode.BUG, ExitCode.STORAGE, ExitCode.RANKS_DIFFER})
)
def test_an_end_that_says_what_to_do_breaks_the_chain(schedule, tmp_path, code):
    for end in (None, code, None, None):
        live(schedule, tmp_path, end)
    assert not refused(schedule, tmp_path)


def write_snapshot(out: Path, attempt: int) -> None:
    disks.commit(DISK, out, "init", 2, attempt)


def test_any_progress_breaks_the_chain(schedule, tmp_path):
    def result(name: str, text: str) -> None:
        (tmp_path / "results" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "results" / name).write_text(text)

    for step in (
        lambda: write_snapshot(tmp_path, 3),
        lambda: write_snapshot(tmp_path, 99),  # the same bits once more, after the first was lost, say
        lambda: result("init-00000006-a0001.json", "{}"),
        lambda: result("init-00000006-a0001.json", "{ }"),
        lambda: result("ensembles/all.json", "{}"),
    ):
        for _ in range(LIMIT):
            live(schedule, tmp_path, None, retry=True)
        assert refused(schedule, tmp_path)
        step()
        assert not refused(schedule, tmp_path)


def test_what_is_not_progress_does_not(schedule, tmp_path):
    for name in ("snapshots/.tmp-init-00000002-a0001-00ff/w", "results/.tmp-x.json", "log.jsonl", "results/notes.txt"):
        live(schedule, tmp_path, None, retry=True)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert refused(schedule, tmp_path)


@pytest.mark.parametrize("what", ["an edit of the solver files", "a life of which nothing is known"])
def test_a_reason_to_try_again(what, base, schedule, tmp_path):
    for _ in range(LIMIT):
        live(schedule, tmp_path, 70)
    if what.startswith("an edit"):
        schedule = load(str(base / "schedule"), ("init.base_lr=0.05",))
    else:
        (tmp_path / "lives" / "a0002.json").write_bytes(b"")
    assert not refused(schedule, tmp_path)


@pytest.mark.process
def test_killed_processes_are_lives_and_the_command_refuses_before_it_starts_a_worker(base, schedule, tmp_path):
    script = """import os, signal, sys; from pathlib import Path
from stagerun.train.keeper import Keeper; from stagerun.language import load
Keeper(load(sys.argv[1], ()), Path(sys.argv[2])).open(); os.kill(os.getpid(), signal.SIGKILL)"""
    for _ in range(LIMIT):
        killed = subprocess.run([sys.executable, "-c", script, base / "schedule", tmp_path], timeout=60)
        assert killed.returncode == -signal.SIGKILL
    done = small.run(base / "schedule", tmp_path, nproc=2)
    assert done.returncode == 78 and done.stderr.count("was killed, or crashed") == 3, done.stderr
    assert "hint: " in done.stderr and "--retry" in done.stderr
    told = small.stagerun("status", base / "schedule", "--out", tmp_path)
    assert "killed, or ended without a word, before anything was logged: " in told.stdout
    assert "the last 3 runs made no progress, so `stagerun run` asks for --retry" in told.stdout, told.stdout


# ---- taken over by another host


def life(out: Path, attempt: int) -> Life:
    (found,) = (life for life in store.last_lives(DISK, out, 9) if life.attempt == attempt)
    assert found is not None
    return found


def elsewhere(out: Path, attempt: int) -> None:
    """A life of another host takes over."""
    other = Life(attempt=attempt, run="r", process=NODE7, begun="2026-01-01 10:00:00 +0000", newest="")
    store.write_atomic(DISK, out / "lives" / f"a{attempt:04d}.json", json.dumps(asdict(other)).encode())


def test_a_run_that_was_taken_over_writes_no_more_and_ends(schedule, tmp_path):
    torch.set_num_threads(1)
    keeper, seen = Keeper(schedule, tmp_path), list[Event]()
    keeper.open()
    with pytest.raises(FolderInUseError, match="life 2, process 12 on node7"):
        for event in run(
            Context(schedule, str(tmp_path), SoloComm(), World(), torch.device("cpu"), keeper, lambda: False)
        ):
            seen.append(event)
            if isinstance(event, SnapshotWritten) and event.iter == 2:
                elsewhere(tmp_path, 2)
    keeper.close(73)
    # The next one may have been published before this test, which is told of the first late, took the folder over.
    assert [e.iter for e in seen if isinstance(e, SnapshotWritten)] in ([2], [2, 4])
    assert all("life 2" in e.message for e in seen if isinstance(e, SnapshotFailed))
    first, second = "init-00000002-a0001", "init-00000004-a0001"
    assert {first} <= set(os.listdir(tmp_path / "snapshots")) <= {first, second}
    assert not (tmp_path / "results").exists()
    assert life(tmp_path, 1).code is None and life(tmp_path, 2).process == NODE7


def test_nothing_is_deleted_and_no_result_is_replaced_after_a_takeover(schedule, tmp_path):
    keeper = Keeper(schedule, tmp_path)
    keeper.open()
    write_snapshot(tmp_path, 1)
    (ref,) = keeper.inventory().snapshots
    elsewhere(tmp_path, 2)
    (tmp_path / "snapshots" / ref.name / "w").write_bytes(b"x")  # damaged: to be set aside
    for do in (lambda: keeper.read(ref), lambda: keeper.set_aside(ref), keeper.require_held, keeper.require_not_lost):
        with pytest.raises(FolderInUseError):
            do()
    assert os.listdir(tmp_path / "snapshots") == [ref.name]
    keeper.close()


@pytest.mark.process
@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_command_ends_with_73_on_all_ranks_and_leaves_the_log_to_the_other(base, tmp_path, nproc):
    out = tmp_path / "out"
    running = small.start(base / "schedule", out, *small.ENDLESS, nproc=nproc)
    small.wait_for(out / "snapshots" / "init-00000002-a0001", running)
    elsewhere(out, 2)
    code, text = running.wait()
    assert code == 73, text
    assert f"another run has taken over {out}" in text and "life 2, process 12 on node7" in text
    assert running.gone()
    logged = [json.loads(line)["event"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert "Failed" not in logged
    if nproc == 1:  # which of the slow ones also waits, for the other is silent
        again = small.run(base / "schedule", out, *small.AGAIN)
        assert again.returncode == 0 and "process 12 on node7" in again.stderr and "for 15 s at most" in again.stderr
        assert (life(out, 2).taken_by, life(out, 3).code) == (3, 0)


def test_status_says_when_the_same_command_would_not_go_on(base, schedule, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"time": 5.0, "event": "Failed", "code": 69, "text": "a peer is gone"}\n')
    words = ("status", base / "schedule", "--out", tmp_path)
    for number in range(1, LIMIT + 1):
        live(schedule, tmp_path, 69)
        text = stored_help.stagerun(*words).stdout
        assert ("resumes" in text) == (number < LIMIT) and ("--retry" in text) == (number == LIMIT), text
    assert "--retry" not in stored_help.stagerun(*words, "--set", "determinism=ELASTIC").stdout


def test_the_life_that_began_without_snapshots_says_so_in_its_own(schedule, tmp_path):
    live(schedule, tmp_path, 65)  # it came to none
    for expected in (True, False):
        keeper = Keeper(schedule, tmp_path)
        keeper.open()
        stage = schedule.stages[0]
        for iter in (1, 2):
            ref = keeper.commit(Lineage(stage, "", {}), iter, {"model.safetensors": b"w"}, Progress(0, 0.0, []))
            assert ref.began_empty is expected
            assert store.inventory(DISK, tmp_path).snapshots[-1] == ref
        keeper.close(0)
