"""`stagerun sbatch`: refuses what `run` would refuse; then writes the script, and queues it."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from unicodedata import category

import click

from stagerun import store
from stagerun.base.errors import (
    WORTH_ANOTHER_START,
    ExitCode,
    PeerError,
    Problem,
    RecipeError,
    ResumeRefused,
    Span,
    UsageError,
    listing,
)
from stagerun.base.recipe import Schedule
from stagerun.base.text import columns, count, duration
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, arguments, command, filled, flag, given, option
from stagerun.command.shared import Duration, Folder, Overrides, limits, output_folder
from stagerun.data.weights import looked_at
from stagerun.language import load
from stagerun.launch.options import HostOptions
from stagerun.logs.table import require_packages
from stagerun.plan import Plan, make_plan, require_fresh
from stagerun.plan.choice import check_workers
from stagerun.plan.planned import iterations_text
from stagerun.store.disk import make_folder
from stagerun.store.errors import reporting
from stagerun.system import signals
from stagerun.system.process import program
from stagerun.train import results
from stagerun.train.command import run
from stagerun.train.options import RunOptions
from stagerun.train.results import require_progress, standing

_SIGNAL_BEFORE_S = 300
_MOST_SIGNAL_S = 65535  # of sbatch
_MOST_TIME_S = 365 * 86400
_WORKERS = ("--nproc",)  # of `run`: here Slurm starts its workers
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
    if options.submit:
        _submit(batch, text, task)
    else:
        click.echo(text, nl=False)


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
    """Refuses what `run` would refuse before it starts its workers; returns what is to be done."""
    require_packages(task.log)
    limits(task.timeouts)
    schedule = load(task.folder, task.overrides)
    check_workers(schedule, options.nodes * options.workers)
    out = output_folder(schedule.name, task.out)
    schedule = looked_at(schedule, out)
    disk = store.LocalDisk()
    found = store.inventory(disk, out)
    plan = make_plan(schedule, found, task.redo, task.only, task.until)
    require_fresh(plan)
    if results.nothing_to_do(plan, out):
        raise ResumeRefused(f"all is done in {out}: there is nothing to queue for", "another --out trains it once more")
    if not task.retry:
        require_progress(disk, out, standing(disk, out, schedule, found))
    return schedule, plan, out


def _look_at_images(schedule: Schedule) -> None:
    """DataError, as `run` would raise it. Images that are not here at all may be where the job runs."""
    missing = [source.path for source in schedule.sources if not os.path.exists(source.path)]
    if missing:
        are, them = ("are", "them") if len(missing) > 1 else ("is", "it")
        named = listing(missing, "and")
        tell(f"warning: {named} {are} not here; unless the nodes see {them}, the job ends with 65")
        return
    with signals.held():
        from stagerun.data.preflight import preflight

    preflight(schedule)


def _batch(options: SbatchOptions, words: Sequence[str], schedule: Schedule, plan: Plan, out: Path) -> "Batch":
    # What was typed stays as it was typed: the job runs where we are.
    installed = Path(sys.executable).with_name("stagerun")
    workers = f"{count(options.nodes, 'node')} with {count(options.workers, 'worker')} each"
    left = f"{iterations_text(plan.least_left, plan.iterations_left)} to do"
    return Batch(
        name=schedule.name,
        about=[
            f"{schedule.name} on {workers}: {count(len(schedule.stages), 'stage')}, {left}.",
            f"Allocations of {duration(options.time)}, the last {duration(options.seconds_before)} of which are for saving.",
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


def _make_parent(out: Path) -> None:
    """sbatch takes a script whose output can't be opened; the job then fails without a word."""
    with reporting("make the output folder", out.parent):
        make_folder(store.LocalDisk(), Path(os.path.abspath(out.parent)))


def _submit(batch: "Batch", text: str, task: RunOptions) -> None:
    """Queues the script, and says what to type next. UsageError with sbatch's own words."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True, check=False)
    except OSError as error:
        hint = "do it where jobs are submitted, or write the script into a file (`stagerun sbatch ... > FILE`) and take it there"
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


# -- the script, as text

# Allocations in a row that leave no new snapshot or result, after which there is no point in another one. The guard of three lives
# (`train.results`) doesn't see those that end before a life begins, nor those that were asked to stop.
FRUITLESS = 3

_MOST_MARGIN_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the script is made from. Times are in seconds, paths absolute."""

    name: str
    about: Sequence[str]  # lines for whoever opens the file
    command: Sequence[str]  # that wrote it
    folder: str  # where the job runs
    out: str
    program: Sequence[str]  # `stagerun`, as it is started here
    arguments: Sequence[str]  # `run DIR ...`, without --grace
    nodes: int
    workers_per_node: int
    time: int
    signal_before: int
    grace: float | None = None  # None: as much as fits
    partition: str | None = None
    account: str | None = None
    gpus_per_node: int | None = None
    cpus_per_worker: int | None = None  # None: whole nodes


