"""`stagerun verify`: options, the choice between its two proofs, and the processes that it starts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from stagerun.base.errors import ExitCode, StagerunError, UsageError
from stagerun.base.events import Event, Iterated, NotFinite, StageStarted
from stagerun.base.recipe import Audit, Schedule, Stage
from stagerun.command.options import argument, arguments, command, given, option
from stagerun.command.shared import DeviceBatch, Json, Overrides, Synthetic, TrustCode, limits
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.launch import die_with_launcher
from stagerun.launch.start import Orders, joined, start, work
from stagerun.system import signals
from stagerun.tools.verify.proofs import Stretch
from stagerun.train.command import job_of
from stagerun.train.options import Cut, RunOptions

OF_RUN, OF_KILLS = "Of a run", "Of a schedule"


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    folder: str = argument("DIR|OUT")
    overrides: Overrides = ()
    out: str | None = option("--out OUT", "The run's output folder, beside the schedule's folder.", title=OF_RUN)
    proofs: int = option(
        "--proofs N", "Proofs that are trained up to again, drawn at random.", title=OF_RUN, least=0, default=20
    )
    trust_code: TrustCode = False
    kills: int = option("--kills N", "How often the run is interrupted.", title=OF_KILLS, least=1, default=5)
    iters: int = option("--iters N", "Iterations per stage, 2 or more.", title=OF_KILLS, least=2, default=6)
    device_batch: DeviceBatch = None
    then_workers: int | None = option(
        "--then-workers N",
        "Go on with N workers after each interruption, then with --nproc again, in turn; for `determinism: ELASTIC`.",
        title=OF_KILLS,
        least=1,
    )
    synthetic: Synthetic = False
    seed: int = option("--seed N", "Draws the proofs, or the moments of interruption.", default=1)
    nproc: int | None = option("--nproc N", "Workers.  [default: as in the run; of a schedule, as `run`]", least=1)
    threads: int | None = option("--threads N", "Threads per worker.  [default: likewise]", least=1)
    as_json: Json = False
    # In the processes that it starts.
    batches: int | None = option("--batches", "Device batches per iteration of a run that is interrupted.", hidden=True)
    stretch: str | None = option("--stretch", "STAGE@ITER: what is trained again.", hidden=True)

    def of_run(self, out: Path, batches: int, threads: int) -> list[str]:
        """Return the command line of a run that is interrupted."""
        child = replace(self, out=str(out), batches=batches, threads=threads, nproc=None)
        return ["verify", *arguments(child, *_SCHEDULE, "out", "batches", "threads")]

    def of_stretch(self, out: Path, one: Stretch) -> list[str]:
        """Return the command line that trains a stretch of a run."""
        words = f"{one.stage}@{one.until}"
        child = replace(self, out=str(out), nproc=one.workers, threads=one.threads, stretch=words)
        return ["verify", *arguments(child, "folder", "overrides", "out", "nproc", "threads", "trust_code", "stretch")]


_SCHEDULE = ("folder", "overrides", "iters", "device_batch", "synthetic")
_ONLY_KILLS = ("--kills", "--iters", "--device-batch", "--then-workers", "--synthetic")
_ONLY_RUN = ("--proofs", "--trust-code")


@command(grouped=True)
def verify(options: VerifyOptions) -> int:
    """Proves a run by its log, or that a killed run of a schedule goes on to the same bits on this machine.

    `verify OUT`, or `verify DIR --out OUT`, checks a run whose schedule has `audit_param { proof_iter }`: all proofs are in its log and follow
    from one another, each snapshot is the state that is proven at its iteration, and --proofs of them, drawn at random, are trained up to
    again, with the workers and threads of the run. The images must be there; nothing is written into OUT.

    BIT-EXACT, on the kind of processor of the run: all are the same (exit code 0). NOT COMPARABLE: they differ, on another (0). CONSISTENT:
    nothing was trained again (0). DIFFERS: something is not what the run says (80).

    `verify DIR` runs the schedule, cut down as for `rehearse`, once straight and once interrupted --kills times, by SIGKILL or SIGTERM, at
    random moments. Then the end of each stage (weights, momentum, averages, evaluations) is compared. BIT-EXACT: all are equal (0).
    DIFFERENT: they are not, on a CPU (70); on a GPU nothing is promised (0). It works in a folder below $TMPDIR.
    """
    if options.stretch is not None or options.batches is not None:
        return _child(options)
    alone = options.out is None and (Path(options.folder) / SCHEDULE_FILE).exists()
    if useless := [flag for flag in given(options) if flag in (_ONLY_RUN if alone else _ONLY_KILLS)]:
        what = "a schedule, and OUT is not given" if alone else "a run"
        raise UsageError(
            f"{useless[0]}: {options.folder} is {what}", "`stagerun verify --help` says which options go together"
        )
    if alone:
        from stagerun.tools.verify import kills

        return kills.verify(options)
    with signals.held():
        from stagerun.tools.verify import check

    return check.verify(options)


def _child(options: VerifyOptions) -> int:
    """Train in a process that `verify` started, or in a worker of it."""
    nproc, threads = options.nproc or 1, options.threads or 1
    run = RunOptions(options.folder, options.overrides, options.out, nproc=nproc, threads=threads, retry=True)
    if options.stretch is not None:
        from stagerun.tools.verify.stored import read

        stage, until = options.stretch.rsplit("@", 1)
        run = replace(run, only=(stage,))
        ends = ends_before(stage, int(until))
        cut = Cut(_proven, 1, ends, lambda folder, overrides: read(folder, overrides, options.trust_code))
        words = arguments(options, "folder", "overrides", "out", "threads", "trust_code", "stretch")
    else:
        from stagerun.tools.verify.kills import shortened

        assert options.out is not None and options.batches is not None
        work_folder, batches = Path(options.out).parent, options.batches
        cut = Cut(lambda schedule: shortened(options, schedule, batches, work_folder), batches)
        words = arguments(options, *_SCHEDULE, "out", "batches", "threads")
    orders = Orders(("verify", *words), threads, limits=limits(()))
    job = job_of(run, cut)
    if joined(options.nproc):
        return work(job, orders)
    die_with_launcher()
    return start(job, orders, nproc)


def ends_before(stage: str, until: int) -> Callable[[Event], bool]:
    """Return what says of each event of a run whether the next iteration of a stage is its last."""
    reached = False

    def ends(event: Event) -> bool:
        nonlocal reached
        if isinstance(event, Iterated | StageStarted | NotFinite) and event.stage == stage:
            reached = event.iter + isinstance(event, NotFinite) >= until - 1
        return reached

    return ends


def _proven(schedule: Schedule) -> Schedule:
    """Return the schedule with a proof at each iteration, and without evaluations that decide nothing."""

    def proven(stage: Stage) -> Stage:
        tests = stage.solver.test_interval if stage.solver.early_stop else 0
        return replace(stage, solver=replace(stage.solver, audit=Audit(proof_iter=1), test_interval=tests))

    starts = {stage.average for stage in schedule.stages}
    ensembles = tuple(ensemble for ensemble in schedule.ensembles if ensemble.name in starts)
    return replace(schedule, ensembles=ensembles, stages=tuple(map(proven, schedule.stages)))


class ChildFailed(StagerunError):
    """A process that ended as it should not have, with its last lines."""

    def __init__(self, what: str, code: int, said: Path) -> None:
        try:
            lines = said.read_text(errors="replace").rstrip().splitlines()[-12:]
        except OSError:
            lines = []
        super().__init__("\n  ".join([f"{what} ended with exit code {code}", *lines]))
        self.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.BUG
