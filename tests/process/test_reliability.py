"""The short form of scripts/reliability: a trial or a few of those scenarios that have no test file of their own, none of them wrong; that
these find what they look for; what is counted, and the table of it."""

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
from reliability import brief, calls, counted, driver, flips, kills, orphans, power, sigterm, solvers, witness
from reliability.counted import Counted, Place
from reliability.files import Counts
from reliability.forks import Forks
from reliability.trial import Scenario, Trial
from test_store_disks import HookedDisk, ModelDisk

from stagerun import store

HERE = Path(__file__).parents[1]


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
        reached = runs.left_alone(1)[1] // 2
        trials = [calls.trial(runs, 1, [f"kill@{reached}"]), calls.trial(runs, 1, [f"ENOSPC@{reached}+", "EIO@5"])]
    assert [trial.wrong for trial in trials] == ["", ""]
    assert words(trials)["not reached"] == 0 and sum(trial.faults for trial in trials) == 3


def test_what_is_set_aside_is_lost(tmp_path: Path) -> None:
    store.prepare(store.LocalDisk(), tmp_path)
    witness.commit(tmp_path, 1)
    (name,) = (ref.name for ref in store.inventory(store.LocalDisk(), tmp_path).snapshots)
    store.set_aside(store.LocalDisk(), tmp_path, name)
    assert "was set aside" in brief.lost(tmp_path)


@pytest.mark.slow
def test_calls_at_random(tmp_path: Path) -> None:
    assert len(taken(calls.SCENARIO, 1, 40, tmp_path)) == 40


def test_witness(tmp_path: Path) -> None:
    assert sum(trial.faults for trial in taken(witness.SCENARIO, 1, 8, tmp_path)) == 8


def test_power(tmp_path: Path) -> None:
    assert sum(trial.faults for trial in taken(power.SCENARIO, 1, 5, tmp_path)) >= 100


def test_power_finds_what_is_not_synced() -> None:
    assert any(power.trial(random.Random(seed), set(), honest=False).wrong for seed in range(5))


def test_power_counts_a_disk_once() -> None:
    seen: set[bytes] = set()
    first, again = power.trial(random.Random(1), seen), power.trial(random.Random(1), seen)
    assert first.wrong == again.wrong == "" and first.faults == len(seen) > 0 and again.faults == 0
    assert first.counts["disks looked at, some alike"] == power.LIVES * power.STATES


@pytest.mark.parametrize("forgotten", ["pin", "result"])
def test_power_finds_what_was_forgotten(forgotten: str) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("workers, most", [(1, 6), (2, 2), (3, 6), (4, 6)])
def test_kills(workers: int, most: int, tmp_path: Path) -> None:
    trial = kills.Kills(random.Random(workers), tmp_path, patience=BUSY_S, most=most).trial(workers)
    assert trial.wrong == "" and trial.counts["bit-identical"] == 1
    # Where a random moment falls, a busy machine decides.
    assert trial.faults == trial.counts["while training"] + trial.counts["while starting"]


@pytest.mark.slow
def test_orphans(tmp_path: Path) -> None:
    tiny.make_data(tmp_path / "data")
    schedule = small.make_schedule(tmp_path / "schedule", tmp_path / "data")
    trial = orphans.trial(random.Random(1), schedule, tmp_path / "out", "starting", limit=BUSY_S)
    assert trial.wrong == "" and trial.faults == 1 and trial.counts["processes beside the launcher"] >= 1


def test_a_process_that_comes_after_an_empty_look_is_found() -> None:
    class Late:
        looks = 0

        def pids(self) -> list[int]:
            self.looks += 1
            return [1] if self.looks in (3, 4) else []

    assert kills.until_gone(Late(), least=0.2) > 0  # type: ignore[arg-type]
    assert kills.until_gone(Late()) == 0  # type: ignore[arg-type]


