"""`stagerun verify-run`: checks a run by its proofs (`audit_param { proof_iter }`), with the images and the schedule."""

import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, StagerunError, UsageError, listing
from stagerun.base.recipe import Audit, Schedule, Stage
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import count
from stagerun.command.ending import say
from stagerun.command.options import arguments, command
from stagerun.command.shared import limits
from stagerun.language import load
from stagerun.language.consent import asked, trusted
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.stored import read_foreign
from stagerun.launch import die_with_launcher
from stagerun.launch.start import Orders, joined, start, work
from stagerun.plan.counting import under
from stagerun.store.given import looked_at
from stagerun.store.layout import snapshots_folder
from stagerun.tools.verify_run.check import Check, Found
from stagerun.tools.verify_run.options import VerifyRunOptions
from stagerun.tools.verify_run.stretches import Leg, Until
from stagerun.train.command import job_of
from stagerun.train.log_file import names, read_last_life
from stagerun.train.options import Cut, RunOptions
from stagerun.train.output import DISK, LOG, find_target, newest_recipe, newest_snapshot, recipe_text
from stagerun.train.progress import RECIPE


@command("verify-run")
def verify_run(options: VerifyRunOptions) -> int:
    """Checks a finished or unfinished run by the proofs in its log, which `audit_param { proof_iter }` of its schedule makes.

    All proofs must be there and follow from one another, each snapshot must be the state that is proven at its iteration, and --iterations proofs,
    drawn at random, are trained up to again, from the nearest snapshot before, with the workers and threads that trained there. DIR is the
    schedule's folder, with the --set of the run, or the run's own, of which a snapshot has the schedule; the images must be there. Nothing is
    written into the run's folder.

    BIT-EXACT, on the kind of processor of the run: all are the same (exit code 0). EQUIVALENT on another: weights, trained up to the next snapshot,
    are within a tolerance of those in it (0). NOT COMPARABLE: there is none (0). DIFFERS: something is not what the run says (80).
    """
    if options.stretch is not None:
        return _train(options)
    target = find_target(options.folder, options.overrides, options.out)
    schedule = target.schedule or stored_schedule(target.out, options.trust_code)
    found = Check(options, schedule, target.out).found()
    say(_as_record(found) if options.as_json else "\n".join(_shown(found)))
    return ExitCode.RANKS_DIFFER if found.wrong else ExitCode.DONE


def _train(options: VerifyRunOptions) -> int:
    """A leg, in the process that was started for it, or in a worker of it."""
    assert options.stretch is not None
    stage, *numbers = options.stretch.rsplit("@", 3)
    nproc, threads = options.nproc or 1, options.threads or 1
    leg = Leg(int(numbers[0]), nproc, threads, int(numbers[1]), int(numbers[2]))

    def read(folder: str, overrides: Sequence[str]) -> Schedule:
        here = (Path(folder) / SCHEDULE_FILE).exists()
        return load(folder, overrides) if here else stored_schedule(Path(folder), options.trust_code)

    cut = Cut(_proven, 1, Until(stage, leg), read)
    run = RunOptions(
        options.folder, options.overrides, options.out, only=(stage,), nproc=nproc, threads=threads, retry=True
    )
    command = arguments(options, "folder", "overrides", "out", "threads", "trust_code", "stretch")
    orders = Orders(("verify-run", *command), threads, limits=limits(()))
    job = job_of(run, cut)
    if joined(options.nproc):
        return work(job, orders)
    die_with_launcher()
    return start(job, orders, nproc)


def _proven(schedule: Schedule) -> Schedule:
    """Each iteration has its proof; nothing is evaluated that decides nothing."""

    def one(stage: Stage) -> Stage:
        tests = stage.solver.test_interval if stage.solver.early_stop else 0
        audit = Audit(compare_iter=0, replay_iter=0, proof_iter=1)
        return replace(stage, solver=replace(stage.solver, audit=audit, test_interval=tests))

    starts = {stage.average for stage in schedule.stages}
    ensembles = tuple(ensemble for ensemble in schedule.ensembles if ensemble.name in starts)
    return replace(schedule, ensembles=ensembles, stages=tuple(map(one, schedule.stages)))


