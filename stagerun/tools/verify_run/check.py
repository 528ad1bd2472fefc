"""A run against the proofs in its log: their chains, its snapshots, and what some stretches of it come to when they are trained again."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, StagerunError, StorageError, UsageError
from stagerun.base.events import Event, NotFinite, Proof, Renamed, RunStarted, SnapshotWritten, StageStarted
from stagerun.base.recipe import Determinism, Schedule
from stagerun.base.text import count, listed
from stagerun.command.ending import say
from stagerun.plan import Plan, changed_fields
from stagerun.plan.counting import lineage
from stagerun.store.logged import event_of
from stagerun.store.second_names import borrow
from stagerun.system import signals
from stagerun.tools.verify_resume.interruption import Victim
from stagerun.tools.verify_run.options import VerifyRunOptions
from stagerun.tools.verify_run.proofs import Return, Way, broken_chains, missing, ways_of
from stagerun.tools.verify_run.stretches import Leg, Saved, Stretch, legs, next_from, stretches
from stagerun.train.output import DISK, plan_of
from stagerun.train.progress import MOST_STATE, STATE, progress_of

LOG = "log.jsonl"
_KINDS = (Proof, StageStarted, RunStarted, NotFinite, SnapshotWritten, Renamed)
_WANTED = tuple(b'"event": "%b"' % kind.__name__.encode() for kind in _KINDS)
_SHOWN = 3  # iterations that are named
# How far weights trained again on another processor may be from those of the run, as a share of how far the stretch has moved them.
TOLERANCE = 0.2


@dataclass(slots=True)
class Found:
    """What has been checked, and what was wrong, in words. `unlike`: why the bits can't be those of the run here. `apart`: the largest distance
    of weights where they are not."""

    proofs: int = 0
    snapshots: int = 0
    trained: int = 0  # proofs that were reached by training
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


class Check:
    def __init__(self, options: VerifyRunOptions, schedule: Schedule, out: Path) -> None:
        self.options, self.out = options, out
        self.schedule, self.plan = schedule, plan_of(schedule, out)
        events = list(self._under_new_names(list(_events(out / LOG))))
        self.ways, self.wrong = ways_of(events)
        if not self.ways:
            raise UsageError(
                f"{out / LOG} has no proofs",
                "a run writes them with `audit_param { proof_iter: 100 }` in the `solver` of its schedule",
            )
        self._require_same(self.plan)
        runs = [event for event in events if isinstance(event, RunStarted)]
        if not runs:
            raise UsageError(f"{out / LOG} does not say how it was run", "it has no RunStarted: no run has written it")
        self.elastic, self.last = schedule.determinism is Determinism.ELASTIC, runs[-1]
        self.snapshots = list(self._saved())

    def _require_same(self, plan: Plan) -> None:
        if plan.stale:
            lines = [f"{self.out} is of another schedule:"]
            for one in plan.stale:
                lines += [f"  stage `{one.stage.name}`: {one.why}", *(f"    {change}" for change in one.changes)]
            hint = "give the schedule as it was when these stages were trained, with the same --set"
            alone = Path(self.options.folder) == self.out
            more = (
                f", and --out {self.out}"
                if alone
                else f"; or `stagerun verify-run {self.out}`, which takes each stage from its snapshot"
            )
            raise UsageError("\n".join(lines), hint + more)

    def _under_new_names(self, events: Sequence[Event]) -> Iterator[Event]:
        """A stage that has another name by now has it in the older events, too. Snapshots under the old one may be gone: then the log says it."""
        last = [(len(events), ref.name, ref.stage) for ref in self.plan.inventory.snapshots if ref.trained_as]
        told = [(n, name, e.stage) for n, e in enumerate(events) if isinstance(e, Renamed) for name in e.snapshots]
        renames, called = list[tuple[int, str, str]](), dict[str, str]()
        for n, snapshot, new in told + last:
            place = store.parse_name(snapshot)
            # Each life tells of it again; by then another stage may have the old name.
            if place is not None and called.get(place.stage) != new:
                called[place.stage] = new
                called.pop(new, None)
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
        starts = {
            ref.stage: ref.parent for ref in refs
        }  # of each the newest: after --redo what it started from before is there, too
        for ref in refs:
            # What a stage has of an older definition, until it is trained again, a plan passes over, too.
            if ref.stage not in stages or ref.parent != starts[ref.stage] or changed_fields(ref, stages[ref.stage]):
                continue
            try:
                text = store.read_file(DISK, self.out, ref.name, STATE, MOST_STATE)
                yield Saved(ref, progress_of({STATE: text}).rollbacks)
            except store.Damaged as error:
                self.wrong.append(f"snapshot {ref.name} is damaged: {error}")
            except (ValueError, KeyError) as error:
                self.wrong.append(_not_of_a_run(ref.name, error))

    def _how(self, life: RunStarted) -> tuple[int, int]:
        workers = self.last.workers if self.elastic else life.workers
        return self.options.nproc or workers, self.options.threads or life.threads

    def found(self) -> Found:
        found = Found(proofs=sum(len(way.proofs) for way in self.ways.values()), wrong=list(self.wrong))
        found.wrong += broken_chains(self.schedule, self.ways)
        for planned in self.plan.stages:
            name = planned.stage.name
            if lacking := missing(planned, self.ways.get(name)):
                found.wrong.append(_lacking(name, lacking) if name in self.ways else _unproven(name))
        self._snapshots(found)
        chosen = stretches(
            self.schedule, self.ways, self.snapshots, self.options.iterations, self.options.seed, self._how
        )
        hows = {(leg.workers, leg.threads) for one in chosen for leg in one.legs} or {self._how(self.last)}
        said = [f"{count(workers, 'worker')} with {count(threads, 'thread')} each" for workers, threads in sorted(hows)]
        self._say(
            f"verifying {self.out}: {count(found.proofs, 'proof')}, {count(found.snapshots, 'snapshot')} compared with theirs; "
            + (
                f"training {count(sum(one.iterations for one in chosen), 'iteration')} again in {count(len(chosen), 'part')}, {listed(said)}"
                if chosen
                else "nothing is trained again"
            )
        )
        for number, one in enumerate(chosen, 1):
            wrong, unlike = len(found.wrong), len(found.unlike)
            self._stretch(one, found)
            differs = len(found.wrong) > wrong
            state = "differs" if differs else "on another processor" if len(found.unlike) > unlike else "the same"
            self._say(f"  {number}/{len(chosen)} {one.stage}, {one.begins} to {one.until}: {state}")
        return found

    def _say(self, text: str) -> None:
        if not self.options.as_json:
            say(text)

    def _snapshots(self, found: Found) -> None:
        """Each snapshot against the proof at its iteration, or else its chain against the proof before."""
        from stagerun.tools.verify_run.states import state_in

        for one in self.snapshots:
            ref, way = one.ref, self.ways.get(one.ref.stage)
            if way is None or way.gave_up(ref.iter, one.number):
                continue
            try:
                files = store.read(DISK, self.out, ref)
                state, chain = state_in(self.schedule.stage(ref.stage), ref, files), progress_of(files).proof
            except store.Damaged as error:
                found.wrong.append(f"snapshot {ref.name} is damaged: {error}")
                continue
            except (ValueError, KeyError) as error:
                found.wrong.append(_not_of_a_run(ref.name, error))
                continue
            if one.number != way.number(ref.iter):
                text = f"snapshot {ref.name} has gone back {count(one.number, 'time')} (`on_nan`), and the log says {way.number(ref.iter)}"
                found.wrong.append(text)
            proof = way.proofs.get(ref.iter)
            before = [its.chain for n, its in way.proofs.items() if n <= ref.iter]
            found.snapshots += proof is not None
            if proof is not None and state != proof.state:
                found.wrong.append(f"snapshot {ref.name} holds another state than the log proves")
            if chain != (before[-1] if before else ""):
                found.wrong.append(f"snapshot {ref.name} has another chain of proofs than the log")

    # -- training again

    def _stretch(self, one: Stretch, found: Found) -> None:
        if not one.legs:  # no run has trained it: that is said already
            return
        with tempfile.TemporaryDirectory(prefix="stagerun-verify-") as name:
            out = Path(name) / "out"
            self._copy(one, out)
            self._train(one.stage, one.legs, out)
            found.iterations += one.iterations
            self._compare(one, out, found)

    def _train(self, stage: str, legs: Sequence[Leg], out: Path) -> None:
        for leg in legs:
            said = out.parent / "said"
            code = _ended(self.options.stretch_arguments(Path(self.options.folder), out, stage, leg), said)
            if code not in (ExitCode.DONE, ExitCode.SAVED):
                lines = said.read_text(errors="replace").rstrip().splitlines()[-8:]
                raise _Ended(f"training `{stage}` again up to {leg.until} ended with:\n" + "\n".join(lines), code)

    def _compare(self, one: Stretch, out: Path, found: Found) -> None:
        wanted, again = self.ways[one.stage].proofs, _way_in(out, one.stage)
        there = [n for n in one.iters if n in again.proofs]
        different = [n for n in there if again.proofs[n].state != wanted[n].state]
        lacking = [n for n in one.iters if n not in again.proofs]
        found.trained += len(there)
        if not different and not lacking and again.returns == one.returns:
            return
        if why := self._unlike(one.stage, out):
            found.unlike += [text for text in why if text not in found.unlike]
            self._measure(one, again, out, found)
        elif again.returns != one.returns:
            text = f"`{one.stage}` trained again from iteration {one.begins} failed at {_failures(again.returns)}, and in the log at {_failures(one.returns)}"
            found.wrong.append(text)
        elif different:
            text = f"`{one.stage}` trained again from iteration {one.begins} has another state at iteration {different[0]} than the log proves"
            found.wrong.append(text)
        else:
            found.wrong.append(f"`{one.stage}` trained again never came to iteration {lacking[0]}")

    def _unlike(self, stage: str, out: Path) -> list[str]:
        """Why the bits need not be those of the run. It may have gone on in another environment: any of its snapshots may be of that."""
        from stagerun.tools.verify_run.states import unlike

        made = store.inventory(DISK, out).of(stage)
        # Those of each life, unless the command says otherwise.
        same = {
            *(() if self.options.nproc else ("workers", "reducer")),
            *(() if self.options.threads else ("threads",)),
        }
        refs = [one.ref for one in self.snapshots]
        theirs = [ref for ref in refs if ref.stage == stage] or refs
        if not theirs:
            return ["no snapshot of the run says on what it was trained"]
        return next((w for ref in theirs if made and (w := unlike(ref, made[-1], self.elastic, same))), [])

    def _measure(self, one: Stretch, again: Way, out: Path, found: Found) -> None:
        """How far weights are apart at the run's next snapshot, up to which is trained on."""
        from stagerun.tools.verify_run.states import distance

        way = self.ways[one.stage]
        if again.returns != one.returns:  # then it has seen other images
            text = (
                f"`{one.stage}` failed at {_failures(again.returns)} here, and in the run at {_failures(one.returns)}"
            )
            found.unlike.append(text)
            return
        theirs = next_from(self.snapshots, one.stage, way, one.until)
        if theirs is None:
            return
        if theirs.ref.iter > one.until:
            further = legs(way, one.until, way.number(one.until), theirs.ref.iter, self._how)
            self._train(one.stage, further, out)
            found.iterations += theirs.ref.iter - one.until
        mine = [ref for ref in store.inventory(DISK, out).of(one.stage) if ref.iter == theirs.ref.iter]
        if not mine or _way_in(out, one.stage).returns != way.between(one.number, theirs.ref.iter):
            return
        before = store.read(DISK, self.out, one.base) if one.base is not None else None
        apart = distance(store.read(DISK, self.out, theirs.ref), store.read(DISK, out, mine[-1]), before)
        found.apart = max(found.apart or 0.0, apart)
        if apart > TOLERANCE:
            found.wrong.append(
                f"`{one.stage}` trained again is {apart:.2f} of its way apart at iteration {theirs.ref.iter}, and {TOLERANCE} is allowed"
            )

    def _copy(self, one: Stretch, out: Path) -> None:
        """What a stretch starts from: its snapshot, those of its ancestors, and their results."""
        planned = next(p for p in self.plan.stages if p.stage.name == one.stage)
        base = [one.base] if one.base is not None else []
        needed = [*base, *lineage(self.schedule, self.plan, planned)]
        borrow(self.out, out, list(dict.fromkeys(ref.name for ref in needed)))


def _lacking(stage: str, iters: Sequence[int]) -> str:
    return f"the log has no proof of `{stage}` at iteration {listed([*map(str, iters)], _SHOWN)}"


def _unproven(stage: str) -> str:
    return f"the log has no proof of stage `{stage}`, which is trained"


def _failures(returns: Mapping[int, Return]) -> str:
    return listed([f"iteration {one.iter} (back to {one.back_to})" for one in returns.values()]) if returns else "none"


def _not_of_a_run(name: str, error: Exception) -> str:
    return f"snapshot {name} is not one that a run writes: {error}"


def _way_in(out: Path, stage: str) -> Way:
    return ways_of(_events(out / LOG))[0].get(stage, Way())


class _Ended(StagerunError):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.BUG


def _events(log: Path) -> Iterator[Event]:
    """The events of a log that matter here, without lines that are damaged."""
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


def _ended(words: list[str], said: Path) -> int:
    """The exit code of `stagerun WORDS...`, of which nothing is left when this process is interrupted."""
    with Victim(words, said) as life:
        try:
            return life.process.wait()
        except KeyboardInterrupt:
            signals.settle()  # a second one would come in between
            raise
