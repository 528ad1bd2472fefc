"""The records of a run: the proofs in its log (`audit_param { proof_iter }`), whether they follow from one another, which stretches of training check
some of them; and the schedule in its snapshots."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stagerun.base.errors import StorageError, UsageError, listing
from stagerun.base.events import Event, Iterated, NotFinite, Proof, Renamed, RunStarted, StageStarted, chained
from stagerun.base.recipe import Schedule, Stage
from stagerun.language import consent
from stagerun.logs.log_file import LOG, Log, read_last_life
from stagerun.plan import PlannedStage, State
from stagerun.plan.counting import under
from stagerun.store import SnapshotRef, inventory, parse_name
from stagerun.tools import output
from stagerun.train.progress import RECIPE


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


def courses_of(events: Iterable[Event]) -> tuple[dict[str, Course], list[str]]:
    """Return the course of each stage with proofs, by its present name, and contradictions in words."""
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
                    old = parse_name(name)
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
    proven = {stage: course for stage, course in courses.items() if course.proofs}
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
            chain = next((p.chain for p in reversed(proofs) if p.iter <= schedule.start_iter(stage)), "")
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

    ref: SnapshotRef
    number: int = 0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Training of a stage from a snapshot (None: from its start) up to iteration `until`, which checks the proofs at `iters`."""

    stage: str
    base: SnapshotRef | None
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


def events_of(out: Path) -> Iterator[Event]:
    """Yield the events of a run's log that matter here, without damaged lines."""
    log = out / LOG
    if not log.exists():
        raise UsageError(f"{log.parent} has no log of a run", "--out names the folder that `run` wrote")
    try:
        wanted = {"Proof", "StageStarted", "RunStarted", "NotFinite", "Renamed"}.__contains__
        yield from (event for _, event in Log(log, wanted=wanted))
    except OSError as error:
        raise StorageError(f"{log}: can't be read: {error.strerror}") from None


def ends_before(stage: str, until: int) -> Callable[[Event], bool]:
    """Return a test, asked of each event of a run, whether the next iteration of the stage is its last."""
    reached = False

    def ends(event: Event) -> bool:
        nonlocal reached
        if isinstance(event, Iterated | StageStarted | NotFinite) and event.stage == stage:
            reached = event.iter + isinstance(event, NotFinite) >= until - 1
        return reached

    return ends


# -- the schedule of a run


def read_schedule(trust_code: bool, folder: str, overrides: Sequence[str]) -> Schedule:
    """Return the schedule of DIR, or of an output folder."""
    target = output.find_target(folder, overrides, None)
    return target.schedule or stored_schedule(target.out, trust_code)


def stored_schedule(out: Path, trust_code: bool) -> Schedule:
    """Return the schedule in the newest snapshot, each stage as the newest snapshot of it says. UsageError if no snapshot can be read, or if
    the schedule names Python that is not trusted."""
    snapshots = under(inventory(output.DISK, out, looking=True), read_last_life(out / LOG).names)
    schedule, newest = output.newest_recipe(out, snapshots), output.newest_snapshot(snapshots)
    if schedule is None or newest is None:
        hint = f"give the schedule's folder, and `--out {out}`"
        raise UsageError(f"{out} has no snapshot that says what was trained", hint)
    refs = {ref.stage: ref for ref in snapshots.snapshots}
    stages = [_as_trained(out, stage, refs.get(stage.name)) for stage in schedule.stages]
    if code := list(dict.fromkeys(name for stage in stages for name in consent.asked(stage))):
        from stagerun.tools.weights.snapshot import sources_in

        if not trust_code:
            raise UsageError(
                f"the schedule in snapshot {newest.name} runs Python that it names: {listing(code, 'and')}",
                "read it; --trust-code runs the snapshot's copy, and with the schedule's folder DIR its own files are taken",
            )
        sources = sources_in(output.DISK, out / "snapshots" / newest.name)
        stages = [consent.trusted(stage, sources) for stage in stages]
        files = [(RECIPE, ""), *sources.files]
        schedule = replace(schedule, files=tuple((f"{out}/{path}", text) for path, text in files))
    # Nothing is written to the scratch folder that a snapshot names.
    schedule = replace(schedule, stages=tuple(stages)).with_data(lambda data: replace(data, scratch=None))
    return output.looked_at(schedule, out)


def _as_trained(out: Path, stage: Stage, ref: SnapshotRef | None) -> Stage:
    if ref is None:
        return replace(stage, identity={})
    recipe = output.recipe_of(out, ref)
    for trained in recipe.stages if recipe is not None else ():
        # If the parent was renamed or replaced, only the newest schedule has what the stage starts from.
        same = (trained.parent, trained.average) == (stage.parent, stage.average)
        if trained.name == (ref.trained_as or ref.stage) and same:
            stage = replace(trained, name=stage.name, enabled=stage.enabled, group=stage.group)
    return replace(stage, identity=dict(ref.identity))
