"""`stagerun verify`: its options, and the training in the processes that it starts. `verify_run` checks a run by its proofs, `verify_kills`
whether a killed run resumes to the same bits."""

import random
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from stagerun.base.errors import ExitCode, StagerunError, UsageError
from stagerun.base.recipe import Audit, Schedule, Stage
from stagerun.command.ending import say
from stagerun.command.options import argument, arguments, command, given, option
from stagerun.command.shared import DeviceBatch, Json, Overrides, Synthetic, TrustCode, limits
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.launch import die_with_launcher, start_command
from stagerun.launch.start import Orders, joined, start, work
from stagerun.system import signals
from stagerun.system.process import lives
from stagerun.tools.rehearse.schedule import rehearsal, with_synthetic
from stagerun.train.command import job_of
from stagerun.train.options import Cut, RunOptions

OF_RUN, OF_SCHEDULE = "Of a run", "Of a schedule"


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    folder: str = argument("DIR|OUT")
    overrides: Overrides = ()
    out: str | None = option("--out OUT", "The run's output folder; DIR is the schedule's folder then.", title=OF_RUN)
    proofs: int = option(
        "--proofs N", "Train up to N proofs again, drawn at random.", title=OF_RUN, least=0, default=20
    )
    trust_code: TrustCode = False
    kills: int = option("--kills N", "How often the run is interrupted.", title=OF_SCHEDULE, least=1, default=5)
    iters: int = option("--iters N", "Iterations per stage, 2 or more.", title=OF_SCHEDULE, least=2, default=6)
    device_batch: DeviceBatch = None
    synthetic: Synthetic = False
    seed: int = option("--seed N", "Draws the proofs, or the moments of interruption.", default=1)
    nproc: int | None = option("--nproc N", "Workers.  [default: as in the run; of a schedule, as `run`]", least=1)
    threads: int | None = option("--threads N", "Threads per worker.  [default: likewise]", least=1)
    as_json: Json = False
    # For the processes that it starts.
    batches: int | None = option("--batches", "Device batches per iteration of a run that is interrupted.", hidden=True)
    stretch: str | None = option("--stretch", "STAGE@ITER: train again up to ITER.", hidden=True)

    @property
    def words(self) -> list[str]:
        """The command line."""
        return ["verify", *arguments(self)]

    def say(self, text: str) -> None:
        """Show what comes before the result."""
        if not self.as_json:
            say(text)


_ONLY_SCHEDULE = ("--kills", "--iters", "--device-batch", "--synthetic")
_ONLY_RUN = ("--proofs", "--trust-code")


@command(grouped=True)
def verify(options: VerifyOptions) -> int:
    """Proves a run by its log, or that a killed run of a schedule resumes to the same bits on this machine.

    `verify OUT`, or `verify DIR --out OUT`, checks a run whose schedule has `audit_param { proof_iter }`: its log has all proofs, each follows
    from the previous one, and each snapshot is the state that its proof says. It trains up to --proofs of them again, with the workers and
    threads of the run. It needs the images, and writes nothing into OUT.

    BIT-EXACT: all are the same (exit code 0). NOT COMPARABLE: they differ, on another kind of processor (0). CONSISTENT: nothing was
    trained again (0). DIFFERS: something is not as the run says (80).

    `verify DIR` runs the schedule, cut down as for `rehearse`, once straight and once interrupted --kills times, by SIGKILL or SIGTERM, at
    random moments, and compares the end of each stage: weights, momentum, averages, evaluations. BIT-EXACT: all are equal (0). DIFFERENT: they
    are not, on a CPU (70); a GPU promises nothing (0). It works in a folder below $TMPDIR.
    """
    if options.stretch is not None or options.batches is not None:
        return _train(options)
    of_schedule = options.out is None and (Path(options.folder) / SCHEDULE_FILE).exists()
    for flag in given(options):
        if flag in (_ONLY_RUN if of_schedule else _ONLY_SCHEDULE):
            what = "a schedule, without OUT" if of_schedule else "a run"
            hint = "`stagerun verify --help` says which options go together"
            raise UsageError(f"{flag}: {options.folder} is {what}", hint)
    if of_schedule:
        from stagerun.tools import verify_kills

        return verify_kills.verify(options)
    with signals.held():
        from stagerun.tools import verify_run

    return verify_run.verify(options)


