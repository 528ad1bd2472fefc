"""The source of each tensor of a network at the start of a stage: a file, the parent stage, or the seed. Pure: names and shapes alone.

A tensor that the file offers (`recipe.Weights`) comes from the file; any other one that the parent has in the same shape comes from the
parent; the rest is drawn from the seed.
"""

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stagerun.base.errors import nearest
from stagerun.base.recipe import Stage, Weights
from stagerun.base.text import columns, count
from stagerun.base.weights import COUNTER, fits, renamed

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_MOST = 6  # names in a line of a table, and in a message


class Origin(enum.Enum):
    FILE = "taken from the file"
    PARENT = "kept"
    MISFIT = "did not fit, drawn anew"  # the words that snapshots store
    ANEW = "drawn anew"
    LEFT = "left in the file"


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor of the network, or an unused one of the file. `was`: its name in the file. `why`: the reason that it does not come from
    a possible source, or is not used."""

    name: str
    shape: Shape
    origin: Origin
    was: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Transfer:
    """`rows` has each tensor of the network once, in its order; `left`: unused tensors of the file. `behind`: names that only the
    parent's network has."""

    rows: tuple[Row, ...]
    left: tuple[Row, ...] = ()
    behind: tuple[str, ...] = ()

    def of(self, *origins: Origin) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.origin in origins)


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in `field`, a field of WeightsParameter."""

    field: str
    message: str
    hint: str = ""


def transfer(
    network: Shapes, parent: Shapes | None = None, file: Shapes | None = None, weights: Weights | None = None
) -> tuple[Transfer, tuple[Mistake, ...]]:
    """Return the sources and the mistakes. `parent`: the network of the stage before, None for the seed; `file`: the tensors of the
    file of `weights`."""
    names, here, why = dict[str, str](), dict[str, Shape](), dict[str, str]()  # by names in the network
    used, mistakes = set[object](), list[Mistake]()
    if file is None or weights is None:
        file = {}
    for was, shape in file.items():
        assert weights is not None
        name, rule = renamed(was, weights.rename)
        used.add(rule)
        if (first := names.setdefault(name, was)) != was:
            text = f"`{first}` and `{was}` of {weights.file} both become `{name}`"
            hint = "a tensor has one source: `drop` does not help, another `rename` does"
            mistakes.append(Mistake("rename", text, hint))
        here.setdefault(name, shape)
    for name in (*network, *here):
        if weights is not None and fits(name, weights.drop):
            why[name] = "dropped"
        elif name not in network:
            why[name] = "not in the network"
        elif weights is not None and here.get(name) != network[name]:
            why[name] = f"{size(here[name])} in the file" if name in here else "not in the file"
    rows = tuple(_row(name, network, parent, names, here, why) for name in network)
    left = [Row(names[n], here[n], Origin.LEFT, n, _why_left(why[n], network.get(n))) for n in here if n in why]
    behind = tuple(name for name in parent or () if name not in network)
    made = Transfer(rows, tuple(sorted(left, key=lambda row: row.name)), behind)
    if weights is not None:
        mistakes += _idle(network, here, file, weights, used)
        mistakes += _unaccounted(made, here, network, weights)
    return made, tuple(mistakes)


def _row(
    name: str, network: Shapes, parent: Shapes | None, names: Mapping[str, str], here: Shapes, why: Mapping[str, str]
) -> Row:
    shape, reason = network[name], why.get(name, "")
    if name in names and not reason:
        return Row(name, shape, Origin.FILE, names[name])
    if parent is not None and parent.get(name) == shape:
        return Row(name, shape, Origin.PARENT, why=reason)
    before = ""
    if parent is not None:
        before = (f"{size(parent[name])}" if name in parent else "not") + " in the network before"
    misfit = (parent is not None and name in parent) or (name in here and reason != "dropped")
    return Row(name, shape, Origin.MISFIT if misfit else Origin.ANEW, why=", ".join(filter(None, (reason, before))))


def _why_left(why: str, shape: Shape | None) -> str:
    return f"{size(shape)} in the network" if why.endswith("in the file") and shape is not None else why


def _idle(network: Shapes, here: Shapes, file: Shapes, weights: Weights, used: set[object]) -> Iterator[Mistake]:
    """Report patterns that match nothing."""
    for pattern in weights.drop:
        if not any(fits(name, (pattern,)) for name in (*network, *here)):
            hint = nearest(pattern, {*network, *here}) or _named_like(network, "the network's")
            text = f'`drop: "{pattern}"` fits no tensor of the network or of {weights.file}'
            yield Mistake("drop", text, hint)
    for rule in weights.rename:
        if rule not in used:
            hint = nearest(rule.from_, file) or _named_like(file, "the file's")
            text = f'`from: "{rule.from_}"` fits no tensor of {weights.file}, or an earlier entry takes them'
            yield Mistake("rename", text, hint)


def _unaccounted(made: Transfer, here: Shapes, network: Shapes, weights: Weights) -> Iterator[Mistake]:
    """Report tensors of the file that don't fit; with `strict` also those that the network or the file lacks."""
    if not made.of(Origin.FILE):
        hint = _rename_hint(network, here)
        if not hint and here:
            hint = f"{_named_like(here, 'its')}, and the network's like `{next(iter(network), '')}`"
        yield Mistake("file", f"{weights.file} has no tensor of the network", hint)
        return

    def mistake(names: Sequence[str], text: str, shown: Iterable[str], does: str) -> Iterator[Mistake]:
        if names:
            patterns = dict.fromkeys(f"{n.rpartition('.')[0]}.*" if "." in n else n for n in names)
            drop = " ".join(f'drop: "{p}"' for p in list(patterns)[:3]) + " ..." * (len(patterns) > 3)
            hint = f"write `{drop}` to {does.format('it' if len(names) == 1 else 'them')}"
            if not does.endswith("out"):
                hint = _rename_hint(network, here) or f"{hint}, or `strict: false`"
            yield Mistake("file", f"{text.format(count(len(names), 'tensor'))}: {some(list(shown))}", hint)

    kept = [row for row in made.left if row.why != "dropped"]
    misfits = [row.was for row in kept if row.was in network]
    shown = (f"`{n}` {size(here[n])} in the file, {size(network[n])} in the network" for n in network if n in misfits)
    misfits = [name for name in network if name in misfits]
    have = "has" if len(misfits) == 1 else "have"
    yield from mistake(misfits, f"{{}} of {weights.file} {have} another shape", shown, "leave {} out")
    if weights.strict:
        drawn = (row for row in made.of(Origin.ANEW, Origin.MISFIT) if row.name not in here)
        lacks = [r.name for r in drawn if not (fits(r.name, weights.drop) or r.name.endswith(COUNTER))]
        text = f"{weights.file} lacks {{}} of the network"
        yield from mistake(lacks, text, (f"`{name}`" for name in lacks), "draw {} from the seed")
        spare = {row.was: row.name for row in kept if row.was not in network and not row.was.endswith(COUNTER)}
        text = f"{{}} of {weights.file} {'is' if len(spare) == 1 else 'are'} not in the network"
        yield from mistake(list(spare), text, (f"`{was}`" for was in spare.values()), "leave {} out")


