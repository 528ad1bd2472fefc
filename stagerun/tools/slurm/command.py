"""`stagerun sbatch`: what `run` would refuse is refused here; then the script is written, and queued."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from unicodedata import category

import click

from stagerun import store
from stagerun.base.errors import PeerError, Problem, RecipeError, ResumeRefused, Span, UsageError, listing
from stagerun.base.recipe import Schedule
from stagerun.base.text import columns, count, duration
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, arguments, command, filled, flag, given, option, require_least
from stagerun.command.shared import FASTEST, SLOWEST, Duration, FiniteRange, Folder, Overrides, limits, output_folder
from stagerun.language import load
from stagerun.launch.options import HostOptions
from stagerun.launch.worker_count import check_workers
from stagerun.plan import Plan, make_plan, require_fresh
from stagerun.plan.budget import MOST
from stagerun.plan.ensembles import ensembles_left
from stagerun.store.disk import make_folder
from stagerun.store.errors import reporting
from stagerun.system import signals
from stagerun.system.files import writing
from stagerun.system.lmdb_file import with_sets
from stagerun.system.process import program
from stagerun.tools.slurm.script import Batch, log_file, most_grace, script
from stagerun.train import results
from stagerun.train.command import run
from stagerun.train.hours import find_budget, find_hours
from stagerun.train.logs.table import require_evaluation, require_packages
from stagerun.train.options import RunOptions
from stagerun.train.results import require_progress, standing

_SIGNAL_BEFORE_S = 300
_MOST_SIGNAL_S = 65535  # of sbatch
_MOST_TIME_S = 365 * 86400
_WORKERS = ("--nproc", "--workers-per-node")  # of `run`: here Slurm starts its workers
_NO_TEXT = ("Cc", "Cs")  # Unicode's categories of control characters, and of bytes that are not UTF-8


@dataclass(frozen=True, slots=True, kw_only=True)
class SbatchOptions:
    folder: Folder
    overrides: Overrides = ()
    out: str | None = option("--out FOLDER", "Output folder, seen by all nodes.  [default: ./out/NAME]")
    nodes: int = option("--nodes N", "Nodes of the job.", least=1, default=MISSING)
    time: float = option(
        "--time TIME",
        "Length of one allocation, as 4h. A run that takes longer gets as many as it needs.",
        type=Duration(least=120.0),
        default=MISSING,
    )
    workers_per_node: int | None = option(
        "--workers-per-node N", "Workers on each node.  [default: one per GPU that is asked for, or 1]", least=1
    )
    gpus_per_node: int | None = option("--gpus-per-node N", "GPUs to ask for.  [default: none]", least=1)
    cpus_per_worker: int | None = option(
        "--cpus-per-worker N", "Processors for each worker, on shared nodes.  [default: whole nodes]", least=1
    )
    partition: str | None = option("--partition NAME", "Partition to queue in.")
    account: str | None = option("--account NAME", "Account to charge.")
    signal_before: float | None = option(
        "--signal-before TIME",
        "How long before the end of an allocation all workers are asked to save. Nine tenths of it or more become --grace of `run`.  "
        "[default: 5m, at most a quarter of --time]",
        type=Duration(least=10.0),
    )
    images_per_second: float | None = option(
        "--images-per-second N",
        "Speed of training of the whole job, to tell the number of allocations.  [default: as the last run or rehearsal here]",
        type=FiniteRange(SLOWEST, FASTEST),
    )
    output: str | None = option(
        "--output FILE", "Write the script into FILE, which is not overwritten.  [default: on stdout]"
    )
    submit: bool = flag("--submit", "Queue it with sbatch, and print the job's number.")
    words: tuple[str, ...] = argument("[-- OPTIONS OF RUN]", nargs=-1, type=click.UNPROCESSED, default=())

    @property
    def workers(self) -> int:
        """On each node."""
        return self.workers_per_node or self.gpus_per_node or 1

    @property
    def seconds_before(self) -> int:
        """The signal comes so long before the end."""
        return int(min(_SIGNAL_BEFORE_S, self.time / 4) if self.signal_before is None else self.signal_before)


@command()
def sbatch(options: SbatchOptions) -> None:
    """Writes a batch script for Slurm that runs a schedule to its end, in as many allocations as that takes.

    All that `run` would refuse is reported now, and not when the job's turn has come. Before an allocation ends the workers save, and the
    job queues itself again; so it does when a node is lost or it is preempted. It ends when all is done, with a mistake, after three
    allocations that came to nothing, or by scancel. The script is plain, to be read and changed. What follows `--` goes to `run`.
    """
    words = [*arguments(options, "overrides", "out"), *options.words]
    values = run.make_context("run", [options.folder, *words], parent=click.get_current_context().parent).params
    queue(options, filled(RunOptions, values), filled(HostOptions, values), words)


def queue(options: SbatchOptions, task: RunOptions, hosts: HostOptions, words: Sequence[str]) -> None:
    """`task` and `hosts`: what `run` gets. `words`: that as it was typed."""
    _require_sense(options, task, hosts)
    schedule, plan, out = _look(options, task)
    _look_at_images(schedule)
    batch = _batch(options, words, schedule, plan, out)
    text = script(batch)
    _make_parent(out)
    if options.output is not None:
        _write(Path(options.output), text)
    elif not options.submit:
        click.echo(text, nl=False)
    if options.submit:
        _submit(batch, text, task)


def _require_sense(options: SbatchOptions, task: RunOptions, hosts: HostOptions) -> None:
    """RecipeError with a mistake for each number that doesn't go with another one."""
    found = []
    if options.time != int(options.time) or options.time > _MOST_TIME_S:
        found.append(("--time", "whole seconds, and no more than a year", ""))
    if options.seconds_before > min(_MOST_SIGNAL_S, options.time / 2):
        most = duration(min(_MOST_SIGNAL_S, options.time / 2))
        found.append(("--signal-before", f"{most} at most: half of --time, and no more than sbatch takes", ""))
    if task.grace is not None and task.grace > most_grace(options.seconds_before):
        most = duration(most_grace(options.seconds_before))
        text = f"{most} at most, since the signal comes {duration(options.seconds_before)} before the end (--signal-before)"
        found.append(("--grace", text, "leave it out: it is made to fit"))
    if options.gpus_per_node and options.workers > options.gpus_per_node:
        text = f"{options.gpus_per_node} at most, one per GPU (--gpus-per-node)"
        found.append(("--workers-per-node", text, ""))
    unfit = ["--nproc"] if task.nproc is not None else []
    for each in [*unfit, *given(hosts)]:
        hint = "--workers-per-node, before the `--`, says how many" if each in _WORKERS else ""
        found.append((each, "left out after `--`: in an allocation Slurm starts the workers", hint))
    lines = {"--partition": options.partition, "--account": options.account, "--out": task.out}
    lines["the name of the current folder"] = os.getcwd()
    text = "text of one line, without control characters"
    found += [
        (option, text, "") for option, value in lines.items() if any(category(c) in _NO_TEXT for c in value or "")
    ]
    if found:
        raise RecipeError(
            Problem(f"{option} must be {text}", Span("argument", number, 1), hint=hint)
            for number, (option, text, hint) in enumerate(found, 1)
        )


