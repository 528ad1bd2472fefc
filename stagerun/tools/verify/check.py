"""A run against the proofs in its log: their chains, its snapshots, and what some stretches come to when they are trained again."""

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, StorageError, UsageError
from stagerun.base.events import Event, NotFinite, Proof, Renamed, RunStarted, SnapshotWritten, StageStarted
from stagerun.base.recipe import Determinism, Schedule, Stage
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import count, listed
from stagerun.command.ending import say
from stagerun.engine.codec import combined, decode, mixed
from stagerun.engine.codec import digest as digest_on_host
from stagerun.engine.device import differences
from stagerun.engine.state import counters
from stagerun.plan import changed_fields
from stagerun.plan.counting import lineage
from stagerun.schedule import parting
from stagerun.schedule.early_stop import NOTHING_YET
from stagerun.schedule.plateau import FRESH
from stagerun.store.logged import event_of
from stagerun.store.second_names import borrow
from stagerun.system import signals
from stagerun.tools.verify.child import Child
from stagerun.tools.verify.command import ChildFailed, VerifyOptions
from stagerun.tools.verify.proofs import (
    Course,
    Leg,
    Return,
    Saved,
    Stretch,
    broken_chains,
    courses_of,
    legs,
    missing,
    next_from,
    stretches,
)
from stagerun.tools.verify.stored import stored_schedule
from stagerun.train.output import DISK, LOG, find_target, plan_of
from stagerun.train.progress import AVERAGE, MOMENTUM, MOST_STATE, REPLICAS, STATE, WEIGHTS, progress_of

_KINDS = (Proof, StageStarted, RunStarted, NotFinite, SnapshotWritten, Renamed)
_WANTED = tuple(b'"event": "%b"' % kind.__name__.encode() for kind in _KINDS)
# How far weights trained again on another processor may be from the run's, as a share of how far the stretch has moved them.
TOLERANCE = 0.2


@dataclass(slots=True)
class Findings:
    """`trained`: proofs reached by training; `unlike`: why bits may differ from the run's here; `apart`: the largest distance of weights
    where they do."""

    proofs: int = 0
    snapshots: int = 0
    trained: int = 0
    iterations: int = 0
    wrong: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    apart: float | None = None

    @property
    def verdict(self) -> str:
        if self.wrong:
            return "DIFFERS"
        if self.unlike:
            return "EQUIVALENT" if self.apart is not None else "NOT COMPARABLE"
        return "BIT-EXACT" if self.trained else "CONSISTENT"


def verify(options: VerifyOptions) -> int:
    target = find_target(options.folder, options.overrides, options.out)
    schedule = target.schedule or stored_schedule(target.out, options.trust_code)
    found = _Check(options, schedule, target.out).findings()
    if options.as_json:
        say(json.dumps({"verdict": found.verdict, **asdict(found)}, indent=1))
        return ExitCode.RANKS_DIFFER if found.wrong else ExitCode.DONE
    did = (
        f"{count(found.proofs, 'proof')} chained, {count(found.snapshots, 'snapshot')} compared with theirs, {found.trained} reached by "
        f"training {count(found.iterations, 'iteration')} again"
    )
    why = "; ".join(found.unlike)
    answers = {
        "DIFFERS": f"DIFFERS: {count(len(found.wrong), 'thing')} not as the run says ({did})",
        "EQUIVALENT": f"EQUIVALENT, not BIT-EXACT: {why} ({did}; weights are {found.apart or 0.0:.1g} of their way apart at most)",
        "NOT COMPARABLE": f"NOT COMPARABLE: {why}, and the run has no later snapshot to compare with ({did})",
        "CONSISTENT": f"CONSISTENT, with nothing trained again ({did})",
        "BIT-EXACT": f"BIT-EXACT: {did}",
    }
    say("\n".join(["", *(f"  {text}" for text in found.wrong), answers[found.verdict]]))
    return ExitCode.RANKS_DIFFER if found.wrong else ExitCode.DONE


