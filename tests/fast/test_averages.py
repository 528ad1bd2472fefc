"""The weights of an average that imitates a decay, against the decay itself; what is read of such an ensemble."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stagerun.base.errors import RecipeError
from stagerun.language import load
from stagerun.schedule.averages import weights

# Of how much of the way is gone, as the papers write them.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "one_minus_sqrt": lambda x: 1 - math.sqrt(x),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("iters", [range(6000, 8001, 500), [10, 11, 40, 100], [5, 6], range(1, 1001)])
def test_the_weights_come_to_what_the_decay_comes_to(shape: str, iters: list[int]) -> None:
    """Update by update: what each stretch added at the constant rate, times the decay where the stretch ends."""
    rng = np.random.default_rng(1)
    theta = rng.standard_normal((len(iters), 50)).cumsum(0)
    zero = iters[-1] + (iters[-1] - iters[0]) / (len(iters) - 1)
    decayed = theta[0].copy()
    for j in range(1, len(iters)):
        rate = SHAPES[shape]((iters[j] - iters[0]) / (zero - iters[0]))
        decayed += rate * (theta[j] - theta[j - 1])
    found = weights(shape, iters)
    assert sum(found) == pytest.approx(1, abs=1e-14) and min(found) > 0
    assert np.abs(np.array(found) @ theta - decayed).max() < 1e-12 * np.abs(theta).max()


def test_a_line_over_even_steps_is_the_plain_mean() -> None:
    assert weights("linear", range(100, 501, 100)) == pytest.approx(weights(None, range(100, 501, 100)), abs=1e-16)


AVERAGED = """
name: "along" model { name: "resnet18" num_classes: 10 }
data { train { source: "/d" images: 1000 } val { source: "/d" images: 1000 } }
solver { batch_size: 10 device_batch_size: 10 base_lr: 0.1 lr_policy: "fixed" max_iter: 80 transform_param { crop_size: 64 } }
stage { name: "trunk" solver_param {} }
ensemble { name: "late" members: "trunk@40..80/20" rule: WEIGHT_AVERAGE }
stage { name: "fine" from: "late" solver_param {} }
"""
OTHER = '[{name: "late" members: "trunk@60..80/20" rule: WEIGHT_AVERAGE}]'


def test_set_changes_a_stage_that_starts_from_an_average_and_not_the_average(tmp_path: Path) -> None:
    """The tree is that of the files: another average would be another tree."""
    (tmp_path / "schedule.prototxt").write_text(AVERAGED)
    changed = load(tmp_path, ["fine.base_lr=0.5", "trunk.base_lr=0.2"])
    assert [stage.solver.base_lr for stage in changed.stages] == [0.2, 0.5]
    with pytest.raises(RecipeError) as refused:
        load(tmp_path, [f"ensemble={OTHER}"])
    assert str(refused.value.render()).endswith(
        """schedule.prototxt:7:28: --set changes ensembles, and `fine` starts from `late`
  stage { name: "fine" from: "late" solver_param {} }
                             ^^^^^^
  hint: write the ensemble in schedule.prototxt

1 mistake"""
    )
    with pytest.raises(RecipeError, match="`late` is neither a stage nor a field of Schedule"):
        load(tmp_path, ["late.shape=linear"])