def _train(options: VerifyOptions) -> int:
    """Train in a process that `verify` has started, or in a worker of it."""
    run = RunOptions(
        options.folder, options.overrides, options.out, nproc=options.nproc, threads=options.threads, retry=True
    )
    if options.stretch is not None:
        from stagerun.tools.verify_proofs import ends_before, read_schedule

        stage, until = options.stretch.rsplit("@", 1)
        run = replace(run, only=(stage,))
        cut = Cut(_proven, 1, ends_before(stage, int(until)), partial(read_schedule, options.trust_code))
    else:
        cut = Cut(lambda schedule: shortened(options, schedule), options.batches or 1)
    orders = Orders(tuple(replace(options, nproc=None).words), options.threads, limits=limits(()))
    job = job_of(run, cut)
    if joined(options.nproc):
        return work(job, orders)
    die_with_launcher()
    return start(job, orders, options.nproc or 1)


def shortened(options: VerifyOptions, schedule: Schedule) -> Schedule:
    """Return the rehearsal of a schedule with several device batches per iteration, and with snapshots inside the stages: after most
    interruptions the next life resumes inside a stage. With --synthetic its images are next to --out."""
    short = rehearsal(schedule, options.iters, options.batches or 1, options.device_batch)
    saved = (replace(s, solver=replace(s.solver, snapshot=max(1, s.solver.max_iter // 3))) for s in short.stages)
    short = replace(short, stages=tuple(saved))
    return with_synthetic(short, Path(options.out or "").parent) if options.synthetic else short


def _proven(schedule: Schedule) -> Schedule:
    """Return the schedule with a proof at each iteration, and without evaluations that decide nothing."""

    def proven(stage: Stage) -> Stage:
        tests = stage.solver.test_interval if stage.solver.early_stop else 0
        return replace(stage, solver=replace(stage.solver, audit=Audit(proof_iter=1), test_interval=tests))

    return replace(schedule, stages=tuple(map(proven, schedule.stages)))


class ChildFailed(StagerunError):
    """A process that ended with the wrong exit code; the message has its last lines."""

    def __init__(self, what: str, code: int, output: Path) -> None:
        lines = output.read_text(errors="replace").rstrip().splitlines()[-12:]
        super().__init__("\n  ".join([f"{what} ended with exit code {code}", *lines]))
        self.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.BUG


# -- the processes that it starts

GONE_S = 30.0  # the kernel ends the workers of a killed launcher; freeing a network's memory takes a moment
POLL_S = 0.005


class Child:
    """A `stagerun` command that prints into the file `output`, and has its temporary files next to it. As a context manager it leaves no
    process."""

    def __init__(self, words: list[str], output: Path) -> None:
        with open(output, "wb") as file:
            self.process = start_command(words, file, subprocess.STDOUT, TMPDIR=str(output.parent))
        self._seen = {psutil.Process(self.process.pid)}

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.living()
        self.process.kill()  # its workers die with it
        self.process.wait()
        self.wait_until_gone()

    def living(self) -> list[psutil.Process]:
        """Return the living processes: the command and all that it has started, as far as it lived when this was called."""
        for one in list(self._seen):
            with suppress(psutil.Error):
                self._seen |= set(one.children(recursive=True))
        return [one for one in self._seen if lives(one)]

    def strike(self, rng: random.Random) -> str:
        """Stop the command, or kill one of its processes that train or launch, or all. Return what was done, '' if nothing lived."""
        draw, processes = rng.randrange(5), sorted(self.living(), key=lambda one: one.pid)
        with suppress(psutil.Error):
            if draw == 0:
                self.process.terminate()
                return "SIGTERM"
            targets = [one for one in processes if self.process.pid in (one.pid, one.ppid())]
            for one in processes if draw == 4 else [rng.choice(targets)]:
                one.kill()
            return "SIGKILL to all" if draw == 4 else "SIGKILL to one"
        return ""

    def wait_until_gone(self) -> int:
        """Wait until its processes have ended, and return how many are left after a while: a process that hangs in the kernel can't be killed."""
        deadline = time.monotonic() + GONE_S
        while (left := len(self.living())) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left