def _look(options: SbatchOptions, task: RunOptions) -> tuple[Schedule, Plan, Path]:
    """What is to be done, after all that `run` would refuse before it starts its workers."""
    require_least(RunOptions, asdict(task))
    require_packages(task.log)
    limits(task.timeouts)
    schedule = with_sets(load(task.folder, task.overrides))
    require_evaluation(task.log, schedule)
    check_workers(schedule, options.nodes * options.workers)
    out = output_folder(schedule.name, task.out)
    disk = store.LocalDisk()
    found = store.inventory(disk, out)
    plan = make_plan(schedule, found, task.redo, task.keep, task.only, task.until)
    require_fresh(plan)
    if results.nothing_to_do(plan, out):
        raise ResumeRefused(f"all is done in {out}: there is nothing to queue for", "another --out trains it once more")
    if not task.retry:
        require_progress(disk, out, standing(disk, out, schedule, found))
    return schedule, plan, out


def _look_at_images(schedule: Schedule) -> None:
    """DataError, as `run` would raise it. Images that are not here at all may be where the job runs."""
    data = schedule.data
    missing = [source.path for source in (data.train, *filter(None, [data.val])) if not os.path.exists(source.path)]
    if missing:
        are, them = ("are", "them") if len(missing) > 1 else ("is", "it")
        named = listing(missing, "and")
        tell(f"warning: {named} {are} not here; unless the nodes see {them}, the job ends with 65")
        return
    with signals.held():
        from stagerun.train.images import preflight

    preflight(schedule)


