"""Weights at the start of a stage: from a file, the parent stage, or the seed. On rank 0, which hands them to the other ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from stagerun.base.errors import DataError, Problems, RecipeError, StagerunError, UsageError
from stagerun.base.recipe import WEIGHTS_DIGEST, CompressionRule, Model, ParamRule, Rename, Schedule, Stage
from stagerun.base.text import size
from stagerun.base.weights import COUNTER, LONG, renamed
from stagerun.base.wings import require_wing, wing
from stagerun.data.weights import data_of, find, header_of
from stagerun.engine.codec import tensors_in
from stagerun.engine.parameters import frozen_parameters, idle_patterns, idle_rules, trained_parameters
from stagerun.models import shapes, without_memory
from stagerun.system.host import available_memory
from stagerun.train.transfer import Mistake, Origin, Shape, Transfer, table, transfer

Shapes = Mapping[str, Shape]


def has_other_weights(schedule: Schedule, stage: Stage) -> bool:
    """Return whether the stage starts with other weights than its parent ends with."""
    other = stage.parent is not None and schedule.stage(stage.parent).model != stage.model
    return other or stage.solver.start is not None


def fill(schedule: Schedule, stage: Stage, live: Mapping[str, Tensor], parent: Mapping[str, Tensor] | None) -> Transfer:
    """Copy the starting weights into the network's tensors, `live`, which are drawn from the seed. `parent`: tensors that the parent
    stage ended with. RecipeError, UsageError, DataError."""
    weights, file, where = stage.solver.start, dict[str, Tensor](), ""
    if weights is not None:
        located, where = find(weights), weights.file
        most = 16 * sum(t.nbytes for t in live.values()) + 64_000_000
        data = data_of(located, most, stage.identity.get(WEIGHTS_DIGEST, ""))
        # A .solverstate is named, and the tensors are in the .caffemodel that it names.
        file = tensors_in(data, located.path.name if weights.state else where)
    made, mistakes = _transfer(stage, _shapes(live), _shapes(parent) if parent is not None else None, _shapes(file))
    problems = Problems(schedule.files)
    report(stage, mistakes, problems)
    if problems:
        raise RecipeError(problems.all())
    with torch.no_grad():
        for row in made.rows:
            if row.origin is Origin.FILE:
                _copy(live[row.name], file[row.was], row.name, where)
            elif row.origin is Origin.PARENT and parent is not None:
                _copy(live[row.name], parent[row.name], row.name, "the snapshot")
        taken = {row.name for row in made.of(Origin.FILE)}
        for name in live:
            layer = name.removesuffix(COUNTER)
            mean, var = f"{layer}running_mean", f"{layer}running_var"
            if not name.endswith(COUNTER) or mean not in taken:
                continue
            # Untouched by any pass: torch begins with a variance of 1, Caffe with 0.
            fresh = not bool(live[mean].any()) and any(bool((live[var] == begin).all()) for begin in (0, 1))
            if name not in taken or (not fresh and not bool(live[name])):
                live[name].fill_(LONG)
    return made


def _transfer(
    stage: Stage, live: Shapes, parent: Shapes | None, file: Shapes | None
) -> tuple[Transfer, tuple[Mistake, ...]]:
    """Return `transfer`, with the network's names for Caffe layers that no `rename` covers."""
    weights = stage.solver.start
    if weights is None or file is None:
        return transfer(live, parent, None, None)
    network_names = wing("caffe.tensors.network_names")
    names = network_names(stage.model, file).items() if network_names is not None else ()
    rules = (Rename(from_=was, to=name) for was, name in names if renamed(was, weights.rename)[1] is None)
    return transfer(live, parent, file, replace(weights, rename=(*weights.rename, *rules)))


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _copy(live: Tensor, source: Tensor, name: str, where: str) -> None:
    if live.is_floating_point() != source.is_floating_point():
        raise DataError(f"`{name}` is {source.dtype} in {where} and {live.dtype} in the network", "drop it")
    if source.is_floating_point() and not bool(torch.isfinite(source).all()):
        raise DataError(f"`{name}` in {where} has NaN or infinity", "drop it, or take other weights")
    live.copy_(source)


def report(stage: Stage, mistakes: Sequence[Mistake], problems: Problems) -> None:
    for mistake in mistakes:
        span = stage.written(f"solver.weights.{mistake.field}", stage.solver.start_field)
        problems.add(span or stage.span, mistake.message, mistake.hint)


