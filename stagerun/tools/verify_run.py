"""`stagerun verify OUT`: a run against the proofs in its log (`audit_param { proof_iter }`): that they follow from one another, that its
snapshots are the states that they say, and what some stretches come to when they are trained again."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, UsageError
from stagerun.base.events import Renamed, RunStarted
from stagerun.base.recipe import Determinism, Schedule
from stagerun.base.text import count, listed
from stagerun.command.ending import say
from stagerun.engine.device import differences
from stagerun.plan import changed_fields, counting
from stagerun.store.read import borrow
from stagerun.tools import output
from stagerun.tools.verify import Child, ChildFailed, VerifyOptions
from stagerun.tools.verify_proofs import (
    Course,
    Saved,
    Stretch,
    broken_chains,
    courses_of,
    events_of,
    missing,
    stored_schedule,
    stretches,
)
from stagerun.train.hooks import proven


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


def verify(options: VerifyOptions) -> int:
    target = output.find_target(options.folder, options.overrides, options.out)
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
        self.plan = output.plan_of(schedule, out)
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
        self._say(f"verifying {self.out}: training {iterations} again in {count(len(chosen), 'part')}")
        for number, one in enumerate(chosen, 1):
            wrong, unlike = len(findings.wrong), len(findings.unlike)
            self._train_again(one, snapshots)
            state = "on another processor" if len(findings.unlike) > unlike else "the same"
            state = "differs" if len(findings.wrong) > wrong else state
            self._say(f"  {number}/{len(chosen)} {one.stage}, {one.begins} to {one.until}: {state}")
        return findings

    def _say(self, text: str) -> None:
        if not self.options.as_json:
            say(text)

    def _resources(self, life: RunStarted) -> tuple[int, int]:
        workers = self.last.workers if self.elastic else life.workers
        return self.options.nproc or workers, self.options.threads or life.threads

    def _check_snapshots(self) -> list[Saved]:
        """Compare each snapshot with the proof at its iteration, and its chain with the newest proof before it. Return the snapshots that count."""
        stages = {planned.name: planned.stage for planned in self.plan.stages}
        refs = self.plan.inventory.snapshots
        parents = {ref.stage: ref.parent for ref in refs}  # of each stage's newest: --redo leaves others
        snapshots, wrong = [], self.findings.wrong
        for ref in refs:
            if ref.stage not in stages or ref.parent != parents[ref.stage] or changed_fields(ref, stages[ref.stage]):
                continue
            try:
                state, chain, rollbacks = proven(ref, store.read(output.DISK, self.out, ref))
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
        planned = next(planned for planned in self.plan.stages if planned.name == one.stage)
        needed = [*([one.base] if one.base is not None else []), *counting.lineage(self.plan, planned)]
        with tempfile.TemporaryDirectory(prefix="stagerun-verify-") as name:
            out, printed = Path(name) / "out", Path(name) / "output"
            borrow(self.out, out, list(dict.fromkeys(ref.name for ref in needed)))
            child = VerifyOptions(
                self.options.folder, self.options.overrides, str(out), trust_code=self.options.trust_code,
                nproc=one.workers, threads=one.threads, stretch=f"{one.stage}@{one.until}",
            )  # fmt: skip
            with Child(child.words, printed) as process:
                code = process.process.wait()
            if code not in (ExitCode.DONE, ExitCode.SAVED):
                raise ChildFailed(f"training `{one.stage}` again up to {one.until}", code, printed)
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
        again = store.inventory(output.DISK, out).of(stage)
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
