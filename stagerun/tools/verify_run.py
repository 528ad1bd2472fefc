"""`stagerun verify OUT`: a run against the proofs in its log (`audit_param { proof_iter }`): that they follow from one another, that its
snapshots are the states that they say, and what some stretches come to when they are trained again."""

import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, StorageError, UsageError
from stagerun.base.events import Event, NotFinite, Proof, Renamed, RunStarted, StageStarted, chained
from stagerun.base.recipe import BEST, Determinism, Schedule
from stagerun.base.text import count, listed
from stagerun.command.ending import say
from stagerun.logs.log_file import LOG, Log
from stagerun.plan import Plan, PlannedStage, State, changed_fields, counting
from stagerun.store.read import borrow
from stagerun.system import signals
from stagerun.tools.output import DISK, find_target, plan_of, stored_schedule
from stagerun.tools.verify import Child, ChildFailed, VerifyOptions

# -- the proofs in a log: whether they follow from one another, and which stretches of training check some of them


@dataclass(slots=True)
class Course:
    """The training of a stage. `lives`: the iterations at which process lives took over; `returns`: by number, the iteration that
    `on_nan: ROLLBACK` went back to, and after which all was trained again."""

    proofs: dict[int, Proof] = field(default_factory=dict)
    lives: list[tuple[int, RunStarted]] = field(default_factory=list)
    returns: dict[int, int] = field(default_factory=dict)

    def number(self, iter: int) -> int:
        """Return how often the stage had gone back when it trained this iteration."""
        return max((number for number, back_to in self.returns.items() if back_to < iter), default=0)

    def start(self, event: StageStarted, life: RunStarted | None, returning: bool) -> None:
        """Forget what is trained again from here on."""
        kept = event.iter if event.iter > event.begins else -1
        if not returning:
            self.returns = {number: back_to for number, back_to in self.returns.items() if back_to < kept}
        self.proofs = {iter: proof for iter, proof in self.proofs.items() if iter <= kept}
        self.lives = [(iter, other) for iter, other in self.lives if iter < event.iter]
        if life is not None:
            self.lives.append((event.iter, life))

    def trained(self, begins: int, until: int) -> list[RunStarted]:
        """Return the lives that trained these iterations."""
        ends = [iter for iter, _ in self.lives[1:]] + [until]
        return [life for (iter, life), end in zip(self.lives, ends, strict=False) if end > begins and iter < until]


def courses_of(events: Iterable[Event], unproven: bool = False) -> tuple[dict[str, Course], list[str]]:
    """Return the course of each stage with proofs, by its present name, and contradictions in words. `unproven`: also of the others."""
    courses: defaultdict[str, Course] = defaultdict(Course)
    wrong: list[str] = []
    life: RunStarted | None = None
    returning, renamed = set[str](), set[str]()
    for event in events:
        match event:
            case RunStarted():
                life = event
                returning.clear()
            case Renamed():
                for name in set(event.snapshots) - renamed:  # each life repeats it
                    renamed.add(name)
                    old = store.parse_name(name)
                    if old is not None and old.stage in courses and event.stage not in courses:
                        courses[event.stage] = courses.pop(old.stage)
            case StageStarted():
                courses[event.stage].start(event, life, event.stage in returning)
                returning.discard(event.stage)
            case NotFinite() if event.back_to is not None and event.until is None:
                course = courses[event.stage]
                earlier = {number: back_to for number, back_to in course.returns.items() if number < event.number}
                course.returns = {**earlier, event.number: event.back_to}
                returning.add(event.stage)
            case Proof():
                courses[event.stage].proofs[event.iter] = event
    proven = {stage: course for stage, course in courses.items() if course.proofs or unproven}
    for stage, course in proven.items():
        course.proofs = dict(sorted(course.proofs.items()))
        if not course.lives:
            wrong.append(f"the log has proofs of `{stage}`, and no run that trained it")
    return proven, wrong


