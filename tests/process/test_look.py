"""`stagerun status`, with `--snapshots` too, and `report` of real runs: living, finished, killed, stopped; with damage. Of logs made by hand:
tests/fast/test_status.py."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from typing import Any

import processes
import pytest
import small
from made_up_runs import rows

from stagerun import store

LONG = 'base_lr: 0.05 lr_policy: "fixed" max_iter: 100000 snapshot: 3 test_interval: 3'
KEPT = ("--set", "keep_snapshots=1000")  # so that a snapshot that is waited for stays


@pytest.fixture(scope="module")
def base(finished):
    """data/, schedule/ and its output out/; long/, a schedule of which nobody waits for the end."""
    small.make_schedule(finished / "long", finished / "data", init=LONG)
    return finished


def told(*arguments: object) -> dict[str, Any]:
    done = small.stagerun(*arguments, "--json", code=0)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


# ---- status


def test_a_living_run_a_killed_one_and_one_that_was_stopped(base, tmp_path):
    out = tmp_path / "out"
    run = small.start(base / "long", out, *KEPT, nproc=2)
    try:
        small.wait_for(out / "snapshots" / "init-00000006-a0001", run)
        status = told("status", base / "long", "--out", out)
        assert status["state"] == "running" and not status["silent"]
        assert status["holder"]["pid"] in run.ranks().values() and status["holder"]["host"] == os.uname().nodename
        assert 0 <= status["last_logged"] - status["holder"]["since"] < 120
        assert status["run"]["workers"] == 2
        progress = status["progress"]
        assert (progress["stage"], progress["number"], progress["stages"]) == ("init", 1, 4)
        assert 6 <= progress["iter"] < 100000 and progress["lr"] == 0.05 and progress["max_iter"] == 100000
        assert progress["iterations_left"] == 100011 - progress["iter"]
        assert progress["seconds_left"] > progress["seconds_left_in_stage"] > 0
        assert status["snapshot"]["name"].startswith("init-")
    finally:
        processes.kill_all(run.pids())
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
        processes.kill_all(run.pids())
    text = small.stagerun("status", out).stdout
    iter = told("status", out)["progress"]["iter"]
    assert re.match(rf"tiny: stopped .* in init after iteration {iter} \(asked to stop.*\), everything is saved", text)
    assert "resume is EQUIVALENT" in text and "workers: 2 -> 1" in text


def test_a_finished_run(base):
    status = told("status", base / "schedule", "--out", base / "out")
    assert status["state"] == "finished" and status["holder"] is None and status["warnings"] == []
    printed = (base / "out.txt").read_text()
    assert list(status["top1"]) == list(small.STAGES)
    assert all(f"top-1 {100 * top1:.2f} %" in printed for top1 in status["top1"].values())
    assert told("status", base / "out")["top1"] == status["top1"]


def test_looking_takes_no_torch_no_lock_and_changes_nothing(base, tmp_path):
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


# ---- snapshots


def test_every_snapshot_is_listed_with_what_came_of_it(base):
    found = {f["name"]: f for f in told("status", "--snapshots", base / "out")["snapshots"]}
    assert list(found) == [
        *(f"init-{i:08d}-a0001" for i in (2, 4, 6)),
        *(f"cyc1-{i:08d}-a0001" for i in (2, 4, 5)),
        *(f"collapse-{i:08d}-a0001" for i in (2, 3)),
        *(f"early-{i:08d}-a0001" for i in (2, 3)),
    ]
    end = found["init-00000006-a0001"]
    assert end["needed"] == ["end of init", "start of cyc1", "start of early"] and end["state"] == "complete"
    assert end["top1"] is not None and found["init-00000004-a0001"]["top1"] is None
    assert found["init-00000004-a0001"]["needed"] == []
    folder = base / "out" / "snapshots" / "init-00000006-a0001"
    assert end["bytes"] == sum(p.stat().st_size for p in folder.iterdir() if p.name != "MANIFEST.json")
    text = small.stagerun("status", "--snapshots", base / "schedule", "--out", base / "out").stdout
    (row,) = (row for row in text.splitlines() if row.startswith("init-00000006"))
    assert re.search(r"6 +2\.5 MB .* \d+\.00 % +complete +end of init, start of cyc1, start of early$", row)
    assert text.splitlines()[-1].startswith(("10 complete snapshots, 25.1 MB; ", "10 complete snapshots, 25.2 MB; "))
    assert "can go (`rm -r`, while no run is alive)" in text


def test_damage_is_shown_and_verified_byte_by_byte(base, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(base / "out", out)
    root = out / "snapshots"
    weights = root / "cyc1-00000004-a0001" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[5000] ^= 1
    weights.write_bytes(data)
    with open(root / "early-00000002-a0001" / "state.json", "ab") as file:
        file.write(b" ")
    store.set_aside(store.LocalDisk(), out, "init-00000002-a0001")

    plain = {f["name"]: f for f in told("status", "--snapshots", out)["snapshots"]}
    assert plain["cyc1-00000004-a0001"]["state"] == "complete", "its size is right, and its bytes were not read"
    assert plain["early-00000002-a0001"]["state"] == "damaged"
    assert re.fullmatch(r"state\.json has \d+ bytes, not \d+", plain["early-00000002-a0001"]["reason"])
    assert plain[".bad-init-00000002-a0001"]["state"] == "set aside"

    done = small.stagerun("status", "--snapshots", out, "--verify", code=78)
    assert "damaged: cyc1-00000004-a0001: model.safetensors is not as it was written" in done.stdout
    assert "damaged: early-00000002-a0001: state.json has" in done.stdout
    assert done.stdout.splitlines()[-3].startswith("7 complete snapshots")
    assert "2 snapshots damaged" in done.stderr


# ---- report


def test_tables_need_no_torch_and_agree_with_what_was_printed(finished):
    program = (
        "import sys; from stagerun.cli import main\n"
        "try: main()\nfinally: print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "report", finished / "out"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr
    table = {line.split()[0]: line for line in (finished / "out.txt").read_text().splitlines()[-5:]}
    found = rows(finished / "out")
    assert [(row["stage"], row["from"]) for row in found] == [
        ("init", "seed"), ("cyc1", "init"), ("collapse", "cyc1"), ("early", "init"),
    ]  # fmt: skip
    for row in found:
        assert f"{100 * float(row['top1']):.2f} %" in table[row["stage"]]
        assert f"{float(row['loss']):.4f}" in table[row["stage"]]
    assert rows(finished / "out", "--by", "run")[0]["state"] == "finished"
