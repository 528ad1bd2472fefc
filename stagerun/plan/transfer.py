"""Where each tensor of a network comes from when a stage starts: a file, the stage before, or the seed; and what `plan` and a run say of that.
Pure: names and shapes alone.

What a file is called for is `recipe.Weights`. A tensor that the file gives comes from there; any other one that the stage before has in the
same shape comes from there; the rest is drawn anew.
"""

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stagerun.base.errors import listing, nearest
from stagerun.base.recipe import Model, Rename, Schedule, Stage, Weights
from stagerun.base.text import columns, count
from stagerun.base.weights import COUNTER, fits, renamed
from stagerun.language.net.cost import costs
from stagerun.language.nets import of_model

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_MOST = 6  # names in a line of a table, and in a message


class Origin(enum.Enum):
    FILE = "taken from the file"
    PARENT = "kept"
    MISFIT = "did not fit, drawn anew"
    ANEW = "drawn anew"


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor of the network. `was`: its name in the file. `why` it does not come from where it could."""

    name: str
    shape: Shape
    origin: Origin
    was: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """A tensor of the file that is not used, by its name there."""

    name: str
    shape: Shape
    why: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """`rows` has each tensor of the network once, in its order. `behind`: what the network before had and this one has not."""

    rows: tuple[Row, ...]
    left: tuple[Left, ...] = ()
    behind: tuple[str, ...] = ()

    def of(self, *origins: Origin) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.origin in origins)


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong in `field`, a field of WeightsParameter."""

    field: str
    message: str
    hint: str = ""


def transfer(
    network: Shapes, parent: Shapes | None = None, file: Shapes | None = None, weights: Weights | None = None
) -> tuple[Transfer, tuple[Mistake, ...]]:
    """`parent`: the network of the stage before, None for the seed; `file`: the tensors that `weights` names."""
    if file is None or weights is None:
        return _rows(network, parent, {}, {}, {}), ()
    found = {name: renamed(name, weights.rename) for name in file}
    names: dict[str, str] = {}
    mistakes = []
    for was, (name, _) in found.items():
        if (first := names.setdefault(name, was)) != was:
            text = f"`{first}` and `{was}` of {weights.file} both become `{name}`"
            mistakes.append(
                Mistake("rename", text, "a tensor has one source: `drop` does not help, another `rename` does")
            )
    here = {name: file[was] for name, was in names.items()}
    dropped = {name for name in {*network, *here} if fits(name, weights.drop)}
    why = dict.fromkeys(dropped, "dropped")
    why |= {n: f"{size(here[n])} in the file" for n in network if n in here and n not in why and here[n] != network[n]}
    why |= {name: "not in the file" for name in network if name not in here and name not in why}
    made = _rows(network, parent, {n: names[n] for n in network if n not in why}, why, here)
    reasons = {n: why.get(n, "not in the network") for n in here if n not in network or n in why}
    left = tuple(
        Left(names[n], here[n], _left(n, reasons[n], network)) for n in sorted(reasons, key=lambda n: names[n])
    )
    made = Transfer(made.rows, left, made.behind)
    mistakes += _idle(network, here, file, weights, {rule for _, rule in found.values() if rule is not None})
    if not made.of(Origin.FILE):
        hint = _rename_hint(network, here)
        if not hint and here:
            hint = f"{_named_like(here, 'its')}, and the network's like `{next(iter(network), '')}`"
        mistakes.append(Mistake("file", f"no tensor of {weights.file} is one of the network", hint))
    else:
        mistakes += _unaccounted(made, dropped, {n: names[n] for n in reasons}, here, network, weights)
    return made, tuple(mistakes)


def _rows(
    network: Shapes, parent: Shapes | None, taken: Mapping[str, str], why: Mapping[str, str], here: Shapes
) -> Transfer:
    rows = []
    for name, shape in network.items():
        if name in taken:
            rows.append(Row(name, shape, Origin.FILE, taken[name]))
        elif parent is not None and parent.get(name) == shape:
            rows.append(Row(name, shape, Origin.PARENT, why=why.get(name, "")))
        else:
            before = f"{size(parent[name])} in the network before" if parent is not None and name in parent else ""
            misfit = bool(before) or (name in here and why.get(name) != "dropped")
            reasons = [why.get(name, ""), before or ("not in the network before" if parent is not None else "")]
            text = ", ".join(filter(None, reasons))
            rows.append(Row(name, shape, Origin.MISFIT if misfit else Origin.ANEW, why=text))
    behind = tuple(name for name in parent or () if name not in network)
    return Transfer(tuple(rows), (), behind)