class _Check:
    def __init__(self, options: VerifyOptions, schedule: Schedule, out: Path) -> None:
        self.options, self.out, self.schedule = options, out, schedule
        self.plan = plan_of(schedule, out)
        events = list(self._under_new_names(list(_events(out / LOG))))
        self.courses, wrong = courses_of(events)
        self.found = Findings(proofs=sum(len(course.proofs) for course in self.courses.values()), wrong=wrong)
        if not self.courses:
            raise UsageError(
                f"{out / LOG} has no proofs",
                "a run writes them with `audit_param { proof_iter: 100 }` in the `solver` of its schedule",
            )
        self._refuse_stale()
        runs = [event for event in events if isinstance(event, RunStarted)]
        if not runs:
            raise UsageError(f"{out / LOG} does not say how it was run", "it has no RunStarted: no run has written it")
        self.elastic, self.last = schedule.determinism is Determinism.ELASTIC, runs[-1]
        self.snapshots = list(self._saved())

    def _refuse_stale(self) -> None:
        if not self.plan.stale:
            return
        lines = [f"{self.out} is of another schedule:"]
        for one in self.plan.stale:
            lines += [f"  stage `{one.stage.name}`: {one.why}", *(f"    {change}" for change in one.changes)]
        hint = "give the schedule as it was when these stages were trained, with the same --set"
        if Path(self.options.folder) == self.out:
            hint += f", and --out {self.out}"
        else:
            hint += f"; or `stagerun verify {self.out}`, which takes each stage from its snapshot"
        raise UsageError("\n".join(lines), hint)

    def _under_new_names(self, events: Sequence[Event]) -> Iterator[Event]:
        """Yield the events of a renamed stage under its present name. The log says it where the snapshots with the old one are gone."""
        last = [(len(events), ref.name, ref.stage) for ref in self.plan.inventory.snapshots if ref.trained_as]
        logged = [(n, name, e.stage) for n, e in enumerate(events) if isinstance(e, Renamed) for name in e.snapshots]
        renames, names = list[tuple[int, str, str]](), dict[str, str]()
        for n, snapshot, new in logged + last:
            place = store.parse_name(snapshot)
            # Each life tells of it again; by then another stage may have the old name.
            if place is not None and names.get(place.stage) != new:
                names[place.stage] = new
                names.pop(new, None)
                renames.append((n, place.stage, new))
        for n, event in enumerate(events):
            if isinstance(event, Proof | StageStarted | NotFinite | SnapshotWritten):
                for later, old, new in renames:
                    if n < later and event.stage == old:
                        event = replace(event, stage=new)
            yield event

    def _saved(self) -> Iterator[Saved]:
        stages = {planned.stage.name: planned.stage for planned in self.plan.stages}
        refs = self.plan.inventory.snapshots
        parents = {ref.stage: ref.parent for ref in refs}  # of each stage's newest: --redo leaves others
        for ref in refs:
            if ref.stage not in stages or ref.parent != parents[ref.stage] or changed_fields(ref, stages[ref.stage]):
                continue
            try:
                text = store.read_file(DISK, self.out, ref.name, STATE, MOST_STATE)
                yield Saved(ref, progress_of({STATE: text}).rollbacks)
            except (store.Damaged, ValueError, KeyError) as error:
                self.found.wrong.append(_unusable(ref, error))

    def _resources(self, life: RunStarted) -> tuple[int, int]:
        workers = self.last.workers if self.elastic else life.workers
        return self.options.nproc or workers, self.options.threads or life.threads

    def findings(self) -> Findings:
        found = self.found
        found.wrong += broken_chains(self.schedule, self.courses)
        for planned in self.plan.stages:
            name = planned.stage.name
            if lacking := missing(planned, self.courses.get(name)):
                where = f"`{name}` at iteration {listed([*map(str, lacking)], 3)}"
                whole = f"stage `{name}`, which is trained"
                found.wrong.append(f"the log has no proof of {where if name in self.courses else whole}")
        self._check_snapshots()
        chosen = stretches(
            self.schedule, self.courses, self.snapshots, self.options.proofs, self.options.seed, self._resources
        )
        again = "nothing is trained again"
        if chosen:
            needs = sorted(
                {(leg.workers, leg.threads) for one in chosen for leg in one.legs} or {self._resources(self.last)}
            )
            how = listed(
                [f"{count(workers, 'worker')} with {count(threads, 'thread')} each" for workers, threads in needs]
            )
            iterations = count(sum(one.iterations for one in chosen), "iteration")
            again = f"training {iterations} again in {count(len(chosen), 'part')}, {how}"
        self._say(
            f"verifying {self.out}: {count(found.proofs, 'proof')}, {count(found.snapshots, 'snapshot')} compared with theirs; {again}"
        )
        for number, one in enumerate(chosen, 1):
            wrong, unlike = len(found.wrong), len(found.unlike)
            if one.legs:  # else no run has trained it, which is said already
                self._train_again(one)
            state = "on another processor" if len(found.unlike) > unlike else "the same"
            state = "differs" if len(found.wrong) > wrong else state
            self._say(f"  {number}/{len(chosen)} {one.stage}, {one.begins} to {one.until}: {state}")
        return found

    def _say(self, text: str) -> None:
        if not self.options.as_json:
            say(text)

    def _check_snapshots(self) -> None:
        """Compare each snapshot with the proof at its iteration, and its chain with the newest proof up to there."""
        wrong = self.found.wrong
        for one in self.snapshots:
            ref, course = one.ref, self.courses.get(one.ref.stage)
            if course is None or course.discarded(ref.iter, one.number):
                continue
            try:
                files = store.read(DISK, self.out, ref)
                state, chain = state_in(self.schedule.stage(ref.stage), ref, files), progress_of(files).proof
            except (store.Damaged, ValueError, KeyError) as error:
                wrong.append(_unusable(ref, error))
                continue
            if one.number != course.number(ref.iter):
                times = count(one.number, "time")
                wrong.append(
                    f"snapshot {ref.name} has gone back {times} (`on_nan`), and the log says {course.number(ref.iter)}"
                )
            proof = course.proofs.get(ref.iter)
            before = [its.chain for n, its in course.proofs.items() if n <= ref.iter]
            self.found.snapshots += proof is not None
            if proof is not None and state != proof.state:
                wrong.append(f"snapshot {ref.name} holds another state than the log proves")
            if chain != (before[-1] if before else ""):
                wrong.append(f"snapshot {ref.name} has another chain of proofs than the log")

    # -- training again

    def _train_again(self, one: Stretch) -> None:
        planned = next(p for p in self.plan.stages if p.stage.name == one.stage)
        base = [one.base] if one.base is not None else []
        needed = [*base, *lineage(self.schedule, self.plan, planned)]
        with tempfile.TemporaryDirectory(prefix="stagerun-verify-") as name:
            out = Path(name) / "out"
            borrow(self.out, out, list(dict.fromkeys(ref.name for ref in needed)))
            self._train(one.stage, one.legs, out)
            self.found.iterations += one.iterations
            self._compare(one, out)

    def _train(self, stage: str, parts: Sequence[Leg], out: Path) -> None:
        said = out.parent / "said"
        for leg in parts:
            with Child(self.options.of_leg(out, stage, leg), said) as child:
                try:
                    code = child.process.wait()
                except KeyboardInterrupt:
                    signals.settle()  # a second one would come in between
                    raise
            if code not in (ExitCode.DONE, ExitCode.SAVED):
                raise ChildFailed(f"training `{stage}` again up to {leg.until}", code, said)

    def _compare(self, one: Stretch, out: Path) -> None:
        wanted, again = self.courses[one.stage].proofs, _course_in(out, one.stage)
        reached = [n for n in one.iters if n in again.proofs]
        different = [n for n in reached if again.proofs[n].state != wanted[n].state]
        self.found.trained += len(reached)
        if not different and len(reached) == len(one.iters) and again.returns == one.returns:
            return
        if why := self._unlike(one.stage, out):
            self.found.unlike += [text for text in why if text not in self.found.unlike]
            self._measure(one, again, out)
            return
        what = f"`{one.stage}` trained again from iteration {one.begins}"
        if again.returns != one.returns:
            what += f" failed at {_failures(again.returns)}, and in the log at {_failures(one.returns)}"
        elif different:
            what += f" has another state at iteration {different[0]} than the log proves"
        else:
            what += f" never came to iteration {next(n for n in one.iters if n not in again.proofs)}"
        self.found.wrong.append(what)

    def _unlike(self, stage: str, out: Path) -> list[str]:
        """Return why bits may differ from the run's. It may have changed machines: any snapshot of it may be of another environment."""
        made = store.inventory(DISK, out).of(stage)
        same: tuple[str, ...] = () if self.options.nproc else ("workers", "reducer")  # those of each life
        same += () if self.options.threads else ("threads",)
        refs = [one.ref for one in self.snapshots]
        theirs = [ref for ref in refs if ref.stage == stage] or refs
        if not theirs:
            return ["no snapshot of the run says on what it was trained"]
        for ref in theirs if made else ():
            before, now = ({n: t for n, t in r.environment.items() if n not in same} for r in (ref, made[-1]))
            if why := differences(before, now, self.elastic):
                return why
        return []

    def _measure(self, one: Stretch, again: Course, out: Path) -> None:
        """Train on to the run's next snapshot, and measure how far apart the weights are there."""
        course = self.courses[one.stage]
        if again.returns != one.returns:  # it has seen other images
            text = (
                f"`{one.stage}` failed at {_failures(again.returns)} here, and in the run at {_failures(one.returns)}"
            )
            self.found.unlike.append(text)
            return
        theirs = next_from(self.snapshots, one.stage, course, one.until)
        if theirs is None:
            return
        iter = theirs.ref.iter
        if iter > one.until:
            self._train(one.stage, legs(course, one.until, course.number(one.until), iter, self._resources), out)
            self.found.iterations += iter - one.until
        mine = [ref for ref in store.inventory(DISK, out).of(one.stage) if ref.iter == iter]
        if not mine or _course_in(out, one.stage).returns != course.between(one.number, iter):
            return
        before = store.read(DISK, self.out, one.base) if one.base is not None else None
        apart = distance(store.read(DISK, self.out, theirs.ref), store.read(DISK, out, mine[-1]), before)
        self.found.apart = max(self.found.apart or 0.0, apart)
        if apart > TOLERANCE:
            self.found.wrong.append(
                f"`{one.stage}` trained again is {apart:.2f} of its way apart at iteration {iter}, and {TOLERANCE} is allowed"
            )


