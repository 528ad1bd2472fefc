"""The batch script of `stagerun sbatch`, as text. Pure."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.base.errors import EXIT_MEANINGS, WORTH_ANOTHER_START, ExitCode

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
        "MEANINGS": "\n".join(f"#   {int(code)}  {EXIT_MEANINGS[code]}" for code in WORTH_ANOTHER_START),
        "AGAIN": " | ".join(str(int(code)) for code in WORTH_ANOTHER_START),
    }
    body = _BODY
    for name, value in values.items():
        body = body.replace(f"@{name}@", value)
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

# Slurm ends the job. At the time limit, of which the ranks were told before, it goes on all the same; what was cancelled, preempted or
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