def table_of(made: Transfer, stage: Stage, network: nn.Module) -> str:
    """Return the table of sources of each tensor, with the frozen ones."""
    frozen = frozen_parameters(network, stage.solver.param, stage.solver.freeze)
    start = "the seed" if stage.parent is None else f"`{stage.parent}`"
    return table(made, stage, start, {name: name in frozen for name, _ in network.named_parameters()})


def record(made: Transfer) -> dict[str, dict[str, str]]:
    """Return what a snapshot stores: the source of each tensor, and the tensors left in the file."""
    tensors = {row.name: ": ".join(filter(None, (row.origin.value, row.was or row.why))) for row in made.rows}
    left = {one.name: one.why for one in made.left}
    return {"tensors": tensors, "left": left} if left else {"tensors": tensors}


# -- before anything is trained


def planned_transfer(schedule: Schedule, stage: Stage) -> tuple[Transfer, tuple[Mistake, ...]]:
    """Plan the transfer from names and shapes alone. UsageError, DataError and the like if the file can't be read."""
    weights, file = stage.solver.start, None
    if weights is not None:
        located = find(weights)
        file = header_of(located, weights.file)
        if file is None:  # what `torch.save` wrote has to be read whole
            if (needed := located.path.stat().st_size) > (free := available_memory()):
                raise DataError(f"{weights.file} has {size(needed)}, and {size(free)} of memory are free here")
            file = _shapes(tensors_in(located.path.read_bytes(), weights.file))
    parent = shapes(without_memory(schedule.stage(stage.parent).model)) if stage.parent is not None else None
    made, mistakes = _transfer(stage, shapes(without_memory(stage.model)), parent, file)
    if weights is not None and weights.state:
        of_state = require_wing("caffe.tensors.mistakes_in")
        hint = "a .solverstate resumes the net that wrote it; `weights` takes tensors from another one"
        mistakes = (*(replace(mistake, hint=hint) for mistake in mistakes), *of_state(stage, weights))
    return made, mistakes


def require_fitting(
    schedule: Schedule, started: Iterable[Stage], stages: Iterable[Stage], made: Callable[[Model], nn.Module]
) -> None:
    """Raise RecipeError if stages that are still to be `started` can't get their weights, or if `stages` name parameters that their
    networks, as `made`, lack. Before the first update."""
    problems = Problems(schedule.files)
    for stage in started:
        look_into(schedule, stage, problems)
    good: list[tuple[object, ...]] = []  # most of hundreds of stages have the same rules
    for stage in stages:
        rules = stage.model, stage.solver.param, stage.solver.freeze, stage.solver.compress
        if stage.enabled and rules not in good:
            before = problems.all()
            _report_idle(stage, problems, made(stage.model))
            if problems.all() == before:
                good.append(rules)
    if problems:
        raise RecipeError(problems.all())


def _report_idle(stage: Stage, problems: Problems, model: nn.Module) -> None:
    """Report rules and patterns of a stage that match nothing in its network, and those that leave nothing to train."""
    solver = stage.solver

    def add(field: str, text: str, hint: str) -> None:
        problems.add(stage.written(f"solver.{field}") or stage.span, text, hint)

    try:
        trained_parameters(model, solver.param, solver.freeze)
    except UsageError as error:
        add("freeze" if solver.freeze else "param", error.message, error.hint)
    for pattern, hint in idle_patterns(model, solver.freeze):
        text = f'`freeze: "{pattern}"` fits no parameter of the model, and no BatchNorm layer\'s `running_mean`'
        add("freeze", text, hint)
    fields: dict[str, Sequence[ParamRule | CompressionRule]] = {"param": solver.param}
    if solver.compress is not None:
        fields["compress_param.param"] = solver.compress.param
    for field, rules in fields.items():
        for rule, hint in idle_rules(model, rules):
            text = f"`{field}` with name `{rule.name}` and kind {rule.kind.value} fits no parameter of the model"
            add(field, text, hint)


def look_into(schedule: Schedule, stage: Stage, problems: Problems) -> Transfer | None:
    """Plan the transfer and report its mistakes; None if the file is unreadable, a mistake, too."""
    try:
        made, mistakes = planned_transfer(schedule, stage)
    except StagerunError as error:
        made, mistakes = None, (Mistake("file", error.message, error.hint),)
    report(stage, mistakes, problems)
    return made
