"""In what two schedules differ: stages, fields, and where their learning rates part. Pure.

Stages are matched by name. The values compared are the resolved ones, so another way of writing the same is not a difference.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stagerun.base.recipe import Origin, Schedule, Solver, Stage
from stagerun.language.values import differing, identity, leaves, plain, shown, text
from stagerun.schedule import learning_rate

MOST = 1_000_000  # iterations of a stage whose rates are compared one by one; of a longer one, so many among them


@dataclass(frozen=True, slots=True)
class Value:
    """`text` as people read it, `value` as programs do: numbers in iterations and for the whole batch, None for what is not set.

    `written` is what the file says where that is in another unit, and `place` where it says it: '' for a recipe that was read
    from a snapshot, or a `default`.
    """

    text: str
    written: str = ""
    place: str = ""
    default: bool = False
    value: Any = field(default=None, compare=False)  # of the same text


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """`stage` is '' for what all stages share. `trains`: whether snapshots depend on it."""

    stage: str
    field: str
    a: Value
    b: Value
    trains: bool


@dataclass(frozen=True, slots=True)
class RateDifference:
    """Among the iterations that both have: the first at which the learning rates differ, and the one at which they do most."""

    stage: str
    first: int
    most: int
    a: float
    b: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`same`: they train the same thing, whatever else differs. `only_a`, `only_b`: names of stages and ensembles.

    `reworded`: fields whose values are the same, but written so that snapshots of one are stale for the other, as a rate for
    another `base_lr_batch` is; known of two folders.
    """

    same: bool
    stages: tuple[str, ...]  # that both have
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    fields: tuple[FieldDifference, ...]
    rates: tuple[RateDifference, ...]
    reworded: tuple[str, ...] = ()


def difference(a: Schedule, b: Schedule) -> Difference:
    """In the order of `a`, what only `b` has after it."""
    in_a, in_b = _names(a), _names(b)
    both = [stage.name for stage in a.stages if stage.name in {other.name for other in b.stages}]
    fields = list(_shared(a, b))
    for name in both:
        fields += _stage(a, b, a.stage(name), b.stage(name))
    rates = (_rates(name, a.stage(name).solver, b.stage(name).solver) for name in both)
    return Difference(
        same=_trained(a) == _trained(b),
        stages=tuple(both),
        only_a=tuple(name for name in in_a if name not in in_b),
        only_b=tuple(name for name in in_b if name not in in_a),
        fields=tuple(fields),
        rates=tuple(rate for rate in rates if rate is not None),
        reworded=tuple(dict.fromkeys(key for name in both for key in _reworded(a.stage(name), b.stage(name)))),
    )


def _names(schedule: Schedule) -> list[str]:
    return [*(f"stage {s.name}" for s in schedule.stages), *(f"ensemble {e.name}" for e in schedule.ensembles)]


def _trained(schedule: Schedule) -> tuple[object, ...]:
    """What training depends on: for each stage what it starts from and its settings. Names are not in it."""
    number = {stage.name: n for n, stage in enumerate(schedule.stages)}
    shared = [("seed", text(schedule.seed)), ("determinism", text(schedule.determinism))]
    shared += [*leaves(schedule.model, "model"), *leaves(schedule.data, "data")]

    def counting(values: list[tuple[str, str]], lr_policy: str = "") -> tuple[tuple[str, str], ...]:
        return tuple(value for value in values if identity(value[0], lr_policy))

    stages = (
        (number.get(s.parent or "", -1), s.parent_iter, counting(list(leaves(s.solver, "solver")), s.solver.lr_policy))
        for s in schedule.stages
    )
    return counting(shared), tuple(stages)


def _shared(a: Schedule, b: Schedule) -> Iterator[FieldDifference]:
    origins_a, origins_b = _origins(a), _origins(b)
    parts: list[tuple[str, Any, Any]] = [
        (name, getattr(a, name), getattr(b, name))
        for name in ("name", "seed", "model", "data", "determinism", "keep_snapshots")
    ]
    for key, one, other in parts:
        for name, old, new in differing(one, other, key):
            values = (_value(name, old, (text(old), ""), origins_a), _value(name, new, (text(new), ""), origins_b))
            yield FieldDifference("", name, *values, identity(name))
    yield from _paths(a, b)
    for ensemble in a.ensembles:
        twin = next((e for e in b.ensembles if e.name == ensemble.name), None)
        for name in ("members", "rule", "batch_norm_iter") if twin else ():
            old, new = getattr(ensemble, name), getattr(twin, name)
            if old != new:
                yield FieldDifference("", f"ensemble {ensemble.name}.{name}", _held(old), _held(new), False)


