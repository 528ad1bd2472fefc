"""`stagerun status`, with `--snapshots` too: beside a living run, after its end, after a kill; with damage; in a fraction of a second."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import processes
import pytest
import small
from facade import Target

from stagerun import store
from stagerun.base import events
from stagerun.tools.status.command import GOES_ON, status_text
from stagerun.tools.status.snapshots import list_snapshots
from stagerun.train.log_file import earlier_tests
from stagerun.train.status import look

LONG = 'base_lr: 0.05 lr_policy: "fixed" max_iter: 100000 snapshot: 3 test_interval: 3'
KEPT = ("--set", "keep_snapshots=1000")  # so that a snapshot that is waited for stays
NOW = 1_000_000.0


@pytest.fixture(scope="module")
def base(finished: Path) -> Path:
    """data/, schedule/ and its output out/; long/, a schedule of which nobody waits for the end."""
    small.make_schedule(finished / "long", finished / "data", init=LONG)
    return finished


def told(*arguments: object) -> dict[str, Any]:
    done = small.stagerun(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def running(base: Path, tmp_path: Path) -> Iterator[tuple[processes.Run, Path]]:
    """A run of two workers that has written a snapshot and evaluated."""
    out = tmp_path / "out"
    run = small.start(base / "long", out, *KEPT, nproc=2)
    try:
        small.wait_for(out / "snapshots" / "init-00000006-a0001", run)
        yield run, out
    finally:
        processes.kill(run, "all", random.Random(1))
        run.wait()


# ---- status


def test_a_living_run_a_killed_one_and_one_that_was_stopped(
    base: Path, running: tuple[processes.Run, Path], tmp_path: Path
) -> None:
    run, out = running
    status = told("status", base / "long", "--out", out)
    assert status["state"] == "running" and not status["silent"]
    assert status["holder"]["pid"] in run.workers() and status["holder"]["host"] == os.uname().nodename
    assert 0 <= status["last_logged"] - status["holder"]["since"] < 120
    assert status["run"]["workers"] == 2
    progress = status["progress"]
    assert (progress["stage"], progress["number"], progress["stages"]) == ("init", 1, 4)
    assert 6 <= progress["iter"] < 100000 and progress["lr"] == 0.05 and progress["max_iter"] == 100000
    assert progress["iterations_left"] == 100011 - progress["iter"]
    assert progress["seconds_left"] > progress["seconds_left_in_stage"] > 0
    assert status["snapshot"]["name"].startswith("init-") and status["evaluations"][0]["iter"] >= 3

    processes.kill(run, "all", random.Random(1))
    run.wait()
    killed = told("status", out)
    assert killed["state"] == "killed" and killed["holder"] is None
    assert killed["progress"]["iter"] >= progress["iter"]

    run = small.start(base / "long", out, *KEPT)
    try:
        newest = store.inventory(store.LocalDisk(), out).snapshots[-1]
        small.wait_for(out / "snapshots" / f"init-{newest.iter + 3:08d}-a0002", run)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait()[0] == 75
    finally:
        processes.kill(run, "all", random.Random(1))
    text = small.stagerun("status", out).stdout
    iter = told("status", out)["progress"]["iter"]
    assert re.match(rf"tiny: stopped .* in init after iteration {iter} \(asked to stop.*\), everything is saved", text)
    assert "resume is EQUIVALENT" in text and "workers: 2 -> 1" in text


def test_a_finished_run(base: Path) -> None:
    status = told("status", base / "schedule", "--out", base / "out")
    assert status["state"] == "finished" and status["holder"] is None and status["warnings"] == []
    printed = (base / "out.txt").read_text()
    for name, found in zip(small.STAGES, status["evaluations"], strict=True):
        assert found["stage"] == name and f"top-1 {100 * found['top1']:.2f} %" in printed
        assert found["snapshot"] == f"{name}-{found['iter']:08d}-a0001"
    assert told("status", base / "out")["evaluations"] == status["evaluations"]


def test_looking_takes_no_torch_no_lock_and_changes_nothing(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(base / "out", out)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    program = """import json, sys; from stagerun.cli import main
try: main()
finally: print(json.dumps([m for m in sys.modules if m.split(".")[0] in ("torch", "rich", "numpy", "cv2", "lmdb")]))"""
    with store.Lock(out):
        (out / "lock").touch()
        before[out / "lock"] = (out / "lock").stat().st_mtime_ns
        for words in (["status"], ["status", "--snapshots"]):
            done = subprocess.run(
                [sys.executable, "-c", program, *words, str(out)], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines()[-1] == "[]"
        assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before


# ---- status, of logs made by hand


def line(time: float, event: events.Event) -> str:
    return json.dumps({"time": time, "event": type(event).__name__, **asdict(event)}) + "\n"


def run_started() -> events.RunStarted:
    return events.RunStarted(
        schedule="s", out="o", workers=4, device="cuda:0", threads=2, stages=("a", "b"), iterations=300,
        iterations_left=300, version="1",
    )  # fmt: skip


def stage_started(iter: int = 0) -> events.StageStarted:
    return events.StageStarted(
        stage="a", number=1, iter=iter, max_iter=200, start="seed 1", batch_size=64, device_batch_size=8,
        iterations_left=300,
    )  # fmt: skip


def iterated(iter: int, seconds: float = 0.5) -> events.Iterated:
    return events.Iterated(
        stage="a", iter=iter, epoch=iter / 10, lr=0.1, momentum=0.9, weight_decay=0, loss=float(iter), images=64,
        seconds=seconds,
    )  # fmt: skip


def evaluated(iter: int, top1: float = 0.5, ema: bool = False) -> events.Tested:
    return events.Tested(stage="a", iter=iter, images=10, top1=top1, top5=0.9, loss=1.0, seconds=1, ema=ema)


def write(out: Path, *told: tuple[float, events.Event] | events.Event | str) -> Path:
    """A log of events, at NOW unless said otherwise."""
    timed = (one if isinstance(one, str | tuple) else (NOW, one) for one in told)
    (out / "log.jsonl").write_text("".join(one if isinstance(one, str) else line(*one) for one in timed))
    return out


def test_speed_loss_and_time_left_are_those_of_the_last_fifty_iterations(tmp_path: Path) -> None:
    iterations = [iterated(i, 0.5 if i > 10 else 99.0) for i in range(1, 61)]
    status = look(Target(write(tmp_path, run_started(), stage_started(), *iterations)), NOW)
    assert status.state == "killed" and status.progress is not None
    assert status.progress.loss == sum(range(11, 61)) / 50
    assert status.progress.images_per_second == 128
    assert status.progress.seconds_left_in_stage == 140 * 0.5
    assert status.progress.seconds_left == 240 * 0.5 and status.progress.iterations_left == 240
    assert "60/200  epoch 6.00  LR 0.1  loss 35.5000  128 images/s  1 min 10 s left in stage, 2 min 00 s in all" in (
        status.progress.line
    )


def test_silence_of_a_living_run_is_told_after_five_minutes(tmp_path: Path) -> None:
    for age, silent in ((299, False), (312, True)):
        with store.Lock(tmp_path):
            now = time.time()
            write(tmp_path, (now, run_started()), (now, stage_started()))
            status = look(Target(tmp_path), now + age)
            assert status.state == "running" and status.silent is silent
            told = "nothing has been logged for 5 min 12 s, though the run is alive" in status_text(status, now + age)
            assert told is silent
    assert not look(Target(tmp_path), time.time() + 1000).silent, "a run that has ended is no longer silent"


def test_a_run_that_has_taken_the_folder_and_logged_nothing_yet(tmp_path: Path) -> None:
    write(tmp_path, run_started(), stage_started(), iterated(5))
    with store.Lock(tmp_path):
        status = look(Target(tmp_path), time.time())
        assert status.state == "starting" and status.progress is None
        assert f"starting, nothing logged yet: process {os.getpid()} on" in status_text(status, time.time())


def test_the_newest_line_is_the_last_one_whatever_the_clock_said(tmp_path: Path) -> None:
    back = NOW - 3600  # the clock was set back while it trained
    ended = events.RunFinished(trained=True, seconds=1)
    write(tmp_path, run_started(), stage_started(), iterated(200), (back, ended))
    assert look(Target(tmp_path), NOW).state == "finished"
    write(tmp_path, run_started(), stage_started(), (back, iterated(1)))
    status = look(Target(tmp_path), NOW)
    assert (status.last_event, status.last_logged) == ("Iterated", back)


@pytest.mark.parametrize(
    "code, text, told",
    [
        (79, "the loss is nan\n  hint: lower base_lr", "ended with exit code 79 10 s ago in a after iteration 3: the loss is nan"),
        (69, "", f"ended with exit code 69 10 s ago in a after iteration 3; {GOES_ON}"),
        (74, "no space left", f"ended with exit code 74 10 s ago in a after iteration 3: no space left; {GOES_ON}"),
        (None, "", f"killed, or ended without a word, 10 s ago in a after iteration 3: {GOES_ON}"),
    ],
)  # fmt: skip
def test_an_error_is_told_and_whether_the_same_command_helps(
    tmp_path: Path, code: int | None, text: str, told: str
) -> None:
    end = [] if code is None else [events.Failed(code=code, text=text)]
    write(tmp_path, run_started(), stage_started(), iterated(3), *end)
    status = look(Target(tmp_path), NOW)
    assert (status.state, status.exit_code) == ("failed" if code else "killed", code)
    assert status_text(status, NOW + 10).splitlines()[0] == f"s: {told}"
    with store.Lock(tmp_path):
        assert look(Target(tmp_path), NOW).exit_code is None, "one that was started again has not failed"


def test_warnings_are_those_of_the_last_life(tmp_path: Path) -> None:
    told_last = 'says "event": "RunStarted" in its text'
    write(
        tmp_path,
        run_started(),
        events.Note(text="of an earlier life", warning=True),
        '{"time": 1.0, "event": "Iter\n',  # what a kill left
        run_started(),
        events.Note(text=told_last, warning=True),
        events.Note(text="no warning"),
        events.SnapshotFailed(stage="a", iter=3, message="disk full"),
    )
    status = look(Target(tmp_path), NOW + 60)
    assert [w.text for w in status.warnings] == [told_last, "no snapshot of a at 3: disk full"]
    assert "warning 1 min 00 s ago: no snapshot of a at 3: disk full" in status_text(status, NOW + 60)
    assert status.unreadable_lines == 0

    many = [events.Note(text=f"warning {i}", warning=True) for i in range(15)]
    text = status_text(look(Target(write(tmp_path, run_started(), *many)), NOW), NOW)
    assert "5 older warnings are in log.jsonl" in text and ": warning 4\n" not in text and ": warning 5\n" in text


def test_evaluations_inside_a_stage_outlive_a_kill_unless_they_are_made_again(tmp_path: Path) -> None:
    seen = [evaluated(50, 0.3), evaluated(100, 0.4), evaluated(100, 0.45, ema=True), evaluated(150, 0.9)]
    again = [run_started(), stage_started(iter=120), iterated(121)]
    log = write(tmp_path, run_started(), stage_started(), *seen, *again)
    assert [t.iter for t in earlier_tests(log / "log.jsonl", "a")] == [50, 100, 100]
    (found,) = look(Target(log), NOW).evaluations
    assert (found.iter, found.top1, found.ema_top1) == (100, 0.4, 0.45)
    assert "45.00 %" in status_text(look(Target(log), NOW), NOW)


# ---- snapshots


def test_every_snapshot_is_listed_with_what_came_of_it(base: Path) -> None:
    found = {f["name"]: f for f in told("status", "--snapshots", base / "out")["snapshots"]}
    assert list(found) == [
        *(f"init-{i:08d}-a0001" for i in (2, 4, 6)),
        *(f"cyc1-{i:08d}-a0001" for i in (2, 4, 5)),
        *(f"collapse-{i:08d}-a0001" for i in (2, 3)),
        *(f"early-{i:08d}-a0001" for i in (2, 3)),
    ]
    end = found["init-00000006-a0001"]
    assert end["end"] and end["started"] == ["cyc1", "early"] and end["state"] == "complete"
    assert end["epoch"] == 6 * 16 / 600 and end["result"]["stage"] == "init"
    assert not found["init-00000004-a0001"]["end"] and found["init-00000004-a0001"]["result"] is None
    assert found["cyc1-00000002-a0001"]["epoch"] == (6 + 2) * 16 / 600
    assert found["early-00000003-a0001"]["epoch"] == (6 + 3) * 16 / 600, "along its own path"
    folder = base / "out" / "snapshots" / "init-00000006-a0001"
    assert end["bytes"] == sum(p.stat().st_size for p in folder.iterdir() if p.name != "MANIFEST.json")
    text = small.stagerun("status", "--snapshots", base / "schedule", "--out", base / "out").stdout
    (row,) = (row for row in text.splitlines() if row.startswith("init-00000006"))
    assert re.search(r"6 +0\.16 +2\.5 MB .* \d+\.00 % +complete +init +cyc1, early$", row)
    assert text.splitlines()[-1].startswith(("10 complete snapshots, 25.1 MB", "10 complete snapshots, 25.2 MB"))


def test_damage_is_shown_and_verified_byte_by_byte(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(base / "out", out)
    root = out / "snapshots"
    assert small.stagerun("status", "--snapshots", out, "--verify").returncode == 0
    weights = root / "cyc1-00000004-a0001" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[5000] ^= 1
    weights.write_bytes(data)
    with open(root / "early-00000002-a0001" / "state.json", "ab") as file:
        file.write(b" ")
    store.set_aside(store.LocalDisk(), out, "init-00000002-a0001")

    plain = {f.name: f for f in list_snapshots(out)}
    assert plain["cyc1-00000004-a0001"].state == "complete", "its size is right, and its bytes were not read"
    assert plain["early-00000002-a0001"].state == "damaged"
    assert re.fullmatch(r"state\.json has \d+ bytes, not \d+", plain["early-00000002-a0001"].reason)
    assert plain[".bad-init-00000002-a0001"].state == "set aside"

    done = small.stagerun("status", "--snapshots", out, "--verify")
    assert done.returncode == 78
    assert "damaged: cyc1-00000004-a0001: model.safetensors is not as it was written" in done.stdout
    assert "damaged: early-00000002-a0001: state.json has" in done.stdout
    assert done.stdout.splitlines()[-3].startswith("7 complete snapshots")
    assert "2 snapshots damaged" in done.stderr
    assert small.stagerun("status", "--snapshots", out).returncode == 0
