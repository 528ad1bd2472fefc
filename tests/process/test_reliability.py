"""The short form of scripts/dev reliability: a trial or a few of those scenarios that have no test file of their own, none of them wrong."""

import random

from reliability import calls, power, records, solvers


def test_calls(tmp_path):
    runs = calls.Runs(tmp_path)
    reached = runs.left_alone(1)[1] // 2
    trials = [calls.trial(runs, 1, [f"kill@{reached}"]), calls.trial(runs, 1, [f"ENOSPC@{reached}+", "EIO@5"])]
    assert [trial.wrong for trial in trials] == ["", ""]
    assert not any(trial.counts.get("not reached") for trial in trials) and sum(trial.faults for trial in trials) == 3


def test_power_finds_what_is_not_synced_alone():
    trials = [power.trial(random.Random(seed), set()) for seed in range(5)]
    assert not any(trial.wrong for trial in trials) and sum(trial.faults for trial in trials) >= 100
    assert any(power.trial(random.Random(seed), set(), honest=False).wrong for seed in range(5))


def test_solvers_and_records():
    trial = solvers.tried(seed=6, folders=30)
    assert trial.wrong == "" and trial.counts["schedules"] + trial.counts["with mistakes"] == 30
    trial = records.tried(seed=6, records=50)
    assert trial.wrong == "" and min(trial.counts["images"], trial.counts["errors"]) > 25
