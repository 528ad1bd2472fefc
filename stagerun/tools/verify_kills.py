"""`stagerun verify DIR`: a schedule, cut down, run once straight and once interrupted at random moments, must end in the same bits."""

import hashlib
import json
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, StorageError, UsageError
from stagerun.base.events import Event, Iterated, PieceStarted, RunStarted, StageStarted
from stagerun.base.recipe import Schedule
from stagerun.command.ending import say
from stagerun.language import load
from stagerun.launch.options import devices
from stagerun.logs.log_file import LOG, Log
from stagerun.plan.choice import check_short
from stagerun.store.layout import choices_folder
from stagerun.system.world import launched, started_by
from stagerun.tools.rehearse.schedule import make_images
from stagerun.tools.verify import POLL_S, Child, ChildFailed, VerifyOptions, shortened
from stagerun.train.results import read_result

DISK = store.LocalDisk()
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


def verify(options: VerifyOptions) -> int:
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
