"""The options of `verify-resume`, what an interrupted run is compared by, and how the answer reads."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stagerun import store
from stagerun.base.errors import StorageError
from stagerun.base.events import (
    EnsembleTested,
    Iterated,
    Note,
    NotFinite,
    PieceStarted,
    StageFinished,
    StageStarted,
    Tested,
    TestedBeside,
)
from stagerun.base.recipe import Determinism, Schedule
from stagerun.base.text import columns, count, duration
from stagerun.command.options import arguments, option
from stagerun.command.shared import DeviceBatch, Folder, Json, Nproc, OutToCome, Overrides, Synthetic, Threads
from stagerun.plan import make_plan
from stagerun.tools.verify_resume.interruption import Timed
from stagerun.train import results


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    folder: Folder
    overrides: Overrides = ()
    out: OutToCome = None
    kills: int = option("--kills N", "How often the run is interrupted.", least=1, default=5)
    seed: int = option("--seed N", "Draws the moments and their order.", default=1)
    iters: int = option("--iters N", "Iterations per stage, 2 or more.", least=2, default=6)
    device_batch: DeviceBatch = None
    then_workers: int | None = option(
        "--then-workers N",
        "After each interruption go on with N workers, then again with --nproc, in turn; for `determinism: ELASTIC`.",
        least=1,
    )
    synthetic: Synthetic = False
    nproc: Nproc = None
    threads: Threads = None
    as_json: Json = False
    # Set in the processes of a life alone.
    life: str | None = option("--life", "The output folder of the life.", hidden=True)
    batches: int | None = option("--batches", "Device batches per iteration.", hidden=True)

    def life_arguments(self, out: Path, batches: int, threads: int) -> list[str]:
        """The command line of a life, and of each of its workers."""
        same = arguments(self, "folder", "overrides", "iters", "device_batch", "synthetic")
        return ["verify-resume", *same, "--batches", str(batches), "--threads", str(threads), "--life", str(out)]


@dataclass(frozen=True, slots=True)
class End:
    """The end of a stage. `digest`: sha256, in hex, of the tensors of its last snapshot: weights, momentum, averaged weights. `result`:
    the numbers of its line in the table."""

    iterations: int
    digest: str
    result: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of a finished run. `environment`: what its bits depend on besides the schedule (snapshots.SnapshotRef)."""

    stages: dict[str, End]
    ensembles: dict[str, tuple[float | None, ...]]
    environment: dict[str, str]

    def same(self, other: "Ends") -> bool:
        return self.stages == other.stages and self.ensembles == other.ensembles


def ends_of(schedule: Schedule, out: Path) -> Ends:
    """Reads and verifies the last snapshot of each stage. StorageError if one is missing or damaged."""
    disk = store.LocalDisk()
    plan = make_plan(schedule, store.inventory(disk, out))
    stages, environment = {}, {}
    for planned in plan.stages:
        if not planned.stage.enabled:
            continue
        ref = planned.end
        result = results.read_result(out, ref) if ref is not None else None
        if ref is None or result is None:
            raise StorageError(f"{out}: the run ended without the end of stage `{planned.stage.name}`")
        try:
            files = store.read(disk, out, ref)
        except store.Damaged as error:
            raise StorageError(f"{out}: snapshot {ref.name} is damaged: {error}", "check the disk") from error
        stages[ref.stage] = End(ref.iter, digest_of(files), result_numbers(result))
        environment = dict(ref.environment)
    together: dict[str, tuple[float | None, ...]] = {
        e.name: (e.top1, e.top5, e.loss) for e in results.ensembles(plan, out)
    }
    return Ends(stages, together, environment)


def digest_of(files: dict[str, bytes]) -> str:
    whole = hashlib.sha256()
    for name in sorted(name for name in files if name.endswith(".safetensors")):
        whole.update(f"{name} {hashlib.sha256(files[name]).hexdigest()}\n".encode())
    return whole.hexdigest()


# -- logs compared


@dataclass(frozen=True, slots=True)
class Compared:
    """How many numbers of a log were compared with those of an uninterrupted run, and what differs, in words."""

    losses: int = 0
    tests: int = 0
    different: tuple[str, ...] = ()


def compare_logs(straight: Timed, other: Timed) -> Compared:
    """Compares each loss, each failure (`on_nan`) and each evaluation in `other`, which may have one several times: what was trained
    again. A log may lack those between the last event and a kill.

    An evaluation says nothing of its images: where `straight` was there several times, with a rollback in between, each will do."""
    wanted: dict[_Place, list[_Numbers]] = {}
    for place, numbers in _numbers(straight):
        wanted.setdefault(place, []).append(numbers)
    losses = tests = 0
    different = []
    for place, numbers in _numbers(other):
        losses, tests = losses + (place[0] == "loss"), tests + (place[0] not in ("loss", "failure"))
        if numbers not in wanted.get(place, []):
            expected = " or ".join(map(_text, wanted.get(place, []))) or "nothing"
            different.append(f"{_words(place)}: {expected} straight, {_text(numbers)} interrupted")
    return Compared(losses, tests, tuple(different))


