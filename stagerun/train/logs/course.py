"""Where each stage lies in a schedule: what is trained before it, along its path from the seed and in running order."""

from dataclasses import dataclass

from stagerun.plan import Plan, PlannedStage, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One stage. Lengths are weight updates and images trained on; unlike the position in the data, no
    `carry { data: RESTART }` sets them back."""

    stage: str
    # Its ancestors from the seed on, and itself, each with the iterations that lie on its path: a stage may be left early.
    steps: tuple[tuple[str, int], ...]
    iterations: int
    batch_size: int
    epoch_images: int
    iterations_before: int  # along the path
    images_before: int  # along the path
    own_before: float  # the epochs along the path, as images of its own set: those, where all of it has that set
    iterations_above: int  # of all stages that run before it, other branches too

    def images(self, iter: int) -> int:
        """Images trained on along the path, after `iter` updates of the stage."""
        return self.images_before + iter * self.batch_size

    def epoch(self, iter: int) -> float:
        """The same in epochs, each of the images that were trained on."""
        return (self.own_before + iter * self.batch_size) / self.epoch_images


def course(plan: Plan) -> dict[str, Leg]:
    """The legs by stage, in running order, of those that are enabled."""
    legs: dict[str, Leg] = {}
    above = 0
    for planned in plan.stages:
        stage = planned.stage
        if planned.state is State.DISABLED:
            continue
        parent = legs[stage.parent] if stage.parent else None
        before = 0 if parent is None else parent.iterations if stage.parent_iter is None else stage.parent_iter
        iterations, batch_size = _length(planned)
        images, own = stage.data.train.images, 0.0
        if parent is not None:
            same = stage.data.train.same(plan.schedule.stage(parent.stage).data.train)
            own = parent.own_before + before * parent.batch_size if same else parent.epoch(before) * images
        legs[stage.name] = Leg(
            stage=stage.name,
            steps=(*((*parent.steps[:-1], (parent.stage, before)) if parent else ()), (stage.name, iterations)),
            iterations=iterations,
            batch_size=batch_size,
            epoch_images=images,
            iterations_before=parent.iterations_before + before if parent else 0,
            images_before=parent.images(before) if parent else 0,
            own_before=own,
            iterations_above=above,
        )
        above += iterations
    return legs


def ends(legs: dict[str, Leg]) -> list[str]:
    """The stages at whose end no other starts, in running order: one in a chain."""
    inner = {stage for leg in legs.values() for stage, length in leg.steps[:-1] if length == legs[stage].iterations}
    return [stage for stage in legs if stage not in inner]


def _length(planned: PlannedStage) -> tuple[int, int]:
    """Iterations and batch size of the stage; of a kept one those that it was trained with."""
    solver = planned.stage.solver
    if planned.kept and planned.end is not None:
        return planned.end.iter, planned.end.whole("solver.batch_size", solver.batch_size)
    return solver.max_iter, solver.batch_size
