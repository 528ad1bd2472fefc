"""What came out of `bench compression`: each run's accuracy, bytes and time from its log, and the table of all. Pure."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from stagerun.base.errors import ExitCode
from stagerun.base.text import columns, csv_text, duration, listed, percent, size
from stagerun.system.typed import json_object, number
from stagerun.tools.bench.cases import DENSE, Case
from stagerun.tools.report.compare import Spread, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run that reached the stage's end. `bytes`: of gradients that the first worker handed to the network per iteration, 0 where it
    is alone. `seconds`: an iteration's, the median. `reached`: seconds of training until the accuracy that was asked for; None where it
    was not reached. `workers`: all numbers of them that trained it."""

    seed: int
    top1: float
    bytes: float
    seconds: float
    reached: float | None
    workers: tuple[int, ...]
    device: str


@dataclass(slots=True)
class _Trained:
    """What a log says of a stage, up to a line. `updates`: seconds and bytes by iteration, `tests`: top-1 likewise."""

    updates: dict[int, tuple[float, float]] = field(default_factory=dict)
    tests: dict[int, float] = field(default_factory=dict)
    top1: float | None = None
    workers: set[int] = field(default_factory=set)
    device: str = ""

    def cut(self, iter: int) -> None:
        """A process life goes on from there."""
        self.updates = {i: one for i, one in self.updates.items() if i <= iter}
        self.tests = {i: one for i, one in self.tests.items() if i <= iter}
        self.top1 = None


def outcome(lines: Iterable[bytes], stage: str, seed: int, accuracy: float | None) -> Outcome | None:
    """From the lines of a log.jsonl; None if the stage is not at its end, or was not evaluated. Lines that are not whole are left out."""
    found = _Trained()
    for line in lines:
        try:
            _read(found, json_object(line), stage)
        except ValueError:  # the end of a life that was killed
            continue
    if found.top1 is None or not found.updates:
        return None
    return Outcome(
        seed=seed,
        top1=found.top1,
        bytes=statistics.fmean(sent for _, sent in found.updates.values()),
        seconds=statistics.median(seconds for seconds, _ in found.updates.values()),
        reached=None if accuracy is None else _reached(found, accuracy),
        workers=tuple(sorted(found.workers)),
        device=found.device,
    )


def diverged(lines: Iterable[bytes]) -> bool:
    """Whether the last process life ended because loss or gradients were not finite."""
    code = None
    for line in lines:
        if b'"event": "RunStarted"' in line:
            code = None
        elif b'"event": "Failed"' in line:
            with suppress(ValueError):
                code = json_object(line).get("code")
    return code == ExitCode.DIVERGED


def _read(found: _Trained, record: Mapping[str, Any], stage: str) -> None:
    """ValueError for what no run writes."""
    match record.get("event"):
        case "RunStarted":
            found.workers.add(int(number(record.get("workers"))))
            found.device = str(record.get("device"))
        case "StageStarted" if record.get("stage") == stage:
            found.cut(int(number(record.get("iter"))))
        case "Iterated" if record.get("stage") == stage:
            sent = number(record.get("sent_bytes", 0))
            found.updates[int(number(record.get("iter")))] = number(record.get("seconds")), sent
        case "Tested" if record.get("stage") == stage and not record.get("ema"):
            found.tests[int(number(record.get("iter")))] = number(record.get("top1"))
        case "StageFinished" if record.get("stage") == stage and record.get("top1") is not None:
            found.top1 = number(record.get("top1"))


def _reached(found: _Trained, accuracy: float) -> float | None:
    first = min((iter for iter, top1 in found.tests.items() if top1 >= accuracy), default=None)
    return None if first is None else sum(s for i, (s, _) in found.updates.items() if i <= first)