_Place = tuple[str, str, int, float]  # kind, stage, iteration, and where in the data that was, if it is reported
_Numbers = tuple[object, ...]


def _numbers(events: Timed) -> Iterator[tuple[_Place, _Numbers]]:
    for _, event in events:
        match event:
            case Iterated():
                yield ("loss", event.stage, event.iter, event.epoch), (event.loss,)
            case NotFinite() if event.until is None:
                failed = (event.what, event.lr, event.done, event.number, event.back_to)
                yield ("failure", event.stage, event.iter, event.position), failed
            case Tested():
                kind = "evaluation of averaged weights" if event.ema else "evaluation"
                yield (kind, event.stage, event.iter, 0), (event.top1, event.top5, event.loss)
            case TestedBeside():
                kind = f"evaluation of averaged weights on {event.val}" if event.ema else f"evaluation on {event.val}"
                yield (kind, event.stage, event.iter, 0), (event.top1, event.top5, event.loss)
            case StageFinished():
                yield ("result", event.stage, event.iterations, 0), result_numbers(event)
            case EnsembleTested():
                yield ("ensemble", event.name, 0, 0), (event.top1, event.top5, event.loss)


def result_numbers(r: StageFinished) -> tuple[float | None, ...]:
    """What of a stage's result follows from its training alone, and not from time or place."""
    beside = (figure for _, top1, top5, loss, _ in r.beside for figure in (top1, top5, loss))
    return (r.loss, r.top1, r.top5, r.test_loss, r.ema_top1, r.ema_top5, r.ema_test_loss, *beside)


def _words(place: _Place) -> str:
    kind, name, iter, _ = place
    return f"{kind} {name}" if kind == "ensemble" else f"{kind} of {name} at iteration {iter}"


def _text(numbers: _Numbers) -> str:
    return ", ".join(map(repr, numbers))


def went_on(events: Timed) -> bool:
    """Whether the life with these events started from what another had left on disk, and not from the seed."""
    for _, event in events:
        if isinstance(event, StageStarted | PieceStarted):
            begins = event.begins if isinstance(event, StageStarted) else 0
            return event.iter > begins or not event.start.startswith("seed ")
        if isinstance(event, Tested):  # of a stage that was finished but for that
            return True
    return False


def promises(events: Timed) -> list[str]:
    """What the run said about the bits that it went on from."""
    return [event.text for _, event in events if isinstance(event, Note) and ("BIT-EXACT" in event.text)]


# -- the answer


