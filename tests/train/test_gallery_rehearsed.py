"""Every schedule in solvers/ goes through a rehearsal with made-up images: all stages, a stop and a resume, carry-over, snapshots,
branches, evaluation, ensembles. ImageNet's in small device batches of 64 pixels."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from facade import Schedule, World

import stagerun.tools.rehearse.measure as rehearsing
from stagerun.comm import SoloComm
from stagerun.language import load
from stagerun.tools.rehearse.measure import Rehearsal, rehearse

SOLVERS = Path(__file__).parents[2] / "solvers"
SIDE = 64
# One of each kind of stage and of network that is quick; the others are left to scripts/test --slow.
QUICK = {"cifar10_alexnet", "cifar10_inception_bn_28", "fashion_ensemble"}
GALLERY = [
    pytest.param(path.name, marks=() if path.name in QUICK else pytest.mark.slow) for path in sorted(SOLVERS.iterdir())
]


def small_images(schedule: Schedule) -> list[str]:
    """The changes (--set) with which no image of a schedule is larger than SIDE."""
    words = []
    for stage in schedule.stages:
        for field, transform in (
            ("transform_param", stage.solver.transform),
            ("test_transform_param", stage.solver.test_transform),
        ):
            if transform.crop_size is not None and transform.crop_size > SIDE:
                words.append(f"{stage.name}.{field}.crop_size={SIDE}")
            if transform.crop_size_ramp is not None:
                words.append(f"{stage.name}.{field}.crop_size_ramp_param.start_size={SIDE // 2}")
    return words


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is room for it: snapshots of a ResNet-50 are 200 MB, and each is awaited on its disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 4 * 10**9:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as made:
        yield Path(made)


@pytest.mark.parametrize("name", GALLERY)
def test_a_rehearsal_goes_through_every_stage(name, folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr("stagerun.train.images.SYNTHETIC_IMAGES", 24)  # all of which each stage's evaluation looks at
    schedule = load(SOLVERS / name, small_images(load(SOLVERS / name)))
    asked = Rehearsal(iters=2, device_batch=4, synthetic=True)
    events: list[object] = []
    figures = rehearse(
        schedule, asked, folder / "out", SoloComm(), World(), torch.device("cpu"), lambda: False, events.append
    )
    assert figures is not None
    trained = {event.stage for event in events if isinstance(event, rehearsing.StageFinished)}
    tested = {event.stage for event in events if isinstance(event, rehearsing.Tested)}
    assert trained == tested == {stage.name for stage in schedule.stages}
    assert {stage for cost in figures.costs for stage in cost.stages} == trained
    losses = [event.loss for event in events if isinstance(event, rehearsing.Iterated)]
    assert losses and all(0 < loss < 100 for loss in losses)