# -- the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case; means over seeds, of `seconds` the median. `gain`: top-1 over dense with the same seeds. `share`: of dense's bytes.
    `reached`: None where a seed did not reach the accuracy. `lost`: seeds whose loss was not finite."""

    case: Case
    seeds: tuple[int, ...]
    top1: Spread | None
    gain: float | None
    bytes: float | None
    share: float | None
    seconds: float | None
    reached: float | None
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """`lost`: the seeds with which a case diverged."""

    schedule: str
    stage: str
    accuracy: float | None
    cases: Sequence[Case]
    outcomes: Mapping[Case, Sequence[Outcome]]
    lost: Mapping[Case, Sequence[int]] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        dense = {one.seed: one for one in self.outcomes.get(DENSE, ())}
        return [self._row(case, dense) for case in self.cases if self.outcomes.get(case) or self.lost.get(case)]

    def _row(self, case: Case, dense: Mapping[int, Outcome]) -> Row:
        mine = self.outcomes.get(case, ())
        gains = [one.top1 - dense[one.seed].top1 for one in mine if one.seed in dense]
        sent = _mean([one.bytes for one in mine])
        whole = _mean([one.bytes for one in dense.values()])
        times = [one.reached for one in mine if one.reached is not None]
        return Row(
            case=case,
            seeds=tuple(one.seed for one in mine),
            top1=spread([one.top1 for one in mine]),
            gain=_mean(gains) if case != DENSE else None,
            bytes=sent,
            share=sent / whole if sent is not None and whole else None,
            seconds=statistics.median(one.seconds for one in mine) if mine else None,
            reached=_mean(times) if len(times) == len(mine) else None,
            lost=tuple(self.lost.get(case, ())),
        )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def render(bench: Bench) -> str:
    rows = bench.rows
    shown: list[tuple[str, Callable[[Row], str]]] = [
        ("method", lambda row: row.case.method),
        ("scope", lambda row: row.case.scope),
        ("memory", lambda row: row.case.memory),
        ("seeds", lambda row: str(len(row.seeds))),
        ("top-1", lambda row: percent(row.top1.mean) if row.top1 else "diverged"),
        ("sd", lambda row: f"{100 * row.top1.sd:.2f}" if row.top1 and row.top1.sd is not None else ""),
        ("against dense", lambda row: "" if row.gain is None else f"{100 * row.gain:+.2f}"),
        ("sent per step", lambda row: size(row.bytes) if row.bytes else ""),
        ("of dense", lambda row: "" if row.share is None else f"{row.share:.1%}"),
        ("step", lambda row: "" if row.seconds is None else f"{1000 * row.seconds:.1f} ms"),
    ]
    if bench.accuracy is not None:
        shown.append(
            (f"to {100 * bench.accuracy:g} %", lambda row: "" if row.reached is None else duration(row.reached))
        )
    table = [[title for title, _ in shown], *([text(row) for _, text in shown] for row in rows)]
    return "\n".join([*columns(table), "", *(f"note: {text}" for text in notes(bench))])


def notes(bench: Bench) -> list[str]:
    """What the figures mean; one sentence each."""
    done = [one for outcomes in bench.outcomes.values() for one in outcomes]
    workers = sorted({number for one in done for number in one.workers})
    said = []
    if workers == [1]:
        said.append("one worker sends nothing: --workers 2 counts bytes")
    elif done:
        said.append(
            "sent per step: the first worker's bytes for the gradients of an iteration, with indices and scales; step: the median iteration, "
            "without evaluation, on this machine's own link"
        )
    if len(workers) > 1:
        said.append(f"trained with {listed([str(n) for n in workers])} workers: bytes and times are not comparable")
    if bench.accuracy is not None:
        said.append(
            f"to {100 * bench.accuracy:g} %: seconds of training up to the first evaluation that has it (`test_interval`); empty where a seed has not"
        )
    for row in bench.rows:
        if row.lost:
            seeds = listed([str(seed) for seed in row.lost])
            said.append(f"{row.case.method} ({row.case.text}) diverged with seed {seeds}, and is without it")
    counts = {len(row.seeds) + len(row.lost) for row in bench.rows}
    if len(counts) > 1 or len(bench.rows) < len(bench.cases):
        said.append("not all runs are done: the same command goes on")
    return said


def as_record(bench: Bench) -> dict[str, object]:
    return {
        "schedule": bench.schedule,
        "stage": bench.stage,
        "accuracy": bench.accuracy,
        "rows": [asdict(row) for row in bench.rows],
        "runs": [{**asdict(case), **asdict(one)} for case, outcomes in bench.outcomes.items() for one in outcomes],
        "notes": notes(bench),
    }


def as_csv(bench: Bench) -> str:
    """A line for each run."""
    head = ("method", "scope", "memory", "seed", "top1", "bytes", "seconds", "reached")
    lines = [
        (case.method, case.scope, case.memory, one.seed, one.top1, one.bytes, one.seconds, one.reached)
        for case, outcomes in bench.outcomes.items()
        for one in outcomes
    ]
    return csv_text([head, *lines])
