"""`stagerun verify-run`: checks a run by its proofs (`audit_param { proof_iter }`), with the images and the schedule's folder."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, StagerunError, StorageError, UsageError
from stagerun.base.events import Event, Proof, RunStarted
from stagerun.base.recipe import Audit, Determinism, Schedule
from stagerun.base.text import count
from stagerun.command.ending import say
from stagerun.command.options import arguments, command, option
from stagerun.command.shared import Folder, Json, Nproc, Out, Overrides, Threads, limits
from stagerun.launch import die_with_launcher
from stagerun.launch.start import Orders, joined, start, work
from stagerun.plan import Plan, State
from stagerun.plan.counting import lineage
from stagerun.store.logged import event_of
from stagerun.store.second_names import borrow
from stagerun.tools.verify_run.proofs import Stretch, broken_chains, proofs_of, stretches
from stagerun.train.command import job_of
from stagerun.train.options import Cut, RunOptions
from stagerun.train.output import DISK, find_target, plan_of

LOG = "log.jsonl"
_WANTED = (b'"event": "Proof"', b'"event": "StageStarted"', b'"event": "RunStarted"')
# How far weights trained again on another processor may be from those of the run, as a share of how far the stretch has moved them.
TOLERANCE = 0.2


@dataclass(frozen=True, slots=True)
class VerifyRunOptions:
    folder: Folder
    overrides: Overrides = ()
    out: Out = None
    iterations: int = option(
        "--iterations N", "Proofs that are checked by training up to them again.", least=0, default=20
    )
    seed: int = option("--seed N", "Draws them.", default=1)
    nproc: Nproc = None
    threads: Threads = None
    as_json: Json = False
    # Set in the processes of a stretch alone.
    stretch: str | None = option("--stretch", "STAGE@ITER up to which is trained.", hidden=True)

    def stretch_arguments(self, folder: Path, out: Path, stretch: Stretch, threads: int) -> list[str]:
        """The command line of a stretch, and of each of its workers."""
        same = arguments(replace(self, folder=str(folder), out=str(out)), "folder", "overrides", "out")
        return ["verify-run", *same, "--threads", str(threads), "--stretch", f"{stretch.stage}@{stretch.until}"]


@dataclass(slots=True)
class Found:
    """What has been checked, and what was wrong, in words. `unlike`: why the bits can't be those of the run here. `apart`: the largest distance
    of weights where they are not."""

    proofs: int = 0
    links: int = 0
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


@command("verify-run")
def verify_run(options: VerifyRunOptions) -> int:
    """Checks a finished or unfinished run by the proofs in its log, which `audit_param { proof_iter }` of its schedule makes.

    All proofs must follow from one another, each snapshot must be the state that is proven at its iteration, and --iterations proofs,
    drawn at random, are trained up to again, from the nearest snapshot before. DIR is the schedule's folder, with the --set of the run; its images
    must be there. Nothing is written into the run's folder.

    BIT-EXACT, on the kind of processor and with the workers and threads of the run: all are the same (exit code 0). EQUIVALENT on another:
    weights trained again are as far as a tolerance from those of the snapshots (0). DIFFERS: something is not what the run says (80).
    """
    if options.stretch is not None:
        return _train(options)
    target = find_target(options.folder, options.overrides, options.out)
    if target.schedule is None:
        raise UsageError(
            f"{options.folder} is an output folder, and the schedule is needed to train again",
            f"give the schedule's folder, and `--out {options.folder}`",
        )
    found = _Check(options, target.schedule, target.out).found()
    say(_as_record(found) if options.as_json else "\n".join(_shown(found)))
    return ExitCode.RANKS_DIFFER if found.wrong else ExitCode.DONE


def _events(log: Path) -> Iterator[Event]:
    """The events of a log that matter here; a line that is not whole is passed over."""
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
    except OSError as error:
        raise StorageError(f"{log}: can't be read: {error.strerror}") from None


class _Check:
    def __init__(self, options: VerifyRunOptions, schedule: Schedule, out: Path) -> None:
        self.options, self.out = options, out
        self.schedule, self.plan = schedule, plan_of(schedule, out)
        events = list(_events(out / LOG))
        self.proofs, self.wrong = proofs_of(events)
        if not self.proofs:
            raise UsageError(
                f"{out / LOG} has no proofs",
                "a run writes them with `audit_param { proof_iter: 100 }` in the `solver` of its schedule",
            )
        self._require_same(self.plan)
        runs = [event for event in events if isinstance(event, RunStarted)]
        if not runs:
            raise UsageError(f"{out / LOG} does not say how it was run", "it has no RunStarted: no run has written it")
        run = runs[-1]
        self.nproc, self.threads = options.nproc or run.workers, options.threads or run.threads
        names = {stage.name for stage in schedule.stages}
        found = store.inventory(DISK, out, looking=True).snapshots
        self.snapshots = [ref for ref in found if ref.stage in names]

    def _require_same(self, plan: Plan) -> None:
        if plan.stale:
            lines = [f"{self.out} is of another schedule:"]
            for one in plan.stale:
                lines += [f"  stage `{one.stage.name}`: {one.why}", *(f"    {change}" for change in one.changes)]
            raise UsageError("\n".join(lines), "give the schedule as it was then, with the same --set")

    def found(self) -> Found:
        found = Found(proofs=sum(map(len, self.proofs.values())), wrong=list(self.wrong))
        found.wrong += broken_chains(self.schedule, self.proofs)
        found.links = found.proofs
        for planned in self.plan.stages:
            audit, name = planned.stage.solver.audit, planned.stage.name
            if audit is not None and audit.proof_iter and planned.state is State.DONE and name not in self.proofs:
                found.wrong.append(f"the log has no proof of stage `{name}`, which is trained")
        self._snapshots(found)
        chosen = stretches(self.schedule, self.proofs, self.snapshots, self.options.iterations, self.options.seed)
        self._say(
            f"verifying {self.out}: {count(found.proofs, 'proof')}, {count(found.snapshots, 'snapshot')} at one of them; training "
            f"{count(sum(one.iterations for one in chosen), 'iteration')} in {count(len(chosen), 'part')} again, "
            f"{count(self.nproc, 'worker')} with {count(self.threads, 'thread')} each"
        )
        for number, one in enumerate(chosen, 1):
            self._stretch(one, found)
            state = "differs" if found.wrong else "on another processor" if found.unlike else "the same"
            self._say(f"  {number}/{len(chosen)} {one.stage}, {one.begins} to {one.until}: {state}")
        return found

    def _say(self, text: str) -> None:
        if not self.options.as_json:
            say(text)

    def _snapshots(self, found: Found) -> None:
        """Each snapshot against the proof at its iteration, where there is one."""
        from stagerun.tools.verify_run.states import chain_in, state_in

        for ref in self.snapshots:
            proof = self.proofs.get(ref.stage, {}).get(ref.iter)
            if proof is None:
                continue
            try:
                files = store.read(DISK, self.out, ref)
                state, chain = state_in(self.schedule.stage(ref.stage), ref, files), chain_in(files)
            except store.Damaged as error:
                found.wrong.append(f"snapshot {ref.name} is damaged: {error}")
                continue
            except (ValueError, KeyError) as error:
                found.wrong.append(f"snapshot {ref.name} is none that a run writes: {error}")
                continue
            found.snapshots += 1
            if state is not None and state != proof.state:
                found.wrong.append(f"snapshot {ref.name} holds another state than the log proves")
            if chain != proof.chain:
                found.wrong.append(f"snapshot {ref.name} has another chain of proofs than the log")

    # -- training again

    def _stretch(self, one: Stretch, found: Found) -> None:
        with tempfile.TemporaryDirectory(prefix="stagerun-verify-") as name:
            out = Path(name) / "out"
            self._copy(one, out)
            said = Path(name) / "said"
            words = self.options.stretch_arguments(Path(self.options.folder), out, one, self.threads)
            with open(said, "wb") as file:
                code = _ended([*words, "--nproc", str(self.nproc)], file)
            if code not in (ExitCode.DONE, ExitCode.SAVED):
                lines = said.read_text(errors="replace").rstrip().splitlines()[-8:]
                raise _Ended(
                    f"training `{one.stage}` again from {one.begins} to {one.until} ended with:\n" + "\n".join(lines),
                    code,
                )
            again = {e.iter: e for e in _events(out / LOG) if isinstance(e, Proof) and e.stage == one.stage}
            self._compare(one, again, out, found)

    def _compare(self, one: Stretch, again: Mapping[int, Proof], out: Path, found: Found) -> None:
        from stagerun.tools.verify_run.states import distance, unlike

        wanted = self.proofs[one.stage]
        found.iterations += one.iterations
        found.trained += len([n for n in one.iters if n in again])
        missing = [n for n in one.iters if n not in again]
        different = [n for n in one.iters if n in again and again[n].state != wanted[n].state]
        if missing:
            found.wrong.append(f"`{one.stage}` trained again never came to iteration {missing[0]}")
        if not different:
            return
        made = store.inventory(DISK, out).of(one.stage)
        theirs = [ref for ref in self.snapshots if ref.stage == one.stage]
        elastic = self.schedule.determinism is Determinism.ELASTIC
        # A run may have gone on in another environment: any of its snapshots may be of that.
        why = next((w for ref in theirs if made and (w := unlike(ref, made[-1], elastic))), [])
        if not why:
            text = f"`{one.stage}` trained again from iteration {one.begins} has another state at iteration {different[0]} than the log proves"
            found.wrong.append(text)
            return
        found.unlike = why
        there = next((ref for ref in theirs if ref.iter == one.until), None)
        mine = next((ref for ref in made if ref.iter == one.until), None)
        if there is None or mine is None:
            return
        before = store.read(DISK, self.out, one.base) if one.base is not None else None
        apart = distance(store.read(DISK, self.out, there), store.read(DISK, out, mine), before)
        found.apart = max(found.apart or 0.0, apart)
        if apart > TOLERANCE:
            found.wrong.append(
                f"`{one.stage}` trained again is {apart:.2f} of its way apart at iteration {one.until}, and {TOLERANCE} is allowed"
            )

    def _copy(self, one: Stretch, out: Path) -> None:
        """What a stretch starts from: its snapshot, those of its ancestors, and their results."""
        planned = next(p for p in self.plan.stages if p.stage.name == one.stage)
        needed = [*([one.base] if one.base is not None else []), *lineage(self.schedule, self.plan, planned)]
        borrow(self.out, out, list(dict.fromkeys(ref.name for ref in needed)))


class _Ended(StagerunError):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.BUG


def _ended(words: list[str], output: object) -> int:
    """The exit code of `stagerun WORDS...`, which ends with this process."""
    child = subprocess.Popen([sys.executable, "-m", "stagerun", *words], stdout=output, stderr=subprocess.STDOUT)  # type: ignore[call-overload]
    try:
        return child.wait()
    except BaseException:
        child.kill()  # what it trains is thrown away
        child.wait()
        raise


def _train(options: VerifyRunOptions) -> int:
    """A stretch, in the process that was started for it, or in a worker of it."""
    assert options.stretch is not None
    stage, _, iter = options.stretch.rpartition("@")

    def proven(schedule: Schedule) -> Schedule:
        """Each iteration has its proof; nothing is evaluated that decides nothing."""
        audit = Audit(compare_iter=0, replay_iter=0, proof_iter=1)
        return replace(
            schedule,
            ensembles=tuple(e for e in schedule.ensembles if any(s.average == e.name for s in schedule.stages)),
            stages=tuple(
                replace(
                    s,
                    solver=replace(
                        s.solver, audit=audit, test_interval=s.solver.test_interval if s.solver.early_stop else 0
                    ),
                )
                for s in schedule.stages
            ),
        )

    cut = Cut(proven, 1, (stage, int(iter)))
    nproc, threads = options.nproc or 1, options.threads or 1
    run = RunOptions(
        options.folder, options.overrides, options.out, only=(stage,), nproc=nproc, threads=threads, retry=True
    )
    command = [*arguments(options, "folder", "overrides", "out", "stretch"), "--threads", str(threads)]
    orders = Orders(("verify-run", *command), threads, limits=limits(()))
    job = job_of(run, cut)
    if joined(options.nproc):
        return work(job, orders)
    die_with_launcher()
    return start(job, orders, nproc)


def _shown(found: Found) -> Iterator[str]:
    yield ""
    yield from (f"  {text}" for text in found.wrong)
    did = (
        f"{count(found.links, 'proof')} chained, {count(found.snapshots, 'snapshot')} compared with theirs, {found.trained} reached by "
        f"training {count(found.iterations, 'iteration')} again"
    )
    if found.verdict == "DIFFERS":
        yield f"DIFFERS: {count(len(found.wrong), 'thing')} not as the run says ({did})"
    elif found.verdict == "EQUIVALENT":
        far = f"; weights are {found.apart:.1g} of their way apart at most" if found.apart is not None else ""
        yield f"EQUIVALENT, not BIT-EXACT: {'; '.join(found.unlike)} ({did}{far})"
    elif found.verdict == "NOT COMPARABLE":
        yield f"NOT COMPARABLE: {'; '.join(found.unlike)}, and no snapshot lies where training came to ({did})"
    elif found.verdict == "CONSISTENT":
        yield f"CONSISTENT, with nothing trained again ({did})"
    else:
        yield f"BIT-EXACT: {did}"


def _as_record(found: Found) -> str:
    return json.dumps({"verdict": found.verdict, **asdict(found)}, indent=1)
