"""`stagerun sbatch`: what `run` would refuse is refused here; then the script is written, and queued."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import category

import click

from stagerun import signals, store
from stagerun.cli.ending import show, tell
from stagerun.cli.options import at_least, limits, output_folder
from stagerun.cli.timing import find_budget, find_hours
from stagerun.errors import (
    PeerError,
    PermissionDenied,
    Problem,
    RecipeError,
    ResumeRefused,
    Span,
    StorageError,
    UsageError,
    listing,
)
from stagerun.launch.sbatch import Batch, log_file, most_grace, script
from stagerun.launch.workers import check_workers
from stagerun.lmdb_file import with_sets
from stagerun.plan import Plan, make_plan, require_fresh
from stagerun.plan.budget import MOST
from stagerun.plan.ensembles import ensembles_left
from stagerun.recipe import Schedule
from stagerun.spec import load
from stagerun.store.disk import make_folder
from stagerun.store.faults import reporting
from stagerun.system.process import program
from stagerun.text import columns, count, duration
from stagerun.train import results
from stagerun.train.logs import require_evaluation, require_packages
from stagerun.train.results import require_progress, standing

_SIGNAL_BEFORE_S = 300
_MOST_SIGNAL_S = 65535  # of sbatch
_MOST_TIME_S = 365 * 86400
# Of `run`'s options, those that say how its workers are started: here Slurm does.
_PER_NODE = "--workers-per-node, before the `--`, says how many"
_HINTS = {"nproc": _PER_NODE, "per_node": _PER_NODE}
_NO_TEXT = ("Cc", "Cs")  # Unicode's categories of control characters, and of bytes that are no UTF-8
_NOT_UNDER_SLURM = ("nproc", "hosts", "per_node", "least", "restarts", "python", "ssh", "sync", "sync_code")


@dataclass(frozen=True, slots=True, kw_only=True)
class SbatchOptions:
    """`run`: the parameters of `stagerun run`; `chosen`: those that were given, as options; `words`: they themselves, as typed."""

    folder: str
    run: Mapping[str, Any]
    chosen: Mapping[str, str]
    words: tuple[str, ...]
    nodes: int
    time: float
    workers_per_node: int | None
    gpus_per_node: int | None
    cpus_per_worker: int | None
    partition: str | None
    account: str | None
    signal_before: float | None
    images_per_second: float | None
    output: str | None
    submit: bool

    @property
    def workers(self) -> int:
        """On each node."""
        return self.workers_per_node or self.gpus_per_node or 1

    @property
    def seconds_before(self) -> int:
        """The signal comes so long before the end."""
        return int(min(_SIGNAL_BEFORE_S, self.time / 4) if self.signal_before is None else self.signal_before)


def sbatch_command(options: SbatchOptions) -> None:
    _require_sense(options)
    schedule, plan, out = _look(options)
    _look_at_images(schedule)
    batch = _batch(options, schedule, plan, out)
    text = script(batch)
    _make_parent(out)
    if options.output is not None:
        _write(Path(options.output), text)
    elif not options.submit:
        click.echo(text, nl=False)
    if options.submit:
        _submit(batch, text, options)


def _require_sense(options: SbatchOptions) -> None:
    """RecipeError with a mistake for each number that doesn't go with another one."""
    found = []
    if options.time != int(options.time) or options.time > _MOST_TIME_S:
        found.append(("--time", "whole seconds, and no more than a year", ""))
    if options.seconds_before > min(_MOST_SIGNAL_S, options.time / 2):
        most = duration(min(_MOST_SIGNAL_S, options.time / 2))
        found.append(("--signal-before", f"{most} at most: half of --time, and no more than sbatch takes", ""))
    grace = options.run["grace"]
    if grace is not None and grace > most_grace(options.seconds_before):
        most = duration(most_grace(options.seconds_before))
        text = f"{most} at most, since the signal comes {duration(options.seconds_before)} before the end (--signal-before)"
        found.append(("--grace", text, "leave it out: it is made to fit"))
    if options.gpus_per_node and options.workers > options.gpus_per_node:
        text = f"{options.gpus_per_node} at most, one per GPU (--gpus-per-node)"
        found.append(("--workers-per-node", text, ""))
    for name in _NOT_UNDER_SLURM:
        if name in options.chosen:
            text = "left out after `--`: in an allocation Slurm starts the workers"
            found.append((options.chosen[name], text, _HINTS.get(name, "")))
    lines = {"--partition": options.partition, "--account": options.account, "--out": options.run["out"]}
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


def _look(options: SbatchOptions) -> tuple[Schedule, Plan, Path]:
    """What is to be done, after all that `run` would refuse before it starts its workers."""
    run = options.run
    at_least(1, threads=run["threads"])
    require_packages(run["log"])
    limits(run["timeouts"])
    schedule = with_sets(load(options.folder, run["overrides"]))
    require_evaluation(run["log"], schedule)
    check_workers(schedule, options.nodes * options.workers)
    out = output_folder(schedule.name, run["out"])
    disk = store.LocalDisk()
    found = store.inventory(disk, out)
    plan = make_plan(schedule, found, run["redo"], run["keep"], run["only"], run["until"])
    require_fresh(plan)
    if results.nothing_to_do(plan, out):
        raise ResumeRefused(f"all is done in {out}: there is nothing to queue for", "another --out trains it once more")
    if not run["retry"]:
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


def _batch(options: SbatchOptions, schedule: Schedule, plan: Plan, out: Path) -> Batch:
    # What was typed stays as it was typed: the job runs where we are.
    run = ["run", options.folder, *options.words]
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
        arguments=run,
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
    try:
        with open(file, "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        hint = "somebody may have changed it by hand: remove it, or give another name"
        raise UsageError(f"--output {file}: it is there already", hint) from None
    except PermissionError as error:
        raise PermissionDenied(f"may not write {file}") from error
    except OSError as error:
        raise StorageError(f"can't write {file}: {error.strerror}") from error


def _submit(batch: Batch, text: str, options: SbatchOptions) -> None:
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
    same = [*(w for value in options.run["overrides"] for w in ("--set", value))]
    same += [] if options.run["out"] is None else ["--out", options.run["out"]]
    status = shlex.join(["stagerun", "status", options.folder, *same])
    log = log_file(batch).replace("%j", job).replace("%%", "%")
    rows = [
        ("how far it is", status),
        ("what it prints, once it has begun", f"tail -f {shlex.quote(log)}"),
        ("to end it", f"scancel {job}"),
    ]
    show("\n".join([f"job {job} is queued", *(f"  {line}" for line in columns(rows, 2))]))