def _failures(returns: Mapping[int, Return]) -> str:
    return listed([f"iteration {one.iter} (back to {one.back_to})" for one in returns.values()]) if returns else "none"


def _unusable(ref: SnapshotRef, error: Exception) -> str:
    what = "is damaged" if isinstance(error, store.Damaged) else "is not one that a run writes"
    return f"snapshot {ref.name} {what}: {error}"


def _course_in(out: Path, stage: str) -> Course:
    return courses_of(_events(out / LOG))[0].get(stage, Course())


def _events(log: Path) -> Iterator[Event]:
    """Yield the events of a log that matter here, without damaged lines."""
    try:
        with open(log, "rb") as file:
            for line in file:
                if any(word in line for word in _WANTED):
                    try:
                        parsed = event_of(line)
                    except ValueError:
                        continue
                    if parsed is not None:
                        yield parsed[1]
    except FileNotFoundError:
        raise UsageError(f"{log.parent} has no log of a run", "--out names the folder that `run` wrote") from None
    except OSError as error:
        raise StorageError(f"{log}: can't be read: {error.strerror}") from None


def state_in(stage: Stage, ref: SnapshotRef, files: Mapping[str, bytes]) -> str:
    """Return the digest of a snapshot's state as a Proof has it. KeyError, ValueError for what no run writes."""
    solver, progress = stage.solver, progress_of(files)
    digest = digest_on_host if ref.environment.get("device") == "cpu" else mixed
    digests = {name: digest(t) for file in (WEIGHTS, MOMENTUM) for name, t in decode(files[file]).items()}
    if AVERAGE in files:
        digests |= {f"ema/{name}": digest(t) for name, t in decode(files[AVERAGE]).items()}
    if solver.sync is not None and REPLICAS in files and ref.iter > parting(solver):
        # A proof is of the first replica: its own tensors, and those that all have in common.
        first = {n.partition("/")[2]: digest(t) for n, t in decode(files[REPLICAS]).items() if n.startswith("0/")}
        digests = {f"0/{name}": first.get(name, known) for name, known in digests.items()}
    plateau = progress.plateau or FRESH
    state = (ref.iter, plateau, NOTHING_YET, progress.skips, progress.skips_in_all, progress.rollbacks)
    return f"{combined(digests | counters(*state)):016x}"


def distance(theirs: Mapping[str, bytes], mine: Mapping[str, bytes], before: Mapping[str, bytes] | None) -> float:
    """Return how far the weights of two snapshots are apart, as a share of how far `theirs` has moved since `before` (None: of its norm)."""
    a, b = decode(theirs[WEIGHTS]), decode(mine[WEIGHTS])
    start = decode(before[WEIGHTS]) if before is not None else {}
    apart = moved = 0.0
    for name, tensor in a.items():
        if tensor.is_floating_point() and name in b:
            apart += float((tensor.double() - b[name].double()).square().sum())
            moved += float((tensor.double() - (start[name].double() if name in start else 0.0)).square().sum())
    return math.sqrt(apart / moved) if moved else 0.0
