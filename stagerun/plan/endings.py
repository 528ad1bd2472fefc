"""What a stage minimises, and where `early_stop` may end it, in a few words. Pure."""

from stagerun.base.recipe import LossType, Metric, Normalization, Solver
from stagerun.base.text import count
from stagerun.base.units import epochs
from stagerun.plan.planned import PlannedStage, State


def loss(solver: Solver) -> str:
    """'' where it is what it is by default."""
    how = solver.loss
    if how is None or how.type is LossType.SOFTMAX:
        return ""
    if how.type is LossType.BINARY:
        mean = "outputs" if how.normalization is Normalization.FULL else "images"
        return f"loss: BINARY, each class by itself, mean over {mean}"
    if how.type is LossType.PYTHON:
        return f"loss: `{how.function}`" + (f" with {how.args}" if how.args else "")
    teacher = f"`{how.teacher}`" if how.teacher_weights is None else how.teacher_weights.file
    teacher += f" ({how.teacher_model.name})" if how.teacher_model is not None else ""
    return f"loss: DISTILL, taught by {teacher}, temperature {how.temperature:g}, weight {how.weight:g}"


def ends(planned: PlannedStage) -> str:
    """Where the stage ends at the earliest and at the latest, or has ended; '' without `early_stop`."""
    solver, images = planned.stage.solver, planned.stage.data.train.images
    how = solver.early_stop
    if how is None:
        return ""

    def at(iter: int) -> str:
        return f"{iter} ({epochs(iter, images, solver.batch_size):.2f} epochs)"

    if planned.state is State.DONE and planned.iter < solver.max_iter:
        return f"ended at iteration {at(planned.iter)} by early_stop, of {at(solver.max_iter)}"
    unit = "" if how.metric is Metric.LOSS else " %"
    better = how.metric.value + (f" (by more than {how.min_delta:g}{unit})" if how.min_delta else "")
    waits = count(how.patience_iter, "iteration")
    if solver.earliest_end >= solver.max_iter:
        return f"early_stop never ends it: {waits} without a better {better} are too long for {at(solver.max_iter)}"
    return (
        f"ends after {waits} without a better {better}: at {at(solver.earliest_end)} at the earliest, "
        f"{at(solver.max_iter)} at the latest"
    )