def _rename_hint(network: Shapes, here: Shapes) -> str:
    """Return a hint to remove a prefix, if names fit without it."""
    for prefix in dict.fromkeys(name.partition(".")[0] for name in here):
        inside = [name.removeprefix(f"{prefix}.") for name in here if name.startswith(f"{prefix}.")]
        if inside and prefix not in {name.partition(".")[0] for name in network} and any(n in network for n in inside):
            return f'write `rename {{ from: "{prefix}.*" to: "*" }}`'
    return ""


def _named_like(names: Iterable[str], whose: str) -> str:
    first = next(iter(names), "")
    return f"{whose} tensors are named like `{first}`" if first else ""


def some(words: Sequence[str]) -> str:
    return ", ".join(words[:_MOST]) + (f" and {len(words) - _MOST} others" if len(words) > _MOST else "")


def size(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "a number"


# -- in words


def table(made: Transfer, stage: Stage, start: str, frozen: Mapping[str, bool] | None = None) -> str:
    """Return the table that `plan --weights` and a run print. `start`: the source of the stage's start, in words. `frozen`: of each
    parameter."""
    file = stage.solver.start.file if stage.solver.start is not None else ""
    words = {Origin.FILE: f"taken from {file}", Origin.PARENT: f"kept from {start}", Origin.LEFT: f"left in {file}"}
    rows = []
    for origin in Origin:
        if group := [row for row in (*made.rows, *made.left) if row.origin is origin]:
            why = "" if origin in (Origin.FILE, Origin.PARENT) else _why(group)
            rows.append((words.get(origin, origin.value), *_counted(row.shape for row in group), why))
    if made.behind:
        rows.append((f"left behind in {start}", str(len(made.behind)), "", some(made.behind)))
    if frozen is not None and (stage.solver.freeze or any(frozen.values())):
        shapes = {row.name: row.shape for row in made.rows}
        for word, state in (("trained", False), ("frozen", True)):
            rows.append((word, *_counted(shapes[n] for n, held in frozen.items() if held is state), ""))
    head = f"weights of {stage.name} ({stage.model.name}, {stage.model.num_classes} classes): tensors, numbers"
    return "\n".join([head, *(f"  {line}" for line in columns(rows))])


def _counted(shapes: Iterable[Shape]) -> tuple[str, str]:
    numbers = list(map(math.prod, shapes))
    return str(len(numbers)), f"{sum(numbers):,}"


def _why(rows: Sequence[Row]) -> str:
    """Return `fc.weight 10 x 64, fc.bias 10: dropped; ...`, grouped by reason."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row.why, []).append(f"{row.name} {size(row.shape)}")
    return "; ".join(some(names) + (f": {why}" if why else "") for why, names in groups.items())