def _batch(options: SbatchOptions, words: Sequence[str], schedule: Schedule, plan: Plan, out: Path) -> Batch:
    # What was typed stays as it was typed: the job runs where we are.
    installed = Path(sys.executable).with_name("stagerun")
    workers = f"{count(options.nodes, 'node')} with {count(options.workers, 'worker')} each"
    left = f"{count(plan.iterations_left, 'iteration')} to do"
    return Batch(
        name=schedule.name,
        about=[
            f"{schedule.name} on {workers}: {count(len(schedule.stages), 'stage')}, {left}.",
            _length(options, plan, out),
        ],
        command=["stagerun", *sys.argv[1:]],
        folder=os.getcwd(),
        out=os.path.abspath(out),
        program=[str(installed)] if os.access(installed, os.X_OK) else [sys.executable, *program("stagerun")],
        arguments=["run", options.folder, *words],
        nodes=options.nodes,
        workers_per_node=options.workers,
        time=int(options.time),
        signal_before=options.seconds_before,
        partition=options.partition,
        account=options.account,
        gpus_per_node=options.gpus_per_node,
        cpus_per_worker=options.cpus_per_worker,
    )


def _length(options: SbatchOptions, plan: Plan, out: Path) -> str:
    """How many allocations it will take, in a line."""
    each = f"of {duration(options.time)}, the last {duration(options.seconds_before)} of which are for saving"
    hours = find_hours(plan, out, options.images_per_second)
    if hours is None or any(p.stage.name not in hours.speeds for p in plan.work):
        rehearse = f"`stagerun rehearse {options.folder}` or --images-per-second would tell"
        return f"Allocations {each}; how many is not known: {rehearse}."
    together = ensembles_left(plan.schedule, results.planned_ensembles(plan, out), hours.speeds)
    found = find_budget(plan, hours, options.time - options.seconds_before, together)
    if found.allocations is None and not found.done:
        return f"Allocations {each}: too short for a start and what is next, an iteration and its snapshot or an evaluation."
    number = 1 if found.done else found.allocations
    shown = count(number, "allocation") if number is not None and number <= MOST else f"more than {MOST} allocations"
    return f"About {duration(found.total)} {hours.source}: {shown} {each}."


def _make_parent(out: Path) -> None:
    """sbatch takes a script whose output can't be opened; the job then fails without a word."""
    with reporting("make the output folder", out.parent):
        make_folder(store.LocalDisk(), Path(os.path.abspath(out.parent)))


def _write(file: Path, text: str) -> None:
    with writing(file):
        try:
            with open(file, "x", encoding="utf-8") as opened:
                opened.write(text)
        except FileExistsError:
            hint = "someone may have changed it by hand: remove it, or give another name"
            raise UsageError(f"--output {file}: it is there already", hint) from None


def _submit(batch: Batch, text: str, task: RunOptions) -> None:
    """Has the script queued, and says what to type next. UsageError with sbatch's own words."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True, check=False)
    except OSError as error:
        hint = "do it where jobs are submitted, or write the script with --output FILE and take it there"
        raise UsageError(f"--submit: no sbatch can be run here: {error.strerror}", hint) from error
    said = done.stderr.strip().removeprefix("sbatch: error: ")
    if done.returncode:
        if "Unable to contact" in said:
            raise PeerError(f"sbatch: {said}", "the same command may work later")
        raise UsageError(f"sbatch refuses: {said}", "the same without --submit shows the script")
    tell(said)
    job = done.stdout.strip().partition(";")[0]
    status = shlex.join(["stagerun", "status", *arguments(task, "folder", "overrides", "out")])
    log = log_file(batch).replace("%j", job).replace("%%", "%")
    rows = [
        ("how far it is", status),
        ("what it prints, once it has started", f"tail -f {shlex.quote(log)}"),
        ("to end it", f"scancel {job}"),
    ]
    show("\n".join([f"job {job} is queued", *(f"  {line}" for line in columns(rows, 2))]))
