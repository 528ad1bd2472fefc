"""The knots of piecewise_linear: their places in iterations, and what is wrong with them. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from stagerun import units
from stagerun.spec.problems import Problems
from stagerun.spec.scalars import INT64_MAX
from stagerun.spec.tree import Block, Entry, Value
from stagerun.spec.view import View

# Where knots stand in a Solver: its own, and those in messages.
INSIDE = ("momentum_policy", "weight_decay_policy")
EPOCH = "epoch"


def in_iterations(block: Block, images: int | None, batch: int | None, problems: Problems) -> Block:
    """A Solver's settings with every knot at an iteration, no whole one in general, still at the place where it was written.
    `images` of an epoch and `batch` are None where they aren't known; knots that depend on them are doubtful then.
    """
    block = _converted(block, images, batch, problems)
    for name in INSIDE:
        inner = block.block(name)
        if inner is not None:
            found = _converted(inner, images, batch, problems)
            value = replace(block.entries[name].values[0], value=found)
            block = replace(block, entries={**block.entries, name: replace(block.entries[name], values=(value,))})
    return block


def _converted(block: Block, images: int | None, batch: int | None, problems: Problems) -> Block:
    """The message with its field `knot` converted, or doubtful."""
    entry = block.entries.get("knot")
    if entry is None:
        return block
    values = []
    for value in entry.values:
        assert isinstance(value.value, Block)
        found = _knot(value.value, images, batch, problems)
        values += [replace(value, value=found)] if found else []
    if len(values) == len(entry.values):
        return replace(block, entries={**block.entries, "knot": replace(entry, values=tuple(values))})
    kept = {name: e for name, e in block.entries.items() if name != "knot"}
    return replace(block, entries=kept, doubtful=block.doubtful | {"knot"})


def _knot(block: Block, images: int | None, batch: int | None, problems: Problems) -> Block | None:
    """The knot with `iter` in place of `epoch`. None where it has both, neither, no factor, or is not known."""
    iter, epoch = block.entries.get("iter"), block.entries.get(EPOCH)
    if block.broken or block.doubtful:
        return None  # which has been reported
    if "factor" not in block.entries:
        problems.add(block.place, "Knot lacks `factor`", "write `factor: 1` for base_lr itself, say")
        return None
    if iter is not None and epoch is not None:
        later, earlier = sorted((iter, epoch), key=lambda e: e.name, reverse=True)
        message = f"`{later.field.name}` and `{earlier.field.name}` say the same thing"
        problems.add(later.name, message, f"keep one of them; the other stands in line {earlier.name.line}")
        return None
    if epoch is None:
        if iter is None:
            problems.add(block.place, "Knot lacks `iter` or `epoch`", "write `epoch: 5` or `iter: 1000`, say")
        return block if iter is not None else None
    if images is None or batch is None:
        return None
    value = epoch.values[0]
    assert isinstance(value.value, int | float)
    place = units.exact(value.value, images, batch)
    if place > INT64_MAX:
        problems.add(value.span, "`epoch` is more iterations than 64 bits can count")
        return None
    count = place.numerator if place.denominator == 1 else float(place)
    converted = Entry(
        block.kind.fields_by_name["iter"], epoch.name, (Value(count, f"{EPOCH}: {value.text}", value.span),)
    )
    return replace(block, entries={"iter": converted} | {n: e for n, e in block.entries.items() if n != EPOCH})


def check_knots(view: View, whose: str, problems: Problems) -> None:
    """Two or more, in the order of their places, no more than two at one. `whose`: `lr_policy`, say. Doubtful."""
    if not view.has("knot"):
        return
    knots = [View(block) for block in view.block.blocks("knot")]
    if len(knots) == 1:
        message = f"piecewise_linear of `{whose}` has one knot, and a line two"
        problems.add(view.place("knot"), message, "write another, or lr_policy `fixed`" if whose == "lr_policy" else "")
    for earlier, later in itertools.pairwise(knots):
        if _place(later) < _place(earlier):
            message = f"the knot at {_written(later)} does not come after the one at {_written(earlier)}"
            problems.add(later.place("iter"), message, "knots are in the order of their places")
    for first, _, third in _triples(knots):
        if _place(first) == _place(third):
            message = f"three knots at {_written(third)}"
            problems.add(third.place("iter"), message, "two make a jump, and the one in between says nothing")


def _triples(knots: Sequence[View]) -> list[tuple[View, View, View]]:
    return list(zip(knots, knots[1:], knots[2:], strict=False))


def _place(knot: View) -> float:
    place = knot.number("iter")
    assert place is not None
    return place


def _written(knot: View) -> str:
    """`epoch 5`, or `iteration 780`."""
    text = knot.block.entries["iter"].values[0].text
    name, mark, value = text.partition(": ")
    return f"{name} {value}" if mark else f"iteration {text}"