def test_a_run_that_ignores_a_signal_is_wrong(tmp_path: Path) -> None:
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


def test_flips_meet_the_bits_of_the_manifest() -> None:
    files = {Path("MANIFEST.json"): b"m" * 100, Path("model.safetensors"): b"w" * 10**6}
    rng = random.Random(1)
    kinds = Counter((fault.kind, fault.file.name) for fault in (flips.draw(rng, files) for _ in range(1000)))
    assert kinds["flip", "MANIFEST.json"] > 100 and len(kinds) == 6


def test_solvers() -> None:
    trial = solvers.tried(seed=6, folders=30)
    assert trial.wrong == "" and trial.counts["schedules"] + trial.counts["with mistakes"] == 30


# ---- the counts


PLACE = Place("1e3acc5", "2 cores")
TRIAL = Trial(3, {"killed": 2, "saved": 1}, {"seconds": 1.5})


def test_sums_are_kept_by_commit_and_machine() -> None:
    sums = counted.add([], PLACE, "2026-01-02", 7, TRIAL, 2.0, 1)
    sums = counted.add(sums, PLACE, "2026-01-03", 7, Trial(1, {"killed": 1}, {"seconds": 0.5}), 1.0, 2)
    sums = counted.add(sums, Place("2e3acc5", "2 cores"), "2026-01-03", 8, Trial(1, {"saved": 5}, wrong="lost"), 1.0, 9)
    old, new = sums
    assert (old.trials, old.faults, old.seconds, old.seeds) == (2, 4, 3.0, (7,))
    assert (old.counts, old.largest, old.first, old.last) == (
        {"killed": 3, "saved": 1}, {"seconds": 1.5}, "2026-01-02", "2026-01-03",
    )  # fmt: skip
    assert new.wrong == ("seed 8, trial 9: lost",) and counted.faults(sums) == 5
    assert counted.from_json(counted.to_json(sums)) == sums


def scenario(name: str, trials: list[Trial], wanted: int = 5) -> Scenario:
    def some(rng: random.Random, folder: Path) -> Iterator[Trial]:
        yield from trials

    return Scenario(name=name, fault="a fault", aim="0 lost", wanted=wanted, trials=some)


def test_the_table_says_what_came_out() -> None:
    met, missed, begun, never = (scenario(name, []) for name in ("met", "missed", "begun", "never"))
    rows = [(s, f"what {s.name}\nis") for s in (met, missed, begun, never)]
    sums = {
        "met": counted.add([], PLACE, "2026-01-02", 7, Trial(1234, {"a|b": 1234}, {"seconds": 0.51}), 200.0, 1),
        "missed": counted.add([], PLACE, "2026-01-02", 7, Trial(9, wrong="lost\nit"), 2.0, 1),
        "begun": counted.add([], Place("2e3acc5", "4 cores"), "2026-01-02", 7, Trial(4), 2.0, 1),
    }
    text = counted.render(rows, sums)
    row = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    assert (
        "| 1,234 | 1,234 a\\|b; seconds: at most 0.51; 1 trial in 3 min | met | 2026-01-02, 1e3acc5, 1: 1,234 |"
        in row["met"]
    )
    assert "**missed** (1 wrong)" in row["missed"] and "- `missed`, commit 1e3acc5, seed 7, trial 1: lost it" in text
    assert "met so far" in row["begun"] and row["begun"].endswith("2e3acc5, 2: 4 |")
    assert "not yet run" in row["never"] and "**never.** what never is" in text


def test_the_table_in_the_repository_is_that_of_its_counts() -> None:
    counts = Counts(HERE / "reliability" / "counts", driver.rows())
    with counts.alone():  # scripts/reliability may be running
        table, expected = counts.table.read_text(), counts.rendered()
    assert table == expected, "run scripts/reliability --trials 0"