def _paths(a: Schedule, b: Schedule) -> Iterator[FieldDifference]:
    """Paths of sources that are written alike and lie elsewhere, as relative ones do in another folder."""
    for name, one, other in (("data.train", a.data.train, b.data.train), ("data.val", a.data.val, b.data.val)):
        if one is not None and other is not None and one.source == other.source and one.path != other.path:
            here, there = Value(one.path, value=one.path), Value(other.path, value=other.path)
            yield FieldDifference("", f"{name}, found at", here, there, False)


def _origins(schedule: Schedule) -> Mapping[str, Origin]:
    return schedule.stages[0].origins


def _stage(a: Schedule, b: Schedule, one: Stage, other: Stage) -> Iterator[FieldDifference]:
    if (one.parent, one.parent_iter) != (other.parent, other.parent_iter):
        old, new = (Value(_start(s) or "the seed", "", _at(s), value=_start(s)) for s in (one, other))
        yield FieldDifference(one.name, "from", old, new, True)
    if one.enabled != other.enabled:
        old, new = (_held(s.enabled, _at(s)) for s in (one, other))
        yield FieldDifference(one.name, "enabled", old, new, False)
    for key, mine, its in differing(one.solver, other.solver, "solver"):
        yield FieldDifference(
            one.name,
            key.removeprefix("solver."),
            _value(key, mine, shown(key, text(mine), one, a.data.train.images), one.origins),
            _value(key, its, shown(key, text(its), other, b.data.train.images), other.origins),
            identity(key, one.solver.lr_policy) or identity(key, other.solver.lr_policy),
        )


def _reworded(one: Stage, other: Stage) -> Iterator[str]:
    if not one.identity or not other.identity:
        return
    differ = [key for key, *_ in differing(one.solver, other.solver, "solver")]
    for key in one.identity.keys() | other.identity.keys():
        shown_already = any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for name in differ)
        if key.startswith("solver.") and one.identity.get(key) != other.identity.get(key) and not shown_already:
            yield key.removeprefix("solver.")


def _start(stage: Stage) -> str:
    """As `from` has it: '' for the seed."""
    return (stage.parent or "") + (f"@{stage.parent_iter}" if stage.parent_iter is not None else "")


def _at(stage: Stage) -> str:
    return f"{stage.span.path}:{stage.span.line}" if stage.origins else ""


def _held(value: Any, place: str = "") -> Value:
    return Value(text(value), "", place, value=plain(value))


def _value(key: str, value: Any, texts: tuple[str, str], origins: Mapping[str, Origin]) -> Value:
    """With the place of the field; of a message, that of the first of its fields that is written. `texts` as `shown` gives
    them."""
    said, written = texts
    if not origins:
        return Value(said, value=plain(value))
    inside = [origins[key]] if key in origins else [o for name, o in origins.items() if name.startswith(key + ".")]
    span = min((origin.span for origin in inside if origin.span is not None), default=None)
    if span is None:
        return Value(said, default=True, value=plain(value))
    return Value(said, written, f"{span.path}:{span.line}", value=plain(value))


def _rates(name: str, a: Solver, b: Solver) -> RateDifference | None:
    """None where the learning rates are the same."""
    if a == b:
        return None
    one, other = learning_rate(a), learning_rate(b)
    length = min(a.max_iter, b.max_iter)
    step = -(-length // MOST)
    first, most, largest = -1, -1, 0.0
    for iter in range(0, length, step):
        gap = abs(one(iter) - other(iter))
        if gap > 0 and first < 0:
            first = iter
        if gap > largest:
            most, largest = iter, gap
    return None if first < 0 else RateDifference(name, first, most, one(most), other(most))