@dataclass(frozen=True, slots=True)
class Lived:
    """What is shown of one life. `hit` '' if it came to the end by itself; `at`: how far it was then, in words; `start`: what it
    went on from, '' if it trained nothing; `went_on`: whether that was a snapshot, `inside`: one amid a stage."""

    workers: int
    start: str
    went_on: bool
    promise: str
    hit: str
    at: str
    code: int
    inside: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ends`: of each interrupted run. `repeatable`: whether a second uninterrupted run gave the bits of the first; None where all
    is equal, and the question did not come up."""

    schedule: Schedule
    options: VerifyOptions
    lives: tuple[Lived, ...]
    wanted: Ends
    ends: tuple[Ends, ...]
    compared: Compared
    repeatable: bool | None
    seconds: float

    @property
    def equal(self) -> bool:
        return not self.compared.different and all(e.same(self.wanted) for e in self.ends)

    @property
    def promised(self) -> bool:
        return self.wanted.environment.get("device") == "cpu"

    @property
    def hits(self) -> int:
        return sum(bool(life.hit) for life in self.lives)

    @property
    def went_on(self) -> int:
        """Lives that went on from a snapshot. Where it is 0 nothing could have differed."""
        return sum(life.went_on for life in self.lives)


def life_line(number: int, life: Lived) -> str:
    """One line for one process life."""
    start = f"from {life.start}" if life.start else "at its start" if life.hit else "nothing left to train"
    said = life.promise.partition(":")[0].partition(", not")[0].removeprefix("resume is ")
    promise = f" ({said})" if said else ""
    code = f", exit code {life.code}" if life.code >= 0 else ""
    end = f"{life.hit} {life.at}{code}" if life.hit else "to the end"
    return f"  life {number}, {count(life.workers, 'worker')}: {start}{promise}; {end}"


def render(verdict: Verdict) -> str:
    """The table and the answer, as text."""
    rows: list[Sequence[str]] = [("stage", "iterations", "digest straight", "digest interrupted", "evaluation", "")]
    for name, end in verdict.wanted.stages.items():
        others = [e.stages.get(name) for e in verdict.ends]
        digests = list(dict.fromkeys(o.digest[:16] if o else "none" for o in others))
        tested = all(o is not None and o.result == end.result for o in others)
        same = all(o == end for o in others)
        rows.append(
            (
                name,
                str(end.iterations),
                end.digest[:16],
                " ".join(digests),
                "equal" if tested else "DIFFERENT",
                "equal" if same else "DIFFERENT",
            )
        )
    lines = ["", *columns(rows), ""]
    for name, numbers in verdict.wanted.ensembles.items():
        same = all(e.ensembles.get(name) == numbers for e in verdict.ends)
        lines.append(f"ensemble {name}: {'equal' if same else 'DIFFERENT'}")
    compared = verdict.compared
    lines.append(
        f"{compared.losses} losses and {count(compared.tests, 'evaluation')} compared: "
        + (f"{len(compared.different)} different" if compared.different else "all equal")
    )
    lines += [f"  {text}" for text in compared.different[:5]]
    return "\n".join([*lines, "", *_answer(verdict)])


def _answer(verdict: Verdict) -> list[str]:
    options = verdict.options
    inside = sum(life.inside for life in verdict.lives)
    took = (
        f"{count(verdict.hits, 'interruption')} in {len(verdict.lives)} lives, {verdict.went_on} of which went on from a snapshot, "
        f"{inside} of these amid a stage"
    )
    again = f"`--kills {options.kills} --seed {options.seed}`, {duration(verdict.seconds)}"
    if verdict.equal:
        word = "BIT-EXACT" if verdict.promised else "EQUAL"
        more = "" if verdict.promised else " A GPU does not promise it another time."
        return [
            f"{word}: interrupted equals uninterrupted ({took}; {again}).{more}",
            f"It holds for {conditions(verdict)}.",
        ]
    lines = [f"DIFFERENT: interrupted does not equal uninterrupted ({took}; {again})."]
    if verdict.repeatable:
        lines.append("An uninterrupted run repeats itself here: what differs comes from the interruptions.")
    else:
        lines.append(
            "A second uninterrupted run differs from the first, too: what computes here does not repeat itself."
        )
    if verdict.promised:
        lines.append("On a CPU it should: this is a bug of stagerun or of torch, or a defect of processor or memory.")
    else:
        lines.append("On a GPU nothing is promised: a run that goes on there is EQUIVALENT.")
    return lines


def conditions(verdict: Verdict) -> str:
    """What the answer depends on, in words."""
    found = dict(verdict.wanted.environment)
    if verdict.schedule.determinism is Determinism.ELASTIC and verdict.options.then_workers is not None:
        found["workers"] = f"{found['workers']}, {verdict.options.then_workers}"
    order = ("torch", "device", "processor", "instruction set", "threads", "workers", "reducer")
    names = [n for n in order if n in found] + [n for n in found if n not in (*order, "processor flags")]
    return ", ".join(f"{name} {found[name]}" for name in names)


def as_record(verdict: Verdict) -> str:
    """The whole as one JSON object."""
    stages = []
    for name, end in verdict.wanted.stages.items():
        others = [e.stages.get(name) for e in verdict.ends]
        stages.append(
            {
                "stage": name,
                "iterations": end.iterations,
                "straight": end.digest,
                "interrupted": list(dict.fromkeys(o.digest if o else None for o in others)),
                "equal": all(o == end for o in others),
            }
        )
    compared = verdict.compared
    record = {
        "schedule": verdict.schedule.name,
        "verdict": "BIT-EXACT" if verdict.equal and verdict.promised else "EQUAL" if verdict.equal else "DIFFERENT",
        "equal": verdict.equal,
        "promised": verdict.promised,
        "repeatable": verdict.repeatable,
        "environment": verdict.wanted.environment,
        "then_workers": verdict.options.then_workers,
        "kills": verdict.options.kills,
        "seed": verdict.options.seed,
        "iters": verdict.options.iters,
        "interruptions": verdict.hits,
        "went_on": verdict.went_on,
        "lives": [asdict(life) for life in verdict.lives],
        "stages": stages,
        "ensembles": {
            name: all(e.ensembles.get(name) == numbers for e in verdict.ends)
            for name, numbers in verdict.wanted.ensembles.items()
        },
        "losses": compared.losses,
        "evaluations": compared.tests,
        "different": list(compared.different),
        "seconds": round(verdict.seconds, 1),
    }
    return json.dumps(record, indent=2)
