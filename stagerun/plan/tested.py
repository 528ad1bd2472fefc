"""What an evaluation depends on besides weights. Pure."""

from stagerun.recipe import Schedule, Stage
from stagerun.snapshots import same_set


def other_set(schedule: Schedule, tested_set: str) -> bool:
    """Whether the validation images are known to be others than those that `tested_set` (of a result) is of."""
    return same_set(tested_set, schedule.sets.get("val", "")) is False


def tested_on(schedule: Schedule, stage: Stage) -> str:
    """Images and transform of a stage's evaluation, as text; '' without data.val."""
    val = schedule.data.val
    if val is None:
        return ""
    # Without a field that evaluations never have, so that the results of a version that did not know it still count.
    transform = str(stage.solver.test_transform).replace(", crop_size_ramp=None", "")
    return f"{val.path} {val.images} {transform}"