def test_the_table_is_never_older_than_the_counts(tmp_path: Path) -> None:
    counts = Counts(tmp_path / "counts", [(scenario("s", []), "what it is")])
    counts.change("s", lambda old: counted.add(old, PLACE, "2026-01-02", 1, TRIAL, 0.0, 1))
    assert counts.table.read_text() == counts.rendered() and "2 killed" in counts.rendered()


# ---- the driver


def here() -> Place:
    return PLACE


def test_each_trial_is_counted_where_it_was_made(tmp_path: Path) -> None:
    places = iter([PLACE, Place("2e3acc5+", "2 cores")])
    counts = Counts(tmp_path / "counts")
    driver.run(scenario("s", [TRIAL] * 2), 5, lambda number, sums: number == 2, counts, lambda: next(places), [])
    assert [c.commit for c in counts.read("s")] == ["1e3acc5", "2e3acc5+"]


def test_a_seed_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "MODULES", (power,))
    monkeypatch.setattr(power, "SCENARIO", scenario("power", [TRIAL]))
    monkeypatch.setattr(driver, "HERE", tmp_path)
    assert driver.main(["--seed", "3", "--trials", "1"]) == 0
    assert driver.main(["--seed", "3", "--trials", "1"]) == 2
    assert "seed 3 is counted for power already" in capsys.readouterr().err
    assert driver.main(["--seed", "4", "--trials", "1"]) == 0
    assert Counts(tmp_path / "counts").read("power")[0].faults == 6


def test_each_trial_is_on_disk_when_it_is_over(tmp_path: Path) -> None:
    counts = Counts(tmp_path / "counts")

    def some(rng: random.Random, folder: Path) -> Iterator[Trial]:
        yield TRIAL
        assert counts.read("s")[0].trials == 1
        yield Trial(1, wrong="lost")
        raise RuntimeError("broken")

    s = Scenario(name="s", fault="", aim="", wanted=0, trials=some)
    found: list[str] = []
    driver.run(s, 5, lambda number, sums: False, counts, here, found)
    assert found == ["lost", "the trial itself broke: RuntimeError: broken"]
    assert counts.read("s")[0].trials == 3 and counts.read("s")[0].seeds == (5,)


def test_a_scenario_ends_when_there_is_nothing_left_or_enough(tmp_path: Path) -> None:
    counts = Counts(tmp_path / "counts")
    s = scenario("s", [TRIAL] * 3, wanted=5)
    options = driver.parse([])
    driver.run(s, 5, driver.enough(options, s, 1), counts, here, [])
    assert counts.read("s")[0].faults == 6, "as many as its aim speaks of"
    driver.run(s, 6, driver.enough(options, s, 1), counts, here, [])
    assert counts.read("s")[0].faults == 6, "it had enough"
    driver.run(s, 7, driver.enough(driver.parse(["--trials", "9"]), s, 1), counts, here, [])
    assert counts.read("s")[0].faults == 15 and counts.read("s")[0].seeds == (5, 7), "3 were left to try"


def test_two_processes_lose_none_of_each_others_counts(tmp_path: Path) -> None:
    script = f"""
import sys; sys.path[:0] = {sys.path!r}
from pathlib import Path
from reliability import counted, files
from reliability.trial import Trial
counts = files.Counts(Path({str(tmp_path / "counts")!r}))
for _ in range(50):
    counts.change("s", lambda old: counted.add(old, counted.Place("c", "m"), "2026-01-02", 1, Trial(1), 0.0, 1))
"""
    running = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    assert Counts(tmp_path / "counts").read("s")[0].trials == 100


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
        yield Trial(2, wrong="lost")
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
    assert process.returncode == 1 and said.startswith("killed\nWRONG: lost\nseed 3; ")
    assert not Path(f"/proc/{pid}").exists()
    assert json.loads((tmp_path / "counts" / "power.json").read_text())[0]["faults"] == 2
    assert "**missed** (1 wrong)" in (tmp_path / "RESULTS.md").read_text()


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
