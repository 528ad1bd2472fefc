"""`stagerun verify`: its options, the training in the processes that it starts, and whether a schedule, cut down, that is killed and resumed
ends in the same bits. `verify_run` checks a run by its proofs."""

import hashlib
import json
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from stagerun import store
from stagerun.base.errors import ExitCode, StagerunError, StorageError, UsageError
from stagerun.base.events import Event, Iterated, NotFinite, PieceStarted, RunStarted, StageStarted
from stagerun.base.recipe import Audit, Schedule, Stage
from stagerun.command.ending import say
from stagerun.command.options import argument, arguments, command, given, option
from stagerun.command.shared import DeviceBatch, Json, Overrides, Synthetic, TrustCode, limits
from stagerun.language import SCHEDULE_FILE, load
from stagerun.launch import die_with_launcher, start_command
from stagerun.launch.options import devices
from stagerun.launch.start import Orders, joined, start, work
from stagerun.logs.log_file import LOG, Log
from stagerun.plan.choice import check_short
from stagerun.store.layout import choices_folder
from stagerun.system.process import lives
from stagerun.system.world import launched, started_by
from stagerun.tools.output import DISK, read_schedule
from stagerun.tools.rehearse.schedule import make_images, rehearsal, with_synthetic
from stagerun.train.command import job_of
from stagerun.train.options import Cut, RunOptions
from stagerun.train.results import read_result

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
        return verify_schedule(options)
    from stagerun.tools.verify_run import verify_run

    return verify_run(options)


def _train(options: VerifyOptions) -> int:
    """Train in a process that `verify` has started, or in a worker of it."""
    run = RunOptions(
        options.folder, options.overrides, options.out, nproc=options.nproc, threads=options.threads, retry=True
    )
    if options.stretch is not None:
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
        tests = stage.solver.test_interval if schedule.followed(stage) else 0
        return replace(stage, solver=replace(stage.solver, audit=Audit(proof_iter=1), test_interval=tests))

    return replace(schedule, stages=tuple(map(proven, schedule.stages)))


def ends_before(stage: str, until: int) -> Callable[[Event], bool]:
    """Return a test, asked of each event of a run, whether the next iteration of the stage is its last."""
    reached = False

    def ends(event: Event) -> bool:
        nonlocal reached
        if isinstance(event, Iterated | StageStarted | NotFinite) and event.stage == stage:
            reached = event.iter + isinstance(event, NotFinite) >= until - 1
        return reached

    return ends


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


# -- a schedule: once straight, and once interrupted at random moments

MOST_IDLE = 6  # runs without a life that resumed from a snapshot


@dataclass(frozen=True, slots=True)
class Life:
    """A process life. `start`: what it resumed from, '' if it trained nothing; `hit`: what interrupted it, '' if it came to the end."""

    start: str
    resumed: bool
    hit: str
    code: int


@dataclass(slots=True)
class Verdict:
    """`stages`: the digests of each stage's end, straight and interrupted, of the first run that differs; `different`: their names."""

    verdict: str = ""
    promised: bool = False
    lives: list[Life] = field(default_factory=list)
    stages: dict[str, tuple[str, str]] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)


def verify_schedule(options: VerifyOptions) -> int:
    schedule = load(options.folder, options.overrides)
    nproc = options.nproc or devices(schedule)
    if launched():
        raise UsageError(
            f"a launcher has started this process as one of several ({started_by()})",
            "verify starts its workers itself, on one machine: run it once, without a launcher",
        )
    pushing = [stage.name for stage in schedule.stages if stage.enabled and stage.solver.asynchronous]
    if pushing and nproc > 1:
        raise UsageError(
            f"stage `{pushing[0]}` has `method: ASYNC`: no two runs of several workers have the same bits",
            "`--nproc 1` has them; `stagerun run DIR --replay OUT` repeats a run, and compares what came out",
        )
    check_short(schedule, nproc, options.device_batch, options.synthetic, "verifies")
    with tempfile.TemporaryDirectory(prefix="stagerun-verify-") as name:
        if options.synthetic:
            make_images(schedule, Path(name))
        verdict = _Trial(options, schedule, Path(name), nproc).verdict()
    say(json.dumps(asdict(verdict), indent=2) if options.as_json else render(verdict, options))
    return ExitCode.BUG if verdict.verdict == "DIFFERENT" and verdict.promised else ExitCode.DONE


def ends_of(schedule: Schedule, out: Path) -> tuple[dict[str, str], bool]:
    """Return a digest of the end of each stage (tensors, and what was evaluated), and whether it was trained on a CPU."""
    refs = store.inventory(DISK, out).snapshots
    ends = {ref.stage: ref for ref in refs if ref.ends(schedule.stage(ref.stage).solver.max_iter)}
    digests, device = {}, None
    for stage in (stage.name for stage in schedule.stages if stage.enabled):
        result = read_result(out, ends[stage]) if stage in ends else None
        if result is None:
            raise StorageError(f"{out}: the run ended without the end of stage `{stage}`")
        r = result  # the figures that follow from training alone, not from time or place
        figures = (r.loss, r.top1, r.top5, r.test_loss, r.ema_top1, r.ema_top5, r.ema_test_loss, r.beside)
        whole = hashlib.sha256(repr((r.iterations, figures)).encode())
        files = store.read(DISK, out, ends[stage])
        for name in sorted(name for name in files if name.endswith(".safetensors")):
            whole.update(f"{name} {hashlib.sha256(files[name]).hexdigest()}\n".encode())
        digests[stage], device = whole.hexdigest(), ends[stage].environment.get("device")
    return digests, device == "cpu"


