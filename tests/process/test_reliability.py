"""The short form of scripts/dev reliability: a trial or a few of those scenarios that have no test file of their own, none of them wrong; that
these find what they look for; and the driver."""

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import disks
import pytest
from disks import HookedDisk, ModelDisk
from reliability import brief, calls, flips, power, records, sigterm, solvers

from stagerun import store


def test_calls(tmp_path):
    runs = calls.Runs(tmp_path)
    reached = runs.left_alone(1)[1] // 2
    trials = [calls.trial(runs, 1, [f"kill@{reached}"]), calls.trial(runs, 1, [f"ENOSPC@{reached}+", "EIO@5"])]
    assert [trial.wrong for trial in trials] == ["", ""]
    assert not any(trial.counts.get("not reached") for trial in trials) and sum(trial.faults for trial in trials) == 3


def test_what_is_set_aside_is_lost(tmp_path):
    store.prepare(store.LocalDisk(), tmp_path)
    name = disks.commit(store.LocalDisk(), tmp_path, "init", 1).name
    store.set_aside(store.LocalDisk(), tmp_path, name)
    assert "was set aside" in brief.lost(tmp_path)


def test_power_finds_what_is_not_synced_alone():
    trials = [power.trial(random.Random(seed), set()) for seed in range(5)]
    assert not any(trial.wrong for trial in trials) and sum(trial.faults for trial in trials) >= 100
    assert any(power.trial(random.Random(seed), set(), honest=False).wrong for seed in range(5))


@pytest.mark.parametrize("forgotten", ["pin", "result"])
def test_power_finds_what_was_forgotten(forgotten):
    disk, sequence = HookedDisk(ModelDisk()), power.Sequence(random.Random(1))
    store.prepare(disk, power.OUT)
    lease, attempt = power.taken(disk)
    sequence.commit(disk, lease, attempt)
    while not sequence.pinned:
        sequence.pin(disk)
    sequence.result(disk)
    if forgotten == "pin":
        store.unpin(disk, power.OUT, *sequence.pinned)
    else:
        disk.unlink(power.RESULT)
    with pytest.raises(power.Lost, match=r"pins are|is gone"):
        power.check(disk, sequence)


def test_a_run_that_ignores_a_signal_is_wrong(tmp_path):
    schedule = sigterm.Schedule(tmp_path, 1)
    schedule.out.mkdir()
    log = schedule.out / "log.jsonl"
    for lines, left in (
        ([], 3),
        (["Iterated early 1"], 2),
        (["Iterated early 2", "Iterated early 3"], 0),
        (["Iterated init 6"], 3),
    ):
        events = [dict(zip(("event", "stage", "iter"), line.split(), strict=True)) for line in lines]
        log.write_text("".join(json.dumps({**event, "iter": int(event["iter"])}) + "\n" for event in events) + '{"ev')
        assert sigterm.iterations_left(schedule.out) == left
    assert "went on to its end" in sigterm.judged(schedule, 0, "", 1.0, [], 3)
    assert "went on to its end" not in sigterm.judged(schedule, 0, "", 1.0, [], 2)


def test_flips_meet_the_bits_of_the_manifest():
    files = {Path("MANIFEST.json"): b"m" * 100, Path("model.safetensors"): b"w" * 10**6}
    rng = random.Random(1)
    kinds = Counter((fault.kind, fault.file.name) for fault in (flips.draw(rng, files) for _ in range(300)))
    assert kinds["flip", "MANIFEST.json"] > 30 and len(kinds) == 6


def test_solvers_and_records():
    trial = solvers.tried(seed=6, folders=30)
    assert trial.wrong == "" and trial.counts["schedules"] + trial.counts["with mistakes"] == 30
    trial = records.tried(seed=6, records=50)
    assert trial.wrong == "" and min(trial.counts["images"], trial.counts["errors"]) > 25


# ---- the driver


def test_stopped_it_kills_what_it_started_and_tells_what_came_of_it(tmp_path):
    script = f"""
import signal, subprocess, sys; sys.path[:0] = {sys.path!r}
from reliability import driver
from reliability.driver import Scenario
from reliability.trial import Trial
def trials(rng, folder):
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid, flush=True)
    try:
        yield Trial(2, wrong="lost")
        print("two", flush=True)
        signal.pause()
    finally:
        child.kill()
        child.wait()
        print("killed", flush=True)
driver.SCENARIOS = {{"power": Scenario(name="power", fault="f", aim="a", wanted=9, trials=trials)}}
sys.exit(driver.main(["--seed", "3"]))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert process.stdout.readline() == "two\n"
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and said.startswith("killed\nseed 3, on ")
    assert not Path(f"/proc/{pid}").exists()
    assert (
        "| `power` | f | a | 9 | 2 | 1 trials in 0 min | **missed** (1 wrong) |\nWRONG: seed 3, trial 1: lost\n" in said
    )