def most_grace(signal_before: int) -> int:
    """Seconds from the signal until the ranks have ended, at most: the rest is for srun, and to ask for the next allocation."""
    return signal_before - min(_MOST_MARGIN_S, signal_before // 10 + 1)


def log_file(batch: Batch) -> str:
    """Where Slurm writes what is printed; `%j` is the job's number. Beside the output folder: Slurm opens it before there is one."""
    return f"{batch.out.replace('%', '%%')}.slurm-%j.out"


def clock(seconds: int) -> str:
    """As Slurm takes it.

    >>> clock(4 * 3600), clock(2 * 86400 + 90)
    ('04:00:00', '2-00:01:30')
    """
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def script(batch: Batch) -> str:
    """The whole file."""
    comments = [*batch.about, f"Written by: {shlex.join(batch.command)}"]
    # What was typed may have several lines; sbatch reads no options below the first one that is not a comment.
    head = ["#!/bin/bash", *(f"# {line}".rstrip().replace("\n", "\n#   ") for line in comments)]
    options = [f"#SBATCH {option}" for option in _options(batch)]
    values = {
        "OUT": shlex.quote(batch.out),
        "FRUITLESS": str(FRUITLESS),
        "REFUSED": str(int(ExitCode.RESUME_REFUSED)),
        "SRUN": _srun(batch),
        "MEANINGS": "\n".join(f"#   {int(code)}  {code.meaning}" for code in WORTH_ANOTHER_START),
        "AGAIN": " | ".join(str(int(code)) for code in WORTH_ANOTHER_START),
    }
    body = re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], _BODY)  # at once: a value may hold such a word, too
    return "\n".join([*head, "", *options, body])


def _options(batch: Batch) -> list[str]:
    optional = (
        ("--cpus-per-task", batch.cpus_per_worker),
        ("--gpus-per-node", batch.gpus_per_node),
        ("--partition", batch.partition),
        ("--account", batch.account),
    )
    return [
        f"--job-name={shlex.quote(batch.name)}",
        f"--nodes={batch.nodes}",
        f"--ntasks-per-node={batch.workers_per_node}",
        *([] if batch.cpus_per_worker else ["--exclusive", "--mem=0"]),  # 0: all that a node has
        *(f"{option}={shlex.quote(str(value))}" for option, value in optional if value is not None),
        f"--time={clock(batch.time)}",
        f"--signal=USR1@{batch.signal_before}",
        "--requeue",
        "--open-mode=append",
        f"--chdir={shlex.quote(batch.folder)}",
        f"--output={shlex.quote(log_file(batch))}",
    ]


def _srun(batch: Batch) -> str:
    grace = most_grace(batch.signal_before) if batch.grace is None else batch.grace
    step = ["srun", "--mpi=none", "--cpu-bind=none", "--kill-on-bad-exit=0", f"--wait={max(1, round(grace))}"]
    if batch.cpus_per_worker:  # srun doesn't take it from the job
        step.append(f"--cpus-per-task={batch.cpus_per_worker}")
    words = [*batch.program, *batch.arguments, "--grace", f"{grace:g}s"]
    return f"{shlex.join(step)} \\\n    {shlex.join(words)} &"


_BODY = """
out=@OUT@
idle="$out.slurm-$SLURM_JOB_ID.idle"  # a line for each of the last allocations that came to nothing
progress() { ls "$out/snapshots" "$out/results" "$out/results/ensembles" 2>/dev/null | cksum; }
# 1: it is tried again. A signal is Slurm's, which ends what the job runs as soon as it is requeued.
ask() {
    for pause in 1 3 9 0; do
        scontrol "$@" "$SLURM_JOB_ID"
        [ $? -ne 1 ] && return 0  # without it, in a trap, what came before the trap would count
        sleep "$pause"
    done
    false
}
job() { ask show job || echo "Slurm does not answer"; }

# Asks for the next allocation, for the same job, which goes on in the same file.
again() {
    if [ "$before" != "$(progress)" ]; then
        rm -f "$idle"
    elif ! echo "$1" >>"$idle"; then
        echo "not queued again: $1, and $idle can't be written, which counts how often"
        return
    fi
    if [ -e "$idle" ] && [ "$(wc -l <"$idle")" -ge @FRUITLESS@ ]; then
        echo "not queued again: @FRUITLESS@ allocations in a row came to no snapshot and no result ($(paste -sd, "$idle"))"
        rm -f "$idle"
        code=@REFUSED@
    elif ask requeue; then
        echo "queued again: $1"
    else
        echo "not queued again: Slurm does not answer"
    fi
}

# Slurm ends the job. At the time limit, which the ranks were warned of, it goes on all the same; what was cancelled, preempted or
# requeued is not for this script to decide. The ranks have KillWait seconds (slurm.conf) to save.
ends() {
    ended=yes
    case "$(job)" in
    *Reason=TimeLimit*) again "time limit" ;;
    Slurm*) echo "not queued again: Slurm does not answer" ;;
    esac
}
trap ends TERM

before="$(progress)"
echo "$(date "+%F %T") allocation $((${SLURM_RESTART_COUNT:-0} + 1)) of job $SLURM_JOB_ID: $SLURM_JOB_NODELIST"

# Ranks notice by themselves that one of them is gone, and rank 0 saves first: srun leaves them the time.
@SRUN@
step=$!
wait "$step"
code=$?
if [ "$ended" ]; then
    wait "$step"
    exit
fi

# The highest exit code of all ranks. Worth another allocation are
@MEANINGS@
#   129 to 159  killed by signal 1 to 31, but for 130: Ctrl-C; after three such lives without progress `stagerun run` refuses with 78
#   233 to 242  srun's own: a node did not answer
case "$code" in
@AGAIN@ | 129 | 13[1-9] | 1[45][0-9] | 23[3-9] | 24[0-2])
    case "$(job)" in
    *JobState=RUNNING*) again "exit code $code" ;;
    Slurm*) echo "not queued again: Slurm does not answer" ;;
    esac
    ;;
*) rm -f "$idle" ;;
esac
exit "$code"
"""
