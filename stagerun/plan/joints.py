"""Where a stage's learning rate is not one policy's: where it leaves its parent, and where its warm-up ends. Pure."""

from dataclasses import dataclass

from stagerun.base.recipe import Schedule, Stage
from stagerun.schedule import learning_rate, warm_up_end

# A learning rate that is off by more than this share, where one would expect it to go on, jumps.
JUMP = 0.05


@dataclass(frozen=True, slots=True)
class Joint:
    """Where the learning rate is not one policy's: `before` is the rate of the update before `iter`, `after` that of the
    one at `iter`. `place` is the parent's name at iteration 0, and `warm-up` where a warm-up ends. Rates of `plateau` are those
    before any drop."""

    place: str
    iter: int
    before: float
    after: float


def joints(schedule: Schedule, stage: Stage) -> list[Joint]:
    """The stage's joints, in the order of its iterations; jumps or not."""
    solver = stage.solver
    rate = learning_rate(solver)
    found = []
    if stage.parent is not None:
        parent = schedule.stage(stage.parent).solver
        found.append(Joint(stage.parent, 0, learning_rate(parent)(schedule.start_iter(stage) - 1), rate(0)))
    end = warm_up_end(solver)
    if stage.begins < end < solver.max_iter:
        found.append(Joint("warm-up", end, rate(end - 1), rate(end)))
    return found


def jumps(schedule: Schedule, stage: Stage, joint: Joint) -> bool:
    """Whether the rate is off: a ramp ends at base_lr, whatever its last step is; a child goes on with its parent's rate, and how far that
    of a `plateau` has come down is unknown."""
    if not joint.iter and schedule.stage(joint.place).solver.lr_policy == "plateau":
        return False
    due = stage.solver.base_lr if joint.iter else joint.before
    return abs(joint.after - due) > JUMP * due
