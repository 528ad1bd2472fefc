"""`stagerun rehearse --find-lr`: the updates are those of the stage, from its own start, and nothing is left behind."""

from pathlib import Path

import pytest
import torch
from facade import Context, Iterated, Schedule, World

import stagerun
from stagerun.comm import SoloComm
from stagerun.plan import PlannedStage
from stagerun.tools.rehearse.find_lr import start_of
from stagerun.tools.rehearse.sweep import Point, rate, swept
from stagerun.tools.rehearse.sweep_run import sweep
from stagerun.train.output import plan_of


def find(
    schedule: Schedule, stage: str, out: Path, asked: tuple[float, float, int], stop_after: int | None = None
) -> tuple[list[Point], str, str]:
    """`asked`: the first rate, the last one, and iterations."""
    cut, _ = swept(schedule, stage, asked[2])
    done: list[int] = []

    def begin() -> PlannedStage:
        return start_of(plan_of(schedule, out), stage, str(out))

    def watch(iter: int, lr: float, smoothed: float) -> None:
        done.append(iter)

    def stop() -> bool:
        return stop_after is not None and len(done) >= stop_after - 1

    context = Context(cut, str(out), SoloComm(), World(), torch.device("cpu"), None, stop)
    return sweep(schedule, context, begin, lambda i: rate(i, *asked), watch)


@pytest.fixture(scope="module")
def trained(base: Path) -> tuple[Schedule, Path, dict[str, list[Iterated]]]:
    """The schedule, its output, and the iterations of its first two stages."""
    schedule = stagerun.load(base / "schedule")
    found: dict[str, list[Iterated]] = {}
    for event in stagerun.run(schedule, base / "out", until="cyc1", threads=1):
        if isinstance(event, Iterated):
            found.setdefault(event.stage, []).append(event)
    return schedule, base / "out", found


def everything(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("stage, start", [("init", "seed 1"), ("cyc1", "init-00000006-a0001")])
def test_its_first_loss_is_that_of_the_stage(
    trained: tuple[Schedule, Path, dict[str, list[Iterated]]], stage: str, start: str
) -> None:
    """The same images, transform and weights: those of the parent's end, though the stage itself is trained, too."""
    schedule, out, iterations = trained
    before = everything(out)
    points, began, ended = find(schedule, stage, out, (1e-4, 1e-2, 10))
    assert began.startswith(start.split()[0]) and ended == "" and len(points) == 10
    assert points[0].loss == iterations[stage][0].loss
    assert [p.lr for p in points] == pytest.approx([1e-4 * 100 ** (i / 9) for i in range(10)])
    assert everything(out) == before


def test_the_same_rate_gives_the_updates_of_the_stage(base: Path, tmp_path: Path) -> None:
    words = ["init.lr_policy=fixed", "init.base_lr=0.05"]
    schedule = stagerun.load(base / "schedule", words)
    run = stagerun.run(schedule, tmp_path / "out", until="init", threads=1)
    losses = [(e.lr, e.loss) for e in run if isinstance(e, Iterated)]
    constant = [loss for lr, loss in losses if lr == losses[0][0]]
    points, _, _ = find(schedule, "init", tmp_path / "none", (losses[0][0], losses[0][0], len(constant)))
    assert [p.loss for p in points] == constant


def test_it_ends_where_it_diverges_and_where_it_is_interrupted(base: Path, tmp_path: Path) -> None:
    schedule = stagerun.load(base / "schedule")
    points, _, ended = find(schedule, "init", tmp_path, (1.0, 1e6, 60))
    assert len(points) < 60 and ("4 times its lowest" in ended or "not finite" in ended)
    points, _, ended = find(schedule, "init", tmp_path, (1e-4, 1e-2, 60), stop_after=3)
    assert len(points) == 3 and ended == "it was interrupted"
    assert list(tmp_path.iterdir()) == []
