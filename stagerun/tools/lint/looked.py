"""What the rules look at, and rows for them. Pure."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

from stagerun.base.errors import Level, Span
from stagerun.base.recipe import Schedule, Stage
from stagerun.language.rules.rule import Found, Rule
from stagerun.schedule import learning_rate, warm_up_end

# A rate that comes to less than this share of the stage's highest one is zero.
NOTHING = 1e-3
_SAMPLES = 100


class Looked:
    """A stage, what it starts from, and what several rules want to know of it."""

    def __init__(self, schedule: Schedule, stage: Stage, parent: "Looked | None") -> None:
        self.schedule, self.stage, self.parent = schedule, stage, parent
        self.solver, self.train = stage.solver, stage.data.train
        self.name = f"stage `{stage.name}`"
        self.start = schedule.start_iter(stage)
        self.rate = learning_rate(stage.solver)

    @cached_property
    def points(self) -> tuple[int, ...]:
        """Where snapshots are taken in any case, its start and its end among them."""
        return 0, *self.schedule.branch_points(self.stage.name), self.solver.max_iter

    @cached_property
    def peak(self) -> float:
        """The stage's highest rate, as far as a hundred places show, the end of its warm-up and its knots among them."""
        rate, last = self.rate, self.solver.max_iter - 1
        places = {last * n // _SAMPLES for n in range(_SAMPLES + 1)} | {warm_up_end(self.solver)}
        places |= {round(knot.iter) for knot in self.solver.knot}
        return max(rate(place) for place in places if 0 <= place <= last)

    def at_zero(self, length: int) -> bool:
        """Whether the rate would be zero at the next update after so many, if it went on as in its last two: a decay's last rate is that of
        one update before its end."""
        last = self.rate(length - 1)
        following = last if length < 2 else 2 * last - self.rate(length - 2)
        return min(last, following) <= NOTHING * self.peak

    def place(self, *fields: str) -> Span:
        """Where the first of these fields of Solver that is written stands; where none is, the stage's own line."""
        return self.stage.written(*(f"solver.{field}" for field in fields)) or self.stage.span


def looked_at(schedule: Schedule) -> list[Looked]:
    found: dict[str | None, Looked] = {}
    for stage in schedule.stages:
        found[stage.name] = Looked(schedule, stage, found.get(stage.parent))
    return list(found.values())


def _row(level: Level, id: str, find: Callable[[Looked], Found], purpose: str, looks: bool = False) -> Rule:
    """A rule that looks at each stage by itself."""

    def each(stages: Sequence[Looked]) -> Found:
        return (found for it in stages for found in find(it))

    return Rule(id, each, level, purpose, looks)


warning, note = partial(_row, Level.WARNING), partial(_row, Level.NOTE)