def resumed(events: Iterable[Event]) -> bool:
    """Return whether a life started from a snapshot of an earlier one, and not from the seed."""
    for event in events:
        if isinstance(event, StageStarted | PieceStarted):
            begins = event.begins if isinstance(event, StageStarted) else 0
            return event.iter > begins or not event.start.startswith("seed ")
    return False


class _Trial:
    def __init__(self, options: VerifyOptions, schedule: Schedule, folder: Path, nproc: int) -> None:
        # More device batches than workers, so that a worker adds up several, if the stages have as many.
        batches = min([nproc + 1, *(s.solver.most_workers for s in schedule.stages if s.enabled)])
        self.options, self.folder = options, folder
        self.child = replace(options, batches=batches, nproc=nproc, as_json=False, kills=5, seed=1)
        self.schedule = shortened(replace(self.child, out=str(folder / "out")), schedule)
        self.iterations = sum(stage.solver.max_iter for stage in self.schedule.stages if stage.enabled)
        self.rng = random.Random(options.seed)
        self.result = Verdict()

    def verdict(self) -> Verdict:
        result, straight, out = self.result, self.folder / "straight", self.folder / "interrupted"
        self.options.say(
            f"verifying {self.schedule.name}: {self.iterations} iterations with --nproc {self.child.nproc}"
        )
        self._life(straight, set(), 0, 0.0)
        times = [at for at, _ in Log(straight / LOG)]  # without the start of the processes
        pace = (times[-1] - times[0]) / self.iterations
        wanted, result.promised = ends_of(self.schedule, straight)
        result.stages = {name: (digest, digest) for name, digest in wanted.items()}
        hits = self.options.kills
        for _ in range(hits + MOST_IDLE):
            if choices_folder(straight).is_dir():  # of `method: AUTO`, which may choose differently
                shutil.copytree(choices_folder(straight), choices_folder(out))
            trained, code, left = set[tuple[str, int]](), None, max(1, hits)
            while code != ExitCode.DONE:
                life = self._life(out, trained, left, pace)
                left, code = left - bool(life.hit), life.code
                hits -= bool(life.hit)
                result.lives.append(life)
                start = f"from {life.start}" if life.start else "nothing trained"
                self.options.say(f"  life {len(result.lives)}: {start}; {life.hit or 'to the end'}")
            ends, _ = ends_of(self.schedule, out)
            result.different = [name for name in wanted if ends.get(name) != wanted[name]]
            result.stages |= {name: (wanted[name], ends.get(name, "none")) for name in result.different}
            shutil.rmtree(out)
            # Nothing could differ as long as no life resumed from a snapshot.
            if result.different or (hits <= 0 and any(life.resumed for life in result.lives)):
                result.verdict = "DIFFERENT" if result.different else "BIT-EXACT" if result.promised else "EQUAL"
                return result
        raise UsageError("too few lives resumed from a snapshot", "take more --kills, or more --iters")

    def _life(self, out: Path, trained: set[tuple[str, int]], hits: int, pace: float) -> Life:
        """Run one life, and hit it at a random moment if `hits` are left. `trained`: (stage, iteration) of the run so far."""
        moment = self.rng.randint(0, max(0, (self.iterations - len(trained)) // max(1, hits)))
        delay, hit, due = self.rng.random() * pace, "", None
        log, output, events = Log(out / LOG), self.folder / "output", list[Event]()
        log.at = log.path.stat().st_size if log.path.exists() else 0
        with Child(replace(self.child, out=str(out)).words, output) as child:
            while (code := child.process.poll()) is None:
                time.sleep(POLL_S)
                events += [event for _, event in log]
                kinds = list(map(type, events))
                if hits and due is None and RunStarted in kinds and kinds.count(Iterated) >= moment:
                    due = time.monotonic() + delay
                if hits and due is not None and time.monotonic() >= due:
                    hit, hits = child.strike(self.rng), 0
            if left := child.wait_until_gone():
                raise ChildFailed(f"processes ({left}) of the run outlived its launcher, which", code, output)
        events += [event for _, event in log]
        trained |= {(event.stage, event.iter) for event in events if isinstance(event, Iterated)}
        expected = {"": (ExitCode.DONE,), "SIGTERM": (ExitCode.SAVED,)}
        # A kill of the only worker is one of the command itself.
        if code != ExitCode.DONE and code not in expected.get(hit.partition(" ")[0], (-signal.SIGKILL, ExitCode.PEER)):
            raise ChildFailed(f"a life{f', {hit},' if hit else ''}", code, output)
        starts = [event.start for event in events if isinstance(event, StageStarted | PieceStarted)]
        return Life(next(iter(starts), ""), resumed(events), "" if code == ExitCode.DONE else hit, code)


def render(result: Verdict, options: VerifyOptions) -> str:
    hits, resumes = sum(bool(life.hit) for life in result.lives), sum(life.resumed for life in result.lives)
    how = f"(interrupted {hits} times, resumed {resumes} times from a snapshot; `--kills {options.kills} --seed {options.seed}`)"
    if not result.different:
        gpu = "" if result.promised else "\nA GPU does not promise it another time."
        return f"\n{result.verdict}: interrupted equals uninterrupted {how}.{gpu}"
    why = "A GPU promises nothing: a resumed run is EQUIVALENT."
    if result.promised:
        why = "On a CPU they should be the same: this is a bug of stagerun or of torch, or a defect of processor or memory."
    return f"\nDIFFERENT: {', '.join(result.different)} ended in other bits than in the uninterrupted run {how}.\n{why}"