def _left(name: str, why: str, network: Shapes) -> str:
    return f"{size(network[name])} in the network" if why.endswith("in the file") else why


def _idle(network: Shapes, here: Shapes, file: Shapes, weights: Weights, used: set[Rename]) -> Iterator[Mistake]:
    """Patterns that fit nothing."""
    for pattern in weights.drop:
        if not any(fits(name, (pattern,)) for name in (*network, *here)):
            hint = nearest(pattern, {*network, *here}) or _named_like(network, "the network's")
            yield Mistake(
                "drop", f'`drop: "{pattern}"` fits no tensor of the network, and none of {weights.file}', hint
            )
    for rule in weights.rename:
        if rule not in used:
            hint = nearest(rule.from_, file) or _named_like(file, "the file's")
            yield Mistake(
                "rename",
                f'`from: "{rule.from_}"` fits no tensor of {weights.file}, or an earlier entry takes them',
                hint,
            )


def _unaccounted(
    made: Transfer, dropped: set[str], unused: Mapping[str, str], here: Shapes, network: Shapes, weights: Weights
) -> Iterator[Mistake]:
    odd = [n for n in network if n in here and n not in dropped and here[n] != network[n]]
    if odd:
        shown = [f"`{n}` {size(here[n])} there and {size(network[n])} here" for n in odd]
        text = f"{count(len(odd), 'tensor')} of {weights.file} {_have(odd)} another shape: {some(shown)}"
        yield Mistake("file", text, f"write `{_drop(odd)}` to leave {_it(odd)} out")
    if not weights.strict:
        return
    anew = [row.name for row in made.of(Origin.ANEW, Origin.MISFIT)]
    missing = [n for n in anew if n not in here and n not in dropped and not n.endswith(COUNTER)]
    if missing:
        text = (
            f"{weights.file} lacks {count(len(missing), 'tensor')} of the network: {some([f'`{n}`' for n in missing])}"
        )
        hint = (
            _rename_hint(network, here) or f"write `{_drop(missing)}` to draw {_it(missing)} anew, or `strict: false`"
        )
        yield Mistake("file", text, hint)
    spare = [n for n in unused if n not in network and n not in dropped and not n.endswith(COUNTER)]
    if spare:
        text = (
            f"{count(len(spare), 'tensor')} of {weights.file} {'is' if len(spare) == 1 else 'are'} not in the network: "
        )
        names = [f"`{unused[n]}`" for n in spare]
        hint = _rename_hint(network, here) or f"write `{_drop(spare)}` to leave {_it(spare)} out, or `strict: false`"
        yield Mistake("file", text + some(names), hint)


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _it(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _drop(names: Sequence[str]) -> str:
    """What would drop them: one pattern for the tensors of a layer."""
    patterns = dict.fromkeys(f"{n.rpartition('.')[0]}.*" if "." in n else n for n in names)
    return " ".join(f'drop: "{p}"' for p in list(patterns)[:3]) + " ..." * (len(patterns) > 3)


def _rename_hint(network: Shapes, here: Shapes) -> str:
    """A prefix without which names fit, or with which they do; '' where none is found."""
    for prefix in dict.fromkeys(name.partition(".")[0] for name in here):
        inside = [name.removeprefix(f"{prefix}.") for name in here if name.startswith(f"{prefix}.")]
        if inside and prefix not in {name.partition(".")[0] for name in network} and any(n in network for n in inside):
            return f'write `rename {{ from: "{prefix}.*" to: "*" }}`'
    return ""


def _named_like(names: Iterable[str], whose: str) -> str:
    first = next(iter(names), "")
    return f"{whose} tensors are named like `{first}`" if first else ""


def some(words: Sequence[str]) -> str:
    more = [f"{len(words) - _MOST} others"] if len(words) > _MOST else []
    return ", ".join(words[:_MOST]) + (f" and {more[0]}" if more else "")


def size(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "a number"


# -- in words


def table(made: Transfer, stage: Stage, start: str, frozen: Mapping[str, bool] | None = None) -> str:
    """What `plan --weights` and a run say. `start`: what the stage starts from, in words. `frozen`: of each parameter."""
    weights = stage.solver.start
    rows = []
    for origin in Origin:
        found = made.of(origin)
        if found:
            words = {Origin.FILE: f"taken from {weights.file}" if weights else "", Origin.PARENT: f"kept from {start}"}
            drawn = origin in (Origin.MISFIT, Origin.ANEW)
            rows.append(
                (words.get(origin, origin.value), *_counted(r.shape for r in found), _why(found) if drawn else "")
            )
    if made.left and weights is not None:
        why = _why(made.left)
        rows.append((f"left in {weights.file}", *_counted(one.shape for one in made.left), why))
    if made.behind:
        rows.append((f"left behind in {start}", str(len(made.behind)), "", some(made.behind)))
    if frozen is not None and (stage.solver.freeze or any(frozen.values())):
        shapes = {row.name: row.shape for row in made.rows}
        for word, state in (("trained", False), ("frozen", True)):
            rows.append((word, *_counted(shapes[n] for n, held in frozen.items() if held is state), ""))
    head = f"weights of {stage.name} ({stage.model.name}, {stage.model.num_classes} classes): tensors, numbers"
    return "\n".join([head, *(f"  {line}" for line in columns(rows))])


def _counted(shapes: Iterable[Shape]) -> tuple[str, str]:
    found = list(map(math.prod, shapes))
    return str(len(found)), f"{sum(found):,}"


def _why(found: Sequence[Row | Left]) -> str:
    """`fc.weight 10 x 64, fc.bias 10: dropped; ...`, those of one reason together."""
    groups: dict[str, list[str]] = {}
    for one in found:
        groups.setdefault(one.why, []).append(f"{one.name} {size(one.shape)}")
    return "; ".join(some(names) + (f": {why}" if why else "") for why, names in groups.items())


# -- what is known without tensors


def network_change(schedule: Schedule, stage: Stage) -> str:
    """What is said of a stage whose network is not that of the stage it starts from; '' of others. The shapes are not known here."""
    if stage.parent is None or schedule.stage(stage.parent).model == stage.model:
        return ""
    before, now = schedule.stage(stage.parent).model, stage.model
    where = f"stage `{stage.name}`"
    if before.name == now.name and before.num_classes != now.num_classes:
        text = f"{where} has {now.num_classes} classes, and `{stage.parent}` has {before.num_classes}: its head is drawn anew"
    elif before.name == now.name:
        text = f"{where} has other settings of `{now.name}` than `{stage.parent}`"
    else:
        classes = f", {now.num_classes} classes in place of {before.num_classes}" * (
            before.num_classes != now.num_classes
        )
        text = f"{where} trains `{now.name}`, and `{stage.parent}` trains `{before.name}`{classes}"
    return f"{text}; what fits by name and shape is taken over"


def _size(model: Model) -> str:
    """How large a net of Caffe's is: `lenet.prototxt, 431080 parameters, 2.29 million multiply-adds for an image of 1 x 28 x 28`."""
    found = list(costs(of_model(model).train))
    adds, parameters = sum(cost.multiply_adds for cost in found), sum(cost.parameters for cost in found)
    shape = " x ".join(map(str, model.input_shape))
    many = f"{adds / 1e9:.3g} billion" if adds >= 1e9 else f"{adds / 1e6:.3g} million"
    return f"{model.name}, {count(parameters, 'parameter')}, {many} multiply-adds for an image of {shape}"


def network_lines(schedule: Schedule, stage: Stage) -> Iterator[str]:
    """What `plan` says of a stage's network and weights."""
    if change := network_change(schedule, stage):
        yield f"network: {change.removeprefix(f'stage `{stage.name}` ')}"
    elif stage.solver.model is not None:
        yield f"network: {stage.model.name}, {stage.model.num_classes} classes"
    if stage.model.net is not None and (stage.parent is None or stage.model != schedule.stage(stage.parent).model):
        yield f"net: {_size(stage.model)}"
    if stage.solver.solverstate is not None:
        where = f"at iteration {stage.begins}, " if stage.begins else ""
        yield f"begins: {where}where {stage.solver.solverstate} was written; `--weights` shows which tensors it gives"
    elif (weights := stage.solver.weights) is not None:
        parts = [weights.file, *(f"but `{pattern}`" for pattern in weights.drop), *["what fits"] * (not weights.strict)]
        yield f"weights: {', '.join(parts)}; `--weights` shows which tensors"
    if stage.solver.freeze:
        yield f"frozen: {listing(stage.solver.freeze, 'and')}"