def _shown(found: Found) -> Iterator[str]:
    yield ""
    yield from (f"  {text}" for text in found.wrong)
    did = (
        f"{count(found.proofs, 'proof')} chained, {count(found.snapshots, 'snapshot')} compared with theirs, {found.trained} reached by "
        f"training {count(found.iterations, 'iteration')} again"
    )
    if found.verdict == "DIFFERS":
        yield f"DIFFERS: {count(len(found.wrong), 'thing')} not as the run says ({did})"
    elif found.verdict == "EQUIVALENT":
        far = f"; weights are {found.apart:.1g} of their way apart at most" if found.apart is not None else ""
        yield f"EQUIVALENT, not BIT-EXACT: {'; '.join(found.unlike)} ({did}{far})"
    elif found.verdict == "NOT COMPARABLE":
        yield f"NOT COMPARABLE: {'; '.join(found.unlike)}, and the run has no later snapshot to compare with ({did})"
    elif found.verdict == "CONSISTENT":
        yield f"CONSISTENT, with nothing trained again ({did})"
    else:
        yield f"BIT-EXACT: {did}"


def _as_record(found: Found) -> str:
    return json.dumps({"verdict": found.verdict, **asdict(found)}, indent=1)


# -- without the schedule's folder


def stored_schedule(out: Path, trust_code: bool) -> Schedule:
    """The schedule as the newest snapshot has it, and in it each stage as its own newest snapshot has it: `--keep` leaves stages as they were trained.
    UsageError if no snapshot can be read, and where it names Python and that is not trusted."""
    life = read_last_life(out / LOG)
    found = under(store.inventory(DISK, out, looking=True), names(life) if life is not None else {})
    schedule, newest = newest_recipe(out, found), newest_snapshot(out, found)
    if schedule is None or newest is None:
        raise UsageError(
            f"{out} has no snapshot that says what was trained", f"give the schedule's folder, and `--out {out}`"
        )
    stages = tuple(_as_trained(schedule, out, {ref.stage: ref for ref in found.snapshots}))
    if code := list(dict.fromkeys(name for stage in stages for name in asked(stage))):
        from stagerun.train.stored import sources_in  # and with it torch

        if not trust_code:
            raise UsageError(
                f"the schedule in snapshot {newest.name} runs Python that it names: {listing(code, 'and')}",
                "read it; --trust-code runs the snapshot's copy, and with the schedule's folder DIR its own files are taken",
            )
        sources = sources_in(DISK, snapshots_folder(out) / newest.name)
        stages = tuple(trusted(stage, sources) for stage in stages)
        files = [(RECIPE, ""), *sources.files]
        schedule = replace(schedule, files=tuple((f"{out}/{path}", text) for path, text in files))
    # Scratch is a folder that is written to.
    return looked_at(replace(schedule, stages=stages).with_data(lambda data: replace(data, scratch=None)), out)


def _as_trained(schedule: Schedule, out: Path, newest: Mapping[str, SnapshotRef]) -> Iterator[Stage]:
    """The stages, `newest` by name what each has on disk."""
    before, read = set[str](), lru_cache(read_foreign)  # one text in most snapshots
    for stage in schedule.stages:
        ref, own = newest.get(stage.name), None
        if ref is not None:
            with suppress(StagerunError, ValueError):  # the check of that snapshot says why
                called = ref.trained_as or ref.stage
                own = next((s for s in read(recipe_text(out, ref)).stages if s.name == called), None)
        if own is not None:
            stage = _under_names_of(schedule, stage, own, before)
        before.add(stage.name)
        yield replace(stage, identity=dict(ref.identity) if ref is not None else {})


def _under_names_of(schedule: Schedule, stage: Stage, own: Stage, before: AbstractSet[str]) -> Stage:
    """A stage as an older schedule has it, in that of today, where it is `stage`: what it starts from may have another name by now, or be gone. In
    that case it gets what `stage` has, and a plan finds out whether that is the same."""
    needed = {own.parent} - {None}
    if own.average is not None:
        known = [e for e in schedule.ensembles if e.name == own.average]
        needed |= {name for e in known for name, _ in e.points} or {own.average}  # which is no stage's name
    start, loss = (own if needed <= before else stage), own.solver.loss
    if loss is not None and loss.teacher is not None and loss.teacher not in before:
        loss = stage.solver.loss
    return replace(
        own, name=stage.name, enabled=stage.enabled, group=stage.group, parent=start.parent, parent_iter=start.parent_iter,
        average=start.average, solver=replace(own.solver, loss=loss),
    )  # fmt: skip
