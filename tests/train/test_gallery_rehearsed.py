"""Every schedule in solvers/ goes through a rehearsal with made-up images: all stages, a stop and a resume, carry-over, snapshots,
branches, evaluation, ensembles. ImageNet's in small device batches of 64 pixels."""

import json
from pathlib import Path

import contract
import pytest
from facade import Schedule

from stagerun.language import load

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
        of = {"transform_param": stage.solver.transform, "test_transform_param": stage.solver.test_transform}
        for field, transform in of.items():
            if transform.crop_size is not None and transform.crop_size > SIDE:
                words.append(f"{stage.name}.{field}.crop_size={SIDE}")
            if transform.crop_size_ramp is not None:
                words.append(f"{stage.name}.{field}.crop_size_ramp_param.start_size={SIDE // 2}")
    return words


@pytest.mark.parametrize("name", GALLERY)
def test_a_rehearsal_goes_through_every_stage(name, tmp_path):
    sets = small_images(load(SOLVERS / name))
    stages = {stage.name for stage in load(SOLVERS / name, sets).stages}
    words = ["rehearse", SOLVERS / name, "--synthetic", "--iters", 2, "--device-batch", 4, "--nproc", 1, "--out", "out"]
    done = contract.stagerun([*words, *(word for change in sets for word in ("--set", change))], tmp_path)
    assert done.exit_code == 0, done.output
    assert all(f"  {stage}: evaluated " in done.stdout for stage in stages)
    figures = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    assert {stage for cost in figures["costs"] for stage in cost["stages"]} == stages
