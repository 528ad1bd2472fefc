"""The short form of scripts/reliability: a few trials of each scenario, none of them wrong; what is counted, and the table of it."""

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import small
import tiny
from reliability import calls, counted, driver, kills, orphans, power, solvers, witness
from reliability.counted import Counted, Place
from reliability.forks import Forks
from reliability.trial import Scenario, Trial

HERE = Path(__file__).parent


def taken(scenario: Scenario, seed: int, trials: int, folder: Path) -> list[Trial]:
    """So many trials, none of them wrong."""
    if missing := scenario.needs():
        pytest.skip(f"it needs {missing}")
    running = scenario.trials(random.Random(seed), folder)
    try:
        found = list(islice(running, trials))
    finally:
        running.close()  # type: ignore[attr-defined]
    assert [trial.wrong for trial in found if trial.wrong] == []
    return found


def words(trials: list[Trial]) -> Counter[str]:
    total: Counter[str] = Counter()
    for trial in trials:
        total.update(trial.counts)
    return total


# ---- a few trials of each

# What processes have to be gone: the aim's second is for scripts/reliability, a suite may run on a crowded machine.
BUSY_S = 30.0


def test_calls(tmp_path: Path) -> None:
    with Forks() as forks:
        runs = calls.Runs(forks, tmp_path)
        trials = [
            calls.trial(runs, 1, ["kill@70"]),
            calls.trial(runs, 1, ["ENOSPC@90+", "EIO@5"]),
            calls.trial(runs, 2, ["kill@60"]),
        ]
    assert [trial.wrong for trial in trials] == [""] * 3
    assert words(trials) == {"killed": 2, "ended with 74": 2, "1 workers": 2, "2 workers": 1}


@pytest.mark.slow
def test_calls_at_random(tmp_path: Path) -> None:
    assert len(taken(calls.SCENARIO, 1, 40, tmp_path)) == 40


def test_witness(tmp_path: Path) -> None:
    assert sum(trial.faults for trial in taken(witness.SCENARIO, 1, 8, tmp_path)) == 8


def test_power(tmp_path: Path) -> None:
    assert sum(trial.faults for trial in taken(power.SCENARIO, 1, 10, tmp_path)) >= 1000


def test_power_finds_what_is_not_synced() -> None:
    assert any(power.trial(random.Random(seed), honest=False).wrong for seed in range(5))


@pytest.mark.parametrize("workers", [3, *(pytest.param(workers, marks=pytest.mark.slow) for workers in (1, 2, 4))])
def test_kills(workers: int, tmp_path: Path) -> None:
    trial = kills.Kills(random.Random(workers), tmp_path, patience=BUSY_S).trial(workers)
    assert trial.wrong == "" and trial.counts["bit-identical"] == 1


def test_orphans(tmp_path: Path) -> None:
    tiny.make_data(tmp_path / "data")
    schedule = small.make_schedule(tmp_path / "schedule", tmp_path / "data")
    trial = orphans.trial(random.Random(1), schedule, tmp_path / "out", latest=6.0, limit=BUSY_S)
    assert trial.wrong == ""


def test_solvers() -> None:
    trial = solvers.tried(seed=6, folders=30)
    assert trial.wrong == "" and trial.counts["schedules"] + trial.counts["with mistakes"] == 30


# ---- the counts


PLACE = Place("1e3acc5", "2 cores")
TRIAL = Trial(3, {"killed": 2, "saved": 1}, {"seconds": 1.5})


def test_sums_are_kept_by_commit_and_machine() -> None:
    sums = counted.add([], PLACE, "2026-01-02", 7, TRIAL, 2.0)
    sums = counted.add(sums, PLACE, "2026-01-03", 7, Trial(1, {"killed": 1}, {"seconds": 0.5}), 1.0)
    sums = counted.add(sums, Place("2e3acc5", "2 cores"), "2026-01-03", 8, Trial(1, wrong="lost"), 1.0)
    old, new = sums
    assert (old.trials, old.faults, old.seconds, old.seeds) == (2, 4, 3.0, (7,))
    assert (old.counts, old.largest, old.first, old.last) == (
        {"killed": 3, "saved": 1}, {"seconds": 1.5}, "2026-01-02", "2026-01-03",
    )  # fmt: skip
    assert new.wrong == ("seed 8: lost",) and counted.faults(sums) == 5
    assert counted.from_json(counted.to_json(sums)) == sums


def scenario(name: str, trials: list[Trial], wanted: int = 5) -> Scenario:
    def some(rng: random.Random, folder: Path) -> Iterator[Trial]:
        yield from trials

    return Scenario(name=name, fault="a fault", aim="0 lost", wanted=wanted, trials=some)


