"""Output folders of made-up runs, with numbers that can be checked by hand, and `stagerun report` on them."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from facade import EnsembleTested, Event, RunFinished, SnapshotWritten, StageFinished
from log_help import evaluated, finished, iterated, run_started, stage_started

from stagerun import store
from stagerun.cli import main

STAGES = {"init": (6, 0.1), "cyc1": (4, 0.05), "collapse": (2, 0.01)}  # iterations, base_lr
BATCH, IMAGES = 25, 100  # an epoch is 4 iterations
TRANSFORM = "100 Transform(scale=1.0)"


class Story:
    """Writes an output folder as `run` would, with a clock of its own: an iteration takes a second, a test two."""

    def __init__(self, out: Path, seed: int = 1, workers: int = 1, **recipe: str) -> None:
        self.out, self.seed, self.workers, self.recipe = out, seed, workers, recipe
        self.clock, self.life, self.speed = 1000.0, 0, 1.0
        self.ends: dict[str, str] = {}
        self.ids: dict[str, str] = {}
        self.top1: dict[str, float] = {}
        (out / "snapshots").mkdir(parents=True, exist_ok=True)

    def write(self, event: Event) -> None:
        said = {k: v for k, v in asdict(event).items() if v is not None or k not in ("staleness", "replica")}
        record = {"time": self.clock, "event": type(event).__name__, **said}
        with open(self.out / "log.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    def begin(self, stages: Sequence[str] | None = None, **more: Any) -> "Story":
        """A process life, of a schedule with these stages, and more fields of RunStarted."""
        self.life += 1
        self.clock += 1000
        about = {"schedule": "made_up", "out": str(self.out), "workers": self.workers, "threads": 2, "version": "0.1.0"}
        self.write(run_started(**about, stages=tuple(STAGES if stages is None else stages), **more))
        return self

    def start(self, stage: str, parent: str | None, iter: int = 0) -> None:
        start = self.ends[parent] if parent else f"seed {self.seed}"
        if iter:
            start = f"{stage}-{iter:08d}-a{self.life - 1:04d}"
        about = {"max_iter": STAGES[stage][0], "batch_size": BATCH, "device_batch_size": 5}
        self.write(stage_started(stage, iter, start=start, **about))

    def train(self, stage: str, first: int, last: int, before: int, loss: float = 2.0) -> None:
        for i in range(first, last + 1):
            self.clock += self.speed
            about = {"epoch": (before + i) * BATCH / IMAGES, "lr": STAGES[stage][1] / i, "weight_decay": 5e-4}
            self.write(iterated(stage, i, loss=loss - 0.1 * i, images=BATCH, seconds=self.speed, **about))

    def test(self, stage: str, iter: int, top1: float, images: int = 100, ema: bool = False) -> None:
        self.clock += 2
        self.write(evaluated(stage, iter, top1, images=images, loss=1.0, seconds=2, ema=ema))

    def end(self, stage: str, parent: str | None, top1: float, ema: float | None = None, snapshot: bool = True) -> None:
        iterations, _ = STAGES[stage]
        name = f"{stage}-{iterations:08d}-a{self.life:04d}"
        self.ends[stage], self.top1[stage] = name, top1
        if snapshot:
            self.ids[stage] = self.snapshot(stage, iterations, parent, f"{stage}{self.seed}{self.life}")
        self.test(stage, iterations, top1)
        if ema is not None:
            self.test(stage, iterations, ema, ema=True)
        self.write(self.finished(stage, top1, ema))

    def snapshot(self, stage: str, iter: int, parent: str | None, weights: str) -> str:
        """Its id. Others may start there: from `STAGE@ITER`."""
        identity = {"seed": str(self.seed), "solver.random_seed": str(self.seed)}
        identity |= {"solver.base_lr": str(STAGES[stage][1])}
        identity |= {k.replace("__", "."): v for k, v in self.recipe.items() if not k.startswith(("in_", "now_"))}
        identity |= {"solver.base_lr": self.recipe[f"in_{stage}"]} if f"in_{stage}" in self.recipe else {}
        ref = store.commit(
            store.LocalDisk(),
            self.out,
            store.Metadata(
                place=store.Place(stage, iter, self.life),
                parent=self.ids[parent] if parent else "",
                identity=identity,
                environment={"torch": self.recipe.get("now_torch", "2.13"), "workers": str(self.workers)},
            ),
            files={"a": weights.encode()},
            content=("a",),
        )
        self.ends[f"{stage}@{iter}"], self.ids[f"{stage}@{iter}"] = ref.name, ref.id
        self.write(SnapshotWritten(stage=stage, iter=iter, name=ref.name, bytes=1, blocked_seconds=0, seconds=0.1))
        return ref.id

    def ensemble(self, name: str, *members: str, top1: float = 0.95, rule: str = "MEAN_PROBABILITY") -> None:
        """Evaluated on what these stages have ended with: a line, and a file as of each member."""
        (self.out / "results" / "ensembles").mkdir(parents=True, exist_ok=True)
        tested = EnsembleTested(
            name=name, rule=rule, members=members, images=100, top1=top1, top5=0.99, loss=1.0, seconds=1.0,
            best=max(members, key=lambda m: self.top1[m]), best_top1=max(self.top1[m] for m in members),
            mean_top1=sum(self.top1[m] for m in members) / len(members),
            snapshots=tuple(self.ids[m] for m in members), batch_norm_iter=0, tested_on=f"/data/val_lmdb {TRANSFORM}",
            alone=tuple(self.top1[m] for m in members),
        )  # fmt: skip
        self.write(tested)
        (self.out / "results" / "ensembles" / f"{name}.json").write_text(json.dumps(asdict(tested)))

    def results(self) -> None:
        """Those of the stages, as `run` leaves them."""
        (self.out / "results").mkdir(exist_ok=True)
        for stage, top1 in self.top1.items():
            file = self.out / "results" / f"{self.ends[stage]}.json"
            file.write_text(json.dumps(asdict(self.finished(stage, top1))))

    def finished(self, stage: str, top1: float, ema: float | None = None) -> StageFinished:
        iterations, lr = STAGES[stage]
        return finished(
            stage, iterations, top1, iterations * self.speed, epochs=iterations * BATCH / IMAGES, first_lr=lr,
            last_lr=lr / iterations, weight_decay=5e-4, augmentation="mirror", loss=1.5, test_loss=1.0,
            images_per_second=BATCH / self.speed, snapshot=self.ends[stage], ema_top1=ema, tested_on=f"/data/val_lmdb {TRANSFORM}",
        )  # fmt: skip

    def whole(self, *top1: float, ema: float | None = None) -> "Story":
        """One life from start to end."""
        self.begin()
        parent, before = None, 0
        for stage, accuracy in zip(STAGES, top1, strict=True):
            self.start(stage, parent)
            self.train(stage, 1, STAGES[stage][0], before)
            self.end(stage, parent, accuracy, ema if stage == "collapse" else None)
            parent, before = stage, before + STAGES[stage][0]
        self.write(RunFinished(trained=True, seconds=1))
        return self


def killed_and_resumed(out: Path) -> Story:
    """Killed after iteration 5 of init with a snapshot at 3, its last line cut short; then to its end on two workers."""
    story = Story(out).begin()
    story.start("init", None)
    story.train("init", 1, 3, 0)
    story.write(
        SnapshotWritten(stage="init", iter=3, name="init-00000003-a0001", bytes=1, blocked_seconds=0, seconds=0)
    )
    story.test("init", 3, 0.3, images=50)
    story.train("init", 4, 4, 0, loss=9.0)
    story.test("init", 4, 0.99)
    story.train("init", 5, 5, 0)
    with open(out / "log.jsonl", "a") as file:
        file.write('{"time": 1234.5, "event": "Itera\n')
    story.workers = 2
    story.begin()
    story.start("init", None, iter=3)
    story.train("init", 4, 6, 0)
    story.end("init", None, 0.5)
    return story


def three_seeds(folder: Path) -> list[Path]:
    """seed1, seed2 and seed3 in `folder`."""
    outs = [folder / f"seed{seed}" for seed in (1, 2, 3)]
    for seed, (out, last) in enumerate(zip(outs, (0.91, 0.92, 0.94), strict=True), 1):
        Story(out, seed).whole(0.6, 0.8, last)
    return outs


def report(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)], catch_exceptions=False)


def rows(*arguments: object) -> list[dict[str, str]]:
    result = report(*arguments, "--format", "csv")
    assert result.exit_code == 0, result.output
    return list(csv.DictReader(io.StringIO(result.stdout)))