def broken_chains(schedule: Schedule, courses: Mapping[str, Course]) -> list[str]:
    """Return a sentence for each stage whose proofs don't follow from one another, or from the last one of its parent."""
    broken = []
    for stage in schedule.stages:
        chain = ""
        if stage.parent is not None and stage.average is None:
            # The newest proof up to the start: `early_stop` may have ended the parent, or it had been longer when this stage was added.
            proofs = courses.get(stage.parent, Course()).proofs.values()
            ends = [p.chain for p in reversed(proofs) if p.iter <= schedule.start_iter(stage)]
            first = next(iter(courses.get(stage.name, Course()).proofs.values()), None)
            if stage.parent_at == BEST and first is not None:  # the iteration is not in the log
                ends = [end for end in ends if chained(end, first.iter, first.state) == first.chain]
            chain = next(iter(ends), "")
        for proof in courses.get(stage.name, Course()).proofs.values():
            if chained(chain, proof.iter, proof.state) != proof.chain:
                broken.append(
                    f"the proof of `{stage.name}` at iteration {proof.iter} does not follow from the previous one"
                )
                break
            chain = proof.chain
    return broken


def missing(planned: PlannedStage, course: Course | None) -> list[int]:
    """Return the trained iterations that lack their proof."""
    audit, begins = planned.stage.solver.audit, planned.stage.begins
    if audit is None or not audit.proof_iter or planned.state not in (State.DONE, State.RESUME):
        return []
    every = audit.proof_iter
    due = {begins, *range((begins // every + 1) * every, planned.iter + 1, every)}
    if planned.state is State.DONE:
        due.add(planned.iter)
    return sorted(due - (course.proofs.keys() if course is not None else set()))


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot on disk, and how often its stage had gone back."""

    ref: store.SnapshotRef
    number: int = 0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Training of a stage from a snapshot (None: from its start) up to iteration `until`, which checks the proofs at `iters`."""

    stage: str
    base: store.SnapshotRef | None
    begins: int
    until: int
    iters: tuple[int, ...]
    workers: int
    threads: int


def stretches(
    schedule: Schedule,
    courses: Mapping[str, Course],
    snapshots: Sequence[Saved],
    draw: tuple[int, int],
    resources: Callable[[RunStarted], tuple[int, int]],
) -> tuple[list[Stretch], int]:
    """Return the stretches that check some proofs, and how many proofs training can't reach: they come after a rollback or a change of
    workers without a later snapshot. `draw`: how many to draw, and a seed. `resources`: workers and threads for the iterations of a life."""
    reached: list[Stretch] = []
    unreached = 0
    for stage in schedule.stages:
        course = courses.get(stage.name, Course()) if stage.enabled else Course()
        for until in (iter for iter in course.proofs if iter > stage.begins):
            number = course.number(until)
            bases = [
                s.ref for s in snapshots if s.ref.stage == stage.name and s.ref.iter < until and s.number == number
            ]
            base = max(bases, key=lambda ref: (ref.iter, ref.attempt), default=None)
            begins = base.iter if base is not None else stage.begins
            needs = {resources(life) for life in course.trained(begins, until)}
            if len(needs) != 1 or (base is None and number):
                unreached += 1
                continue
            iters = tuple(iter for iter in course.proofs if begins < iter <= until)
            reached.append(Stretch(stage.name, base, begins, until, iters, *needs.pop()))
    drawn = random.Random(draw[1]).sample(range(len(reached)), min(draw[0], len(reached)))
    # The last one reaches furthest.
    longest = {(reached[n].stage, reached[n].begins): reached[n] for n in sorted(drawn)}
    return list(longest.values()), unreached


def events_of(out: Path, *more: str) -> Iterator[Event]:
    """Yield the events of a run's log that matter here, and `more` by their names, without damaged lines."""
    log = out / LOG
    if not log.exists():
        raise UsageError(f"{log.parent} has no log of a run", "--out names the folder that `run` wrote")
    try:
        wanted = {"Proof", "StageStarted", "RunStarted", "NotFinite", "Renamed", *more}.__contains__
        yield from (event for _, event in Log(log, wanted=wanted))
    except OSError as error:
        raise StorageError(f"{log}: can't be read: {error.strerror}") from None


# -- a run


@contextmanager
def trained_again(options: VerifyOptions, plan: Plan, source: Path, one: Stretch) -> Iterator[Path]:
    """Train a stretch of the run in `source` again, with a proof at each iteration, and yield the folder that this wrote. ChildFailed."""
    planned = next(planned for planned in plan.stages if planned.name == one.stage)
    needed = [*([one.base] if one.base is not None else []), *counting.lineage(plan, planned)]
    with tempfile.TemporaryDirectory(prefix="stagerun-verify-") as name:
        out, printed = Path(name) / "out", Path(name) / "output"
        borrow(source, out, list(dict.fromkeys(ref.name for ref in needed)))
        child = VerifyOptions(
            options.folder, options.overrides, str(out), trust_code=options.trust_code,
            nproc=one.workers, threads=one.threads, stretch=f"{one.stage}@{one.until}",
        )  # fmt: skip
        with Child(child.words, printed) as process:
            code = process.process.wait()
        if code not in (ExitCode.DONE, ExitCode.SAVED):
            raise ChildFailed(f"training `{one.stage}` again up to {one.until}", code, printed)
        yield out


@dataclass(slots=True)
class Findings:
    """`trained`: proofs that training reached; `out_of_reach`: proofs that it can't reach; `unlike`: why bits may differ here from the run's."""

    proofs: int = 0
    snapshots: int = 0
    trained: int = 0
    out_of_reach: int = 0
    iterations: int = 0
    wrong: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.wrong:
            return "DIFFERS"
        if self.unlike:
            return "NOT COMPARABLE"
        return "BIT-EXACT" if self.trained else "CONSISTENT"


def verify_run(options: VerifyOptions) -> int:
    target = find_target(options.folder, options.overrides, options.out)
    schedule = target.schedule or stored_schedule(target.out, options.trust_code)
    findings = _Check(options, schedule, target.out).check()
    if options.as_json:
        say(json.dumps({"verdict": findings.verdict, **asdict(findings)}, indent=1))
    else:
        unreached = f", and {findings.out_of_reach} that no kept snapshot leads to" if findings.out_of_reach else ""
        lines = ["", *(f"  {text}" for text in (findings.wrong or findings.unlike))]
        lines.append(
            f"{findings.verdict}: {count(findings.proofs, 'proof')} chained, {count(findings.snapshots, 'snapshot')} compared with theirs, "
            f"{findings.trained} reached by training {count(findings.iterations, 'iteration')} again{unreached}"
        )
        say("\n".join(lines))
    return ExitCode.RANKS_DIFFER if findings.wrong else ExitCode.DONE


class _Check:
    def __init__(self, options: VerifyOptions, schedule: Schedule, out: Path) -> None:
        self.options, self.out, self.schedule = options, out, schedule
        self.plan = plan_of(schedule, out)
        events = list(events_of(out))
        names = counting.names_of(self.plan.inventory)
        events += [Renamed(stage=stage, snapshots=(name,)) for name, stage in names.items()]
        self.courses, wrong = courses_of(events)
        self.findings = Findings(proofs=sum(len(course.proofs) for course in self.courses.values()), wrong=wrong)
        runs = [event for event in events if isinstance(event, RunStarted)]
        if not self.courses or not runs:
            hint = "a run writes them with `audit_param { proof_iter: 100 }` in the `solver` of its schedule"
            raise UsageError(f"the log of {out} has no proofs", hint)
        if self.plan.stale:
            stages = "; ".join(f"stage `{planned.name}`: {planned.why}" for planned in self.plan.stale)
            hint = f"give the schedule as it was; or `stagerun verify {out}`, which takes it from the snapshots"
            raise UsageError(f"{out} is of another schedule: {stages}", hint)
        self.elastic, self.last = schedule.determinism is not Determinism.FIXED, runs[-1]

    def check(self) -> Findings:
        findings, options = self.findings, self.options
        findings.wrong += broken_chains(self.schedule, self.courses)
        for planned in self.plan.stages:
            if iters := missing(planned, self.courses.get(planned.name)):
                where = f"`{planned.name}` at iteration {listed([*map(str, iters)], 3)}"
                whole = f"stage `{planned.name}`, which is trained"
                findings.wrong.append(f"the log has no proof of {where if planned.name in self.courses else whole}")
        snapshots = self._check_snapshots()
        draw = options.proofs, options.seed
        chosen, findings.out_of_reach = stretches(self.schedule, self.courses, snapshots, draw, self._resources)
        iterations = count(sum(one.until - one.begins for one in chosen), "iteration")
        options.say(f"verifying {self.out}: training {iterations} again in {count(len(chosen), 'part')}")
        for number, one in enumerate(chosen, 1):
            wrong, unlike = len(findings.wrong), len(findings.unlike)
            self._train_again(one, snapshots)
            state = "on another processor" if len(findings.unlike) > unlike else "the same"
            state = "differs" if len(findings.wrong) > wrong else state
            options.say(f"  {number}/{len(chosen)} {one.stage}, {one.begins} to {one.until}: {state}")
        return findings

    def _resources(self, life: RunStarted) -> tuple[int, int]:
        workers = self.last.workers if self.elastic else life.workers
        return self.options.nproc or workers, self.options.threads or life.threads

    def _check_snapshots(self) -> list[Saved]:
        """Compare each snapshot with the proof at its iteration, and its chain with the newest proof before it. Return the snapshots that count."""
        with signals.held():
            from stagerun.train.hooks import proven  # and with it torch

        stages = {planned.name: planned.stage for planned in self.plan.stages}
        refs = self.plan.inventory.snapshots
        parents = {ref.stage: ref.parent for ref in refs}  # of each stage's newest: --redo leaves others
        snapshots, wrong = [], self.findings.wrong
        for ref in refs:
            if ref.stage not in stages or ref.parent != parents[ref.stage] or changed_fields(ref, stages[ref.stage]):
                continue
            try:
                state, chain, rollbacks = proven(ref, store.read(DISK, self.out, ref))
            except (store.Damaged, ValueError, KeyError) as error:
                what = "is damaged" if isinstance(error, store.Damaged) else "is not as a run writes it"
                wrong.append(f"snapshot {ref.name} {what}: {error}")
                continue
            snapshots.append(Saved(ref, rollbacks))
            course = self.courses.get(ref.stage)
            if course is None or rollbacks < course.number(ref.iter):  # training went back to before it
                continue
            if rollbacks > course.number(ref.iter):
                times = count(rollbacks, "time")
                wrong.append(
                    f"snapshot {ref.name} has gone back {times} (`on_nan`), and the log says {course.number(ref.iter)}"
                )
            chains = [proof.chain for iter, proof in course.proofs.items() if iter <= ref.iter]
            if proof := course.proofs.get(ref.iter):
                self.findings.snapshots += 1
                if state != proof.state:
                    wrong.append(f"snapshot {ref.name} holds another state than the log proves")
            if chain != (chains[-1] if chains else ""):
                wrong.append(f"snapshot {ref.name} has another chain of proofs than the log")
        return snapshots

    def _train_again(self, one: Stretch, snapshots: Sequence[Saved]) -> None:
        with trained_again(self.options, self.plan, self.out, one) as out:
            self.findings.iterations += one.until - one.begins
            proofs = self.courses[one.stage].proofs
            again = courses_of(events_of(out))[0].get(one.stage, Course()).proofs
            self.findings.trained += sum(iter in again for iter in one.iters)
            wrong = next((n for n in one.iters if n not in again or again[n].state != proofs[n].state), None)
            if wrong is None:
                return
            if why := self._unlike(one.stage, out, [one.ref for one in snapshots]):
                self.findings.unlike += [text for text in why if text not in self.findings.unlike]
                return
            how = "has another state at" if wrong in again else "never came to"
            self.findings.wrong.append(
                f"`{one.stage}` trained again from iteration {one.begins} {how} iteration {wrong}, which the log proves"
            )

    def _unlike(self, stage: str, out: Path, refs: Sequence[store.SnapshotRef]) -> list[str]:
        """Return why bits may differ from the run's. A run may change machines: compare with each snapshot of the stage."""
        from stagerun.engine.device import differences

        again = store.inventory(DISK, out).of(stage)
        refs = [ref for ref in refs if ref.stage == stage] or refs
        if not refs:
            return ["no snapshot of the run says on what it was trained"]
        same = {"workers", "reducer"} if not self.options.nproc else set()  # they may differ between lives
        same |= {"threads"} if not self.options.threads else set()
        for ref in refs if again else ():
            before, now = ({n: t for n, t in r.environment.items() if n not in same} for r in (ref, again[-1]))
            if why := differences(before, now, self.schedule.determinism):
                return why
        return []
