"""What stands in OUT/results after a stage."""

import json
from dataclasses import asdict

from stagerun.events import StageFinished
from stagerun.logged import result_of
from stagerun.runner.finish import finite


def test_a_test_loss_that_is_no_number_is_evaluated_once() -> None:
    """Finite weights can give it; the result must be readable, or each plan would ask for the evaluation again."""
    finished = StageFinished(
        stage="a", iterations=1, epochs=1.0, first_lr=0.1, last_lr=0.1, weight_decay=0.0, augmentation="none", loss=1.0,
        top1=0.1, top5=0.5, test_loss=finite(float("nan")), train_seconds=1.0, images_per_second=1.0, snapshot="s",
    )  # fmt: skip
    assert result_of(json.dumps(asdict(finished)).encode()) == finished
    assert finite(float("inf")) is None and finite(2.5) == 2.5
