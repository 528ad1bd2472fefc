"""What `plan` and a run say of a stage's network and weights: the table of its tensors, and what is known without them. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from stagerun.base.errors import listing
from stagerun.base.recipe import Model, Schedule, Stage
from stagerun.base.text import columns, count
from stagerun.language.net.cost import costs
from stagerun.language.nets import of_model
from stagerun.plan.transfer import Left, Origin, Row, Shape, Transfer, size, some


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


def numbers(shape: Shape) -> int:
    total = 1
    for side in shape:
        total *= side
    return total


def _counted(shapes: Iterable[Shape]) -> tuple[str, str]:
    found = [numbers(shape) for shape in shapes]
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