def test_the_table_says_what_came_out() -> None:
    met, missed, begun, never = (scenario(name, []) for name in ("met", "missed", "begun", "never"))
    rows = [(s, f"what {s.name}\nis") for s in (met, missed, begun, never)]
    sums = {
        "met": counted.add([], PLACE, "2026-01-02", 7, Trial(1234, {"a|b": 1234}, {"seconds": 0.51}), 200.0),
        "missed": counted.add([], PLACE, "2026-01-02", 7, Trial(9, wrong="lost\nit"), 2.0),
        "begun": counted.add([], Place("2e3acc5", "4 cores"), "2026-01-02", 7, Trial(4), 2.0),
    }
    text = counted.render(rows, sums)
    row = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    assert (
        "| 1,234 | 1,234 a\\|b; seconds: at most 0.51; 1 trial in 3 min | met | 2026-01-02, 1e3acc5, 1 |" in row["met"]
    )
    assert "**missed** (1 wrong)" in row["missed"] and "- `missed`, commit 1e3acc5, seed 7: lost it" in text
    assert "met so far" in row["begun"] and row["begun"].endswith("2e3acc5, 2 |")
    assert "not yet run" in row["never"] and "**never.** what never is" in text


def test_the_table_in_the_repository_is_that_of_its_counts() -> None:
    counts = driver.Counts(HERE / "reliability" / "counts")
    sums = {name: counts.read(name) for name in driver.scenarios()}
    expected = counted.render(driver.rows(), sums)
    assert (HERE / "reliability" / "RESULTS.md").read_text() == expected, "run scripts/reliability --trials 0"


# ---- the driver


def test_each_trial_is_on_disk_when_it_is_over(tmp_path: Path) -> None:
    counts = driver.Counts(tmp_path / "counts")

    def some(rng: random.Random, folder: Path) -> Iterator[Trial]:
        yield TRIAL
        assert counts.read("s")[0].trials == 1
        yield Trial(1, wrong="lost")
        raise RuntimeError("broken")

    s = Scenario(name="s", fault="", aim="", wanted=0, trials=some)
    found = driver.run(s, 5, lambda number, sums: False, counts, PLACE)
    assert found == ["lost", "the trial itself broke: RuntimeError: broken"]
    assert counts.read("s")[0].trials == 3 and counts.read("s")[0].seeds == (5,)


def test_a_scenario_ends_when_there_is_nothing_left_or_enough(tmp_path: Path) -> None:
    counts = driver.Counts(tmp_path / "counts")
    s = scenario("s", [TRIAL] * 3, wanted=5)
    options = driver.parse([])
    driver.run(s, 5, driver.enough(options, s, 1), counts, PLACE)
    assert counts.read("s")[0].faults == 6, "as many as its aim speaks of"
    driver.run(s, 6, driver.enough(options, s, 1), counts, PLACE)
    assert counts.read("s")[0].faults == 6, "it had enough"
    driver.run(s, 7, driver.enough(driver.parse(["--trials", "9"]), s, 1), counts, PLACE)
    assert counts.read("s")[0].faults == 15 and counts.read("s")[0].seeds == (5, 7), "3 were left to try"


def test_two_processes_lose_none_of_each_others_counts(tmp_path: Path) -> None:
    script = f"""
import sys; sys.path[:0] = {sys.path!r}
from pathlib import Path
from reliability import counted, driver
from reliability.trial import Trial
counts = driver.Counts(Path({str(tmp_path / "counts")!r}))
for _ in range(50):
    counts.change("s", lambda old: counted.add(old, counted.Place("c", "m"), "2026-01-02", 1, Trial(1), 0.0))
"""
    running = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    assert driver.Counts(tmp_path / "counts").read("s")[0].trials == 100


def test_stopped_it_kills_what_it_started_and_keeps_the_counts(tmp_path: Path) -> None:
    script = f"""
import signal, subprocess, sys; sys.path[:0] = {sys.path!r}
from pathlib import Path
from reliability import driver, power
from reliability.trial import Scenario, Trial
def trials(rng, folder):
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid, flush=True)
    try:
        yield Trial(2)
        print("two", flush=True)
        signal.pause()
    finally:
        child.kill()
        child.wait()
        print("killed", flush=True)
power.SCENARIO = Scenario(name="power", fault="f", aim="a", wanted=9, trials=trials)
driver.MODULES, driver.HERE = (power,), Path({str(tmp_path)!r})
sys.exit(driver.main(["--seed", "3"]))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert process.stdout.readline() == "two\n"
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and said.startswith("killed\nseed 3; ")
    assert not Path(f"/proc/{pid}").exists()
    assert json.loads((tmp_path / "counts" / "power.json").read_text())[0]["faults"] == 2
    assert "met so far" in (tmp_path / "RESULTS.md").read_text()


def test_what_it_is_told_wrong() -> None:
    with pytest.raises(SystemExit) as ended:
        driver.parse(["kill"])
    assert ended.value.code == 2
    with pytest.raises(SystemExit):
        driver.parse(["--trials", "-1"])


def test_minutes_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that one scenario has left over goes to those after it."""
    clock = [100.0]
    monkeypatch.setattr(driver.time, "monotonic", lambda: clock[0])
    options, s, sums = driver.parse(["--minutes", "1"]), scenario("s", []), list[Counted]()
    first = driver.enough(options, s, 2)
    assert not first(0, sums)
    clock[0] = 110.0
    second = driver.enough(options, s, 1)
    clock[0] = 159.0
    assert first(9, sums) and not second(0, sums)
    clock[0] = 160.0
    assert second(0, sums)
