"""What came of the trials so far, as values, as JSON, and as the table. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from reliability.trial import Scenario, Trial


@dataclass(frozen=True)
class Place:
    """Where and on what trials were made. `commit` ends in `+` where files were changed since."""

    commit: str
    machine: str


@dataclass(frozen=True)
class Counted:
    """The sum of the trials of one scenario at one place. `first` and `last` are days; `seeds` those of each start."""

    commit: str
    machine: str
    first: str
    last: str
    seeds: tuple[int, ...] = ()
    trials: int = 0
    faults: int = 0
    seconds: float = 0.0
    counts: Mapping[str, int] | None = None
    largest: Mapping[str, float] | None = None
    wrong: tuple[str, ...] = ()


def add(
    sums: Sequence[Counted], place: Place, day: str, seed: int, trial: Trial, seconds: float, number: int
) -> list[Counted]:
    """The sums with one trial more, which was the `number`th of its start; in the order of their first days."""
    old = next((c for c in sums if (c.commit, c.machine) == (place.commit, place.machine)), None)
    base = old or Counted(place.commit, place.machine, day, day)
    counts, largest = dict(base.counts or {}), dict(base.largest or {})
    for word, times in trial.counts.items():
        counts[word] = counts.get(word, 0) + times
    for word, value in trial.largest.items():
        largest[word] = max(value, largest.get(word, value))
    new = replace(
        base,
        last=max(day, base.last),
        seeds=base.seeds if seed in base.seeds else (*base.seeds, seed),
        trials=base.trials + 1,
        faults=base.faults + trial.faults,
        seconds=round(base.seconds + seconds, 1),
        counts=counts,
        largest={word: round(value, 4) for word, value in largest.items()},
        wrong=(*base.wrong, f"seed {seed}, trial {number}: {trial.wrong}") if trial.wrong else base.wrong,
    )
    return sorted([c for c in sums if c is not old] + [new], key=lambda c: (c.first, c.commit, c.machine))


def to_json(sums: Iterable[Counted]) -> str:
    return json.dumps([asdict(c) for c in sums], indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def from_json(text: str) -> list[Counted]:
    return [Counted(**{**c, "seeds": tuple(c["seeds"]), "wrong": tuple(c["wrong"])}) for c in json.loads(text)]


def faults(sums: Iterable[Counted]) -> int:
    return sum(c.faults for c in sums)


def wrong(sums: Iterable[Counted]) -> list[str]:
    return [f"{c.commit}, {text}" for c in sums for text in c.wrong]


HEAD = """# What came of injected faults

`scripts/reliability` wrote this file, from the counts in `tests/reliability/counts`; both grow with each of its trials. It can be
stopped at any time and goes on from there: `scripts/reliability` until every row has the faults that its aim speaks of,
`scripts/reliability kills --minutes 30` for more of one, `--list` for the names. A new start draws new faults, from a seed that is kept
with the counts. After a defect was mended `tests/reliability/counts/NAME.json` is deleted and counting begins anew, so that a row speaks of
the code as it is.
"""

NOT_SHOWN = """## What this does not show

- A real power cut, a drive that lies about its syncs, or a file system that breaks its own word: power cuts are modelled, on a disk in memory.
- Real NFS or Lustre: their known ways (an answer that is lost, names that are seen late) are tried on disks that behave so.
- GPUs and NCCL; more than one machine; more than 8 workers (in `world`; 4 in all others). All of this ran on the few cores named above, under other load, too.
- Two runs that want one output folder, a folder that is taken from a run that still lives, and that a snapshot is read back before the one
  before it is deleted: no row counts these; tests show them (tests/fast/test_store_lease.py, tests/process/test_store_processes.py, tests/fast/test_store_damage.py).
- Authenticity: whoever may write the output folder may also write a snapshot with the right digests.
"""


def render(rows: Sequence[tuple[Scenario, str]], sums: Mapping[str, Sequence[Counted]]) -> str:
    """RESULTS.md. `rows`: each scenario, and what is counted in it; `sums` by scenario."""
    places = list(dict.fromkeys(c.machine for scenario, _ in rows for c in sums.get(scenario.name, ())))
    lines = [
        HEAD,
        "| | fault | aim | faults wanted | injected | what came out | aim is | when, commit, machine: injected there |",
        "|---|---|---|--:|--:|---|---|---|",
    ]
    lines += [_row(scenario, sums.get(scenario.name, ()), places) for scenario, _ in rows]
    lines += ["", "Machines:", "", *(f"{n}. {machine}" for n, machine in enumerate(places, 1)), ""]
    errors = [(scenario.name, text) for scenario, _ in rows for text in wrong(sums.get(scenario.name, ()))]
    if errors:
        lines += [
            "## Where an aim is missed",
            "",
            *(f"- `{name}`, commit {_one_line(text)}" for name, text in errors),
            "",
        ]
    lines += ["## What is counted", ""]
    for scenario, said in rows:
        lines += [f"**{scenario.name}.** {' '.join(said.split())}", ""]
    return "\n".join([*lines, NOT_SHOWN])


def _row(scenario: Scenario, sums: Sequence[Counted], machines: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    largest: dict[str, float] = {}
    for c in sums:
        for word, number in (c.counts or {}).items():
            counts[word] = counts.get(word, 0) + number
        for word, value in (c.largest or {}).items():
            largest[word] = max(value, largest.get(word, value))
    came = [f"{number:,} {word}" for word, number in sorted(counts.items())]
    came += [f"{word}: at most {value:.4g}" for word, value in sorted(largest.items())]
    trials, seconds = sum(c.trials for c in sums), sum(c.seconds for c in sums)
    if sums:
        came.append(f"{trials:,} trial{'s' * (trials != 1)} in {_duration(seconds)}")
    cells = [
        f"`{scenario.name}`",
        scenario.fault,
        scenario.aim,
        f"{scenario.wanted:,}",
        f"{faults(sums):,}",
        "; ".join(came) or "not yet run",
        verdict(scenario, sums),
        "; ".join(f"{_days(c)}, {c.commit}, {machines.index(c.machine) + 1}: {c.faults:,}" for c in sums),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def verdict(scenario: Scenario, sums: Sequence[Counted]) -> str:
    if wrong(sums):
        return f"**missed** ({len(wrong(sums))} wrong)"
    if not sums:
        return ""
    return "met" if faults(sums) >= scenario.wanted else "met so far"


def _days(counted: Counted) -> str:
    return counted.first if counted.first == counted.last else f"{counted.first} to {counted.last}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _one_line(text: str) -> str:
    said = " ".join(text.split())
    return said if len(said) < 400 else f"{said[:200]} ... {said[-200:]}"
