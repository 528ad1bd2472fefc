"""`stagerun sbatch`: make the checks of `run`, then print a batch script for Slurm."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

import click

from stagerun import store
from stagerun.base.errors import WORTH_ANOTHER_START, ExitCode, ResumeRefused, UsageError, listing
from stagerun.base.text import count, duration
from stagerun.command.options import argument, arguments, command, filled, option
from stagerun.command.shared import Duration, Folder, Overrides, limits
from stagerun.data.weights import looked_at
from stagerun.language import load
from stagerun.logs.table import require_packages
from stagerun.plan import Plan, make_plan, require_fresh
from stagerun.plan.choice import check_workers
from stagerun.train import results
from stagerun.train.command import run
from stagerun.train.options import RunOptions

# Allocations in a row without a new snapshot or result after which the job gives up. The guard of three lives (`train.results`)
# misses allocations that end before a life begins or because of a signal.
FRUITLESS = 3
_MOST_SIGNAL_S = 65535  # sbatch takes no more
_MOST_MARGIN_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SbatchOptions:
    folder: Folder
    overrides: Overrides = ()
    out: str | None = option("--out FOLDER", "Output folder, seen by all nodes.  [default: ./out/NAME]")
    nodes: int = option("--nodes N", "Nodes of the job.", least=1, default=MISSING)
    time: float = option(
        "--time TIME",
        "Length of one allocation, as 4h. A longer run gets as many as it needs.",
        type=Duration(least=120.0),
        default=MISSING,
    )
    workers_per_node: int | None = option(
        "--workers-per-node N", "Workers on each node.  [default: one per requested GPU, or 1]", least=1
    )
    gpus_per_node: int | None = option("--gpus-per-node N", "GPUs to request per node.  [default: none]", least=1)
    cpus_per_worker: int | None = option(
        "--cpus-per-worker N", "Processors per worker, on shared nodes.  [default: whole nodes]", least=1
    )
    partition: str | None = option("--partition NAME", "Partition to queue in.")
    account: str | None = option("--account NAME", "Account to charge.")
    signal_before: float | None = option(
        "--signal-before TIME",
        "Ask all workers to save this long before an allocation ends. About nine tenths of it become --grace of `run`.  "
        "[default: 5m, at most a quarter of --time]",
        type=Duration(least=10.0),
    )
    words: tuple[str, ...] = argument("[-- OPTIONS OF RUN]", nargs=-1, type=click.UNPROCESSED, default=())

    @property
    def workers(self) -> int:
        """Workers on each node."""
        return self.workers_per_node or self.gpus_per_node or 1

    @property
    def seconds_before(self) -> int:
        """Seconds from the signal to the end of the allocation."""
        return int(min(300, self.time / 4) if self.signal_before is None else self.signal_before)

    @property
    def most_grace(self) -> int:
        """Seconds from the signal until the ranks must have ended; srun and the request for the next allocation take the rest."""
        return self.seconds_before - min(_MOST_MARGIN_S, self.seconds_before // 10 + 1)


@command()
def sbatch(options: SbatchOptions) -> None:
    """Prints a batch script for Slurm that runs a schedule to its end, in as many allocations as that takes.

    `stagerun sbatch DIR --nodes 4 --time 4h | sbatch` queues it. All that `run` would refuse is reported now, and not when the job's turn
    comes. Before an allocation ends the workers save, and the job queues itself again, as it does after a lost node or a preemption. It
    ends when all is done, with a mistake, after three allocations without progress, or by scancel. What follows `--` goes to `run`.
    """
    words = [*arguments(options, "overrides", "out"), *options.words]
    values = run.make_context("run", [options.folder, *words], parent=click.get_current_context().parent).params
    task = filled(RunOptions, values)
    _check_numbers(options, task, [f"--{name}" for name in ("nproc", "hosts", "parallel") if values[name] is not None])
    plan, out = _plan(options, task)
    _check_images(plan)
    # sbatch accepts a log file that can't be opened, and the job fails silently.
    with store.reporting("make the output folder", out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    installed = Path(sys.executable).with_name("stagerun")
    start = [str(installed)] if os.access(installed, os.X_OK) else [sys.executable, "-m", "stagerun"]
    grace = ["--grace", f"{options.most_grace}s"] if task.grace is None else []
    about = [
        f"{plan.schedule.name} on {count(options.nodes, 'node')} with {count(options.workers, 'worker')} each: "
        f"{count(len(plan.stages), 'stage')}, {plan.left} to do.",
        f"Allocations of {duration(options.time)}, the last {duration(options.seconds_before)} for saving.",
        f"Written by: {shlex.join(['stagerun', *sys.argv[1:]])}",
    ]
    ranks = [*start, "run", options.folder, *words, *grace]
    click.echo(script(options, plan.schedule.name, about, ranks, os.path.abspath(out)), nl=False)


def _check_numbers(options: SbatchOptions, task: RunOptions, of_workers: Sequence[str]) -> None:
    most = min(_MOST_SIGNAL_S, options.time / 2)
    mistakes = [
        f"{flag} after `--`: Slurm starts the workers, and --workers-per-node says how many" for flag in of_workers
    ]
    if options.seconds_before > most:
        mistakes.append(
            f"--signal-before must be {duration(most)} at most: half of --time, and no more than sbatch takes"
        )
    if (task.grace or 0) > options.most_grace:
        before = duration(options.seconds_before)
        mistakes.append(
            f"--grace must be {duration(options.most_grace)} at most, since the signal comes {before} before the end"
        )
    if mistakes:
        raise UsageError("\n".join(mistakes))


def _plan(options: SbatchOptions, task: RunOptions) -> tuple[Plan, Path]:
    """Refuse what `run` refuses before it starts its workers; return what is left to do."""
    require_packages(task.log)
    limits(task.timeouts)
    schedule, disk = load(task.folder, task.overrides), store.LocalDisk()
    check_workers(schedule, options.nodes * options.workers)
    out = task.output(schedule)
    schedule = looked_at(schedule, out)
    inventory = store.inventory(disk, out)
    plan = make_plan(schedule, inventory, *task.selection)
    require_fresh(plan)
    if results.nothing_to_do(plan, out):
        raise ResumeRefused(f"all is done in {out}: nothing is left to queue", "another --out trains it once more")
    if not task.retry:
        results.require_progress(disk, out, results.standing(disk, out, schedule, inventory))
    return plan, out


def _check_images(plan: Plan) -> None:
    """Raise DataError as `run` does. Images that are missing here may be where the job runs."""
    if missing := [source.path for source in plan.schedule.sources if not os.path.exists(source.path)]:
        text = f"warning: {listing(missing, 'and')}: not here; if the nodes lack them too, the job ends with 65"
        click.echo(text, err=True)
        return
    from stagerun.data.loaders import preflight  # and with it numpy

    preflight(plan.schedule)


# -- the script, as text


def clock(seconds: int) -> str:
    """Return a length of time as Slurm takes it.

    >>> clock(4 * 3600), clock(2 * 86400 + 90)
    ('04:00:00', '2-00:01:30')
    """
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def script(options: SbatchOptions, name: str, about: Sequence[str], command: Sequence[str], out: str) -> str:
    """Return the batch script, whose ranks are `command`. The log is next to `out`: Slurm opens it before `out` exists."""
    shared = ["--exclusive", "--mem=0"]  # 0: all memory of the node
    if options.cpus_per_worker:
        shared = [f"--cpus-per-task={options.cpus_per_worker}"]
    requested = {
        "gpus-per-node": options.gpus_per_node,
        "partition": options.partition,
        "account": options.account,
    }
    flags = [
        f"--job-name={shlex.quote(name)}",
        f"--nodes={options.nodes}",
        f"--ntasks-per-node={options.workers}",
        *shared,
        *(f"--{flag}={shlex.quote(str(value))}" for flag, value in requested.items() if value is not None),
        f"--time={clock(int(options.time))}",
        f"--signal=USR1@{options.seconds_before}",
        "--requeue",
        "--open-mode=append",
        f"--chdir={shlex.quote(os.getcwd())}",
        f"--output={shlex.quote(out.replace('%', '%%') + '.slurm-%j.out')}",
    ]
    if broken := [flag for flag in flags if not flag.isprintable()]:
        raise UsageError(f"{broken[0]!r} must be one line of printable text for sbatch")
    step = ["srun", "--mpi=none", "--cpu-bind=none", "--kill-on-bad-exit=0", f"--wait={max(1, options.most_grace)}"]
    if options.cpus_per_worker:  # srun doesn't take it from the job
        step += shared
    values = {
        "OUT": shlex.quote(out),
        "FRUITLESS": str(FRUITLESS),
        "REFUSED": str(int(ExitCode.RESUME_REFUSED)),
        "SRUN": f"{shlex.join(step)} \\\n    {shlex.join(command)} &",
        "MEANINGS": "\n".join(f"#   {int(code)}  {code.meaning}" for code in WORTH_ANOTHER_START),
        "AGAIN": " | ".join(str(int(code)) for code in WORTH_ANOTHER_START),
    }
    # Replace all at once: a value may contain such a word, too.
    body = re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], _BODY)
    # Typed words may have several lines; sbatch reads no options below the first line that is not a comment.
    comments = [f"# {line}".rstrip().replace("\n", "\n#   ") for line in about]
    return "\n".join(["#!/bin/bash", *comments, "", *(f"#SBATCH {flag}" for flag in flags), body])


_BODY = """
out=@OUT@
idle="$out.slurm-$SLURM_JOB_ID.idle"  # a line for each of the last allocations without progress
progress() { ls "$out/snapshots" "$out/results" "$out/results/ensembles" 2>/dev/null | cksum; }
# Exit code 1: try again. A signal is from Slurm, which ends the job's processes as soon as the job is requeued.
ask() {
    for pause in 1 3 9 0; do
        scontrol "$@" "$SLURM_JOB_ID"
        [ $? -ne 1 ] && return 0  # a bare return in a trap has the status from before the trap
        sleep "$pause"
    done
    false
}
job() { ask show job || echo "Slurm does not answer"; }

# Ask for another allocation for the same job, which appends to the same file.
again() {
    if [ "$before" != "$(progress)" ]; then
        rm -f "$idle"
    elif ! echo "$1" >>"$idle"; then
        echo "not queued again: $1, and $idle, which counts such ends, can't be written"
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

# Slurm ends the job. At the time limit, which the ranks were warned of, ask for another allocation; leave a job that was cancelled,
# preempted or requeued to Slurm. The ranks have KillWait seconds (slurm.conf) to save.
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

# When a rank dies, the others notice and rank 0 saves first: srun gives them the time.
@SRUN@
step=$!
wait "$step"
code=$?
if [ "$ended" ]; then
    wait "$step"
    exit
fi

# The highest exit code of all ranks. These are worth another allocation:
@MEANINGS@
#   129 to 159  killed by signal 1 to 31, except 130, Ctrl-C; after three such lives without progress `stagerun run` refuses with 78
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
