"""A run against the proofs in its log: their chains, its snapshots, and what some stretches come to when they are trained again."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, StorageError, UsageError
from stagerun.base.events import Event, NotFinite, Proof, Renamed, RunStarted, StageStarted
from stagerun.base.recipe import Determinism, Schedule
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import count, listed
from stagerun.command.ending import say
from stagerun.engine.codec import combined, decode, mixed
from stagerun.engine.codec import digest as digest_on_host
from stagerun.engine.device import differences
from stagerun.engine.state import counters
from stagerun.logs.log_file import LOG, Log
from stagerun.plan import changed_fields
from stagerun.plan.counting import lineage, names_of
from stagerun.schedule.early_stop import NOTHING_YET
from stagerun.schedule.plateau import FRESH
from stagerun.store.layout import snapshots_folder
from stagerun.store.side_folders import borrow
from stagerun.system import signals
from stagerun.tools.status.output import DISK, find_target, plan_of
from stagerun.tools.verify.child import Child
from stagerun.tools.verify.command import ChildFailed, VerifyOptions
from stagerun.tools.verify.proofs import Course, Saved, Stretch, broken_chains, courses_of, missing, stretches
from stagerun.tools.verify.stored import stored_schedule
from stagerun.train.progress import AVERAGE, MOMENTUM, MOST_STATE, STATE, WEIGHTS, progress_of

_KINDS = (Proof, StageStarted, RunStarted, NotFinite, Renamed)
_WANTED = {kind.__name__ for kind in _KINDS}


@dataclass(slots=True)
class Findings:
    """`trained`: proofs reached by training, `out_of_reach`: those that training can't come to; `unlike`: why bits may differ from the run's
    here."""

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


def verify(options: VerifyOptions) -> int:
    target = find_target(options.folder, options.overrides, options.out)
    schedule = target.schedule or stored_schedule(target.out, options.trust_code)
    found = _Check(options, schedule, target.out).findings()
    if options.as_json:
        say(json.dumps({"verdict": found.verdict, **asdict(found)}, indent=1))
    else:
        beyond = f", and {found.out_of_reach} that no kept snapshot leads to" if found.out_of_reach else ""
        did = (
            f"{count(found.proofs, 'proof')} chained, {count(found.snapshots, 'snapshot')} compared with theirs, {found.trained} reached by "
            f"training {count(found.iterations, 'iteration')} again{beyond}"
        )
        answers = {
            "DIFFERS": f": {count(len(found.wrong), 'thing')} not as the run says ({did})",
            "NOT COMPARABLE": f": {'; '.join(found.unlike)} ({did})",
            "CONSISTENT": f", with nothing trained again ({did})",
            "BIT-EXACT": f": {did}",
        }
        say("\n".join(["", *(f"  {text}" for text in found.wrong), found.verdict + answers[found.verdict]]))
    return ExitCode.RANKS_DIFFER if found.wrong else ExitCode.DONE


class _Check:
    def __init__(self, options: VerifyOptions, schedule: Schedule, out: Path) -> None:
        self.options, self.out, self.schedule = options, out, schedule
        self.plan = plan_of(schedule, out)
        events = list(_events(out / LOG))
        renamed = [Renamed(stage=stage, snapshots=(name,)) for name, stage in names_of(self.plan.inventory).items()]
        self.courses, wrong = courses_of([*events, *renamed])
        self.found = Findings(proofs=sum(len(course.proofs) for course in self.courses.values()), wrong=wrong)
        runs = [event for event in events if isinstance(event, RunStarted)]
        if not self.courses or not runs:
            raise UsageError(
                f"{out / LOG} has no proofs",
                "a run writes them with `audit_param { proof_iter: 100 }` in the `solver` of its schedule",
            )
        if self.plan.stale:
            lines = [f"{out} is of another schedule:"]
            for one in self.plan.stale:
                lines += [f"  stage `{one.stage.name}`: {one.why}", *(f"    {change}" for change in one.changes)]
            hint = "give the schedule as it was when these stages were trained, with the same --set"
            raise UsageError(
                "\n".join(lines), f"{hint}; or `stagerun verify {out}`, which takes each stage from its snapshot"
            )
        self.elastic, self.last = schedule.determinism is Determinism.ELASTIC, runs[-1]
        self.snapshots = list(self._saved())

    def _saved(self) -> Iterator[Saved]:
        stages = {planned.stage.name: planned.stage for planned in self.plan.stages}
        refs = self.plan.inventory.snapshots
        parents = {ref.stage: ref.parent for ref in refs}  # of each stage's newest: --redo leaves others
        for ref in refs:
            if ref.stage not in stages or ref.parent != parents[ref.stage] or changed_fields(ref, stages[ref.stage]):
                continue
            try:
                text = store.read_file(DISK, snapshots_folder(self.out) / ref.name, STATE, MOST_STATE)[1]
                yield Saved(ref, progress_of({STATE: text}).rollbacks)
            except (store.Damaged, ValueError, KeyError) as error:
                self.found.wrong.append(_unusable(ref, error))

    def _resources(self, life: RunStarted) -> tuple[int, int]:
        workers = self.last.workers if self.elastic else life.workers
        return self.options.nproc or workers, self.options.threads or life.threads

    def findings(self) -> Findings:
        found, options = self.found, self.options
        found.wrong += broken_chains(self.schedule, self.courses)
        for planned in self.plan.stages:
            name = planned.stage.name
            if lacking := missing(planned, self.courses.get(name)):
                where = f"`{name}` at iteration {listed([*map(str, lacking)], 3)}"
                whole = f"stage `{name}`, which is trained"
                found.wrong.append(f"the log has no proof of {where if name in self.courses else whole}")
        self._check_snapshots()
        chosen, found.out_of_reach = stretches(
            self.schedule, self.courses, self.snapshots, options.proofs, options.seed, self._resources
        )
        iterations = count(sum(one.until - one.begins for one in chosen), "iteration")
        self._say(
            f"verifying {self.out}: {count(found.proofs, 'proof')}, {count(found.snapshots, 'snapshot')} compared with theirs; "
            f"training {iterations} again in {count(len(chosen), 'part')}"
        )
        for number, one in enumerate(chosen, 1):
            wrong, unlike = len(found.wrong), len(found.unlike)
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
            if course is None or one.number < course.number(ref.iter):  # a rollback has left it behind
                continue
            try:
                files = store.read(DISK, self.out, ref)
                state, chain = state_in(ref, files), progress_of(files).proof
            except (store.Damaged, ValueError, KeyError) as error:
                wrong.append(_unusable(ref, error))
                continue
            if one.number > course.number(ref.iter):
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

    def _train_again(self, one: Stretch) -> None:
        planned = next(p for p in self.plan.stages if p.stage.name == one.stage)
        needed = [*([one.base] if one.base is not None else []), *lineage(self.plan, planned)]
        with tempfile.TemporaryDirectory(prefix="stagerun-verify-") as name:
            out, said = Path(name) / "out", Path(name) / "said"
            borrow(self.out, out, list(dict.fromkeys(ref.name for ref in needed)))
            with Child(self.options.of_stretch(out, one), said) as child:
                try:
                    code = child.process.wait()
                except KeyboardInterrupt:
                    signals.settle()  # a second one would come in between
                    raise
            if code not in (ExitCode.DONE, ExitCode.SAVED):
                raise ChildFailed(f"training `{one.stage}` again up to {one.until}", code, said)
            self.found.iterations += one.until - one.begins
            self._compare(one, out)

    def _compare(self, one: Stretch, out: Path) -> None:
        wanted = self.courses[one.stage].proofs
        again = courses_of(_events(out / LOG))[0].get(one.stage, Course()).proofs
        self.found.trained += sum(n in again for n in one.iters)
        wrong = [n for n in one.iters if n not in again or again[n].state != wanted[n].state]
        if not wrong:
            return
        if why := self._unlike(one.stage, out):
            self.found.unlike += [text for text in why if text not in self.found.unlike]
            return
        how = "has another state at" if wrong[0] in again else "never came to"
        self.found.wrong.append(
            f"`{one.stage}` trained again from iteration {one.begins} {how} iteration {wrong[0]}, which the log proves"
        )

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


def _unusable(ref: SnapshotRef, error: Exception) -> str:
    what = "is damaged" if isinstance(error, store.Damaged) else "is not one that a run writes"
    return f"snapshot {ref.name} {what}: {error}"


def _events(log: Path) -> Iterator[Event]:
    """Yield the events of a log that matter here, without damaged lines."""
    if not log.exists():
        raise UsageError(f"{log.parent} has no log of a run", "--out names the folder that `run` wrote")
    try:
        yield from (event for _, event in Log(log, wanted=_WANTED.__contains__))
    except OSError as error:
        raise StorageError(f"{log}: can't be read: {error.strerror}") from None


def state_in(ref: SnapshotRef, files: Mapping[str, bytes]) -> str:
    """Return the digest of a snapshot's state as a Proof has it. KeyError, ValueError for what no run writes."""
    progress = progress_of(files)
    digest = digest_on_host if ref.environment.get("device") == "cpu" else mixed
    digests = {name: digest(t) for file in (WEIGHTS, MOMENTUM) for name, t in decode(files[file]).items()}
    if AVERAGE in files:
        digests |= {f"ema/{name}": digest(t) for name, t in decode(files[AVERAGE]).items()}
    plateau = progress.plateau or FRESH
    state = (ref.iter, plateau, NOTHING_YET, progress.skips, progress.skips_in_all, progress.rollbacks)
    return f"{combined(digests | counters(*state)):016x}"
