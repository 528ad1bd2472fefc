"""Where the weights of a stage come from at its start: a file, the stage before, or the seed. On rank 0; the others are handed them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stagerun.base.errors import DataError, Problems, RecipeError, StagerunError, UsageError
from stagerun.base.nets import of_model
from stagerun.base.recipe import WEIGHTS_DIGEST, CompressionRule, Model, ParamRule, Rename, Schedule, Stage
from stagerun.base.text import size
from stagerun.base.weights import COUNTER, LONG, renamed
from stagerun.base.wings import require_wing, wing
from stagerun.data.weights import data_of, find, header_of
from stagerun.engine.parameters import frozen_parameters, idle_patterns, idle_rules, trained_parameters
from stagerun.engine.weights_file import tensors_in
from stagerun.models.skeleton import shapes, without_memory
from stagerun.system.host import available_memory
from stagerun.train.transfer import Mistake, Origin, Shape, Transfer, table, transfer

Shapes = Mapping[str, Shape]


def is_given(schedule: Schedule, stage: Stage) -> bool:
    """Whether a start of the stage is more than all that its parent ends with."""
    other = stage.parent is not None and schedule.stage(stage.parent).model != stage.model
    return other or stage.solver.start is not None


def fill(schedule: Schedule, stage: Stage, live: Mapping[str, Tensor], parent: Mapping[str, Tensor] | None) -> Transfer:
    """Puts them into the network's tensors, `live`, which have those of the seed. `parent`: those that the stage before ended with.
    RecipeError, UsageError, DataError."""
    weights, file, where = stage.solver.start, dict[str, Tensor](), ""
    if weights is not None:
        found, where = find(weights), weights.file
        most = 16 * sum(t.nbytes for t in live.values()) + 64_000_000
        data = data_of(found, most, stage.identity.get(WEIGHTS_DIGEST, ""))
        # A .solverstate is named, and the tensors are in the .caffemodel that it names.
        file = tensors_in(data, found.path.name if weights.state else where, _net(stage))
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
            # What no pass has moved yet: torch begins with a variance of 1, Caffe with one of 0.
            fresh = not bool(live[mean].any()) and any(bool((live[var] == begin).all()) for begin in (0, 1))
            if name not in taken or (not fresh and not bool(live[name])):
                live[name].fill_(LONG)
    return made


def _net(stage: Stage) -> Any:
    """Caffe's net, of a stage that has one."""
    return of_model(stage.model) if stage.model.net is not None else None


def _transfer(
    stage: Stage, live: Shapes, parent: Shapes | None, file: Shapes | None
) -> tuple[Transfer, tuple[Mistake, ...]]:
    """`transfer`, with the names that layers of Caffe's have in the network, for tensors that the stage gives no other."""
    weights = stage.solver.start
    if weights is None or file is None:
        return transfer(live, parent, None, None)
    here = wing("caffe.names.here")
    names = here(stage.model, file).items() if here is not None else ()
    rules = (Rename(from_=was, to=name) for was, name in names if renamed(was, weights.rename)[1] is None)
    return transfer(live, parent, file, replace(weights, rename=(*weights.rename, *rules)))


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _copy(live: Tensor, given: Tensor, name: str, where: str) -> None:
    if live.is_floating_point() != given.is_floating_point():
        raise DataError(f"`{name}` is {given.dtype} in {where} and {live.dtype} in the network", "drop it")
    if given.is_floating_point() and not bool(torch.isfinite(given).all()):
        text = f"`{name}` in {where} is not all numbers: it has NaN or infinity"
        raise DataError(text, "drop it, or take other weights")
    live.copy_(given)


def report(stage: Stage, mistakes: Sequence[Mistake], problems: Problems) -> None:
    for one in mistakes:
        place = stage.written(f"solver.weights.{one.field}", stage.solver.start_field)
        problems.add(place or stage.span, one.message, one.hint)


def table_of(made: Transfer, stage: Stage, network: nn.Module) -> str:
    """Where each tensor comes from, and what is frozen, for people."""
    frozen = frozen_parameters(network, stage.solver.param, stage.solver.freeze)
    start = "the seed" if stage.parent is None else f"`{stage.parent}`"
    return table(made, stage, start, {name: name in frozen for name, _ in network.named_parameters()})


def record(made: Transfer) -> dict[str, dict[str, str]]:
    """What a snapshot keeps of it: of each tensor where it came from, and what was left in the file."""
    tensors = {row.name: ": ".join(filter(None, (row.origin.value, row.was or row.why))) for row in made.rows}
    left = {one.name: one.why for one in made.left}
    return {"tensors": tensors, "left": left} if left else {"tensors": tensors}


# -- before anything is trained


def planned_transfer(schedule: Schedule, stage: Stage) -> tuple[Transfer, tuple[Mistake, ...]]:
    """The same from names and shapes alone. UsageError, DataError and the like where the file can't be looked into."""
    weights, file = stage.solver.start, None
    if weights is not None:
        found = find(weights)
        file = header_of(found, weights.file, _net(stage))
        if file is None:  # what `torch.save` wrote has to be read whole
            if (needed := found.path.stat().st_size) > (free := available_memory()):
                raise DataError(f"{weights.file} has {size(needed)}, and {size(free)} of memory are free here")
            file = _shapes(tensors_in(found.path.read_bytes(), weights.file))
    parent = shapes(without_memory(schedule.stage(stage.parent).model)) if stage.parent is not None else None
    made, mistakes = _transfer(stage, shapes(without_memory(stage.model)), parent, file)
    if weights is not None and weights.state:
        known = require_wing("caffe.solver_state.mistakes_in")
        # What `weights` could say about it, a `solverstate` can't.
        hint = "a .solverstate goes on with the net that wrote it; `weights` takes tensors from another one"
        mistakes = (*(replace(mistake, hint=hint) for mistake in mistakes), *known(stage, weights))
    return made, mistakes


def require_fitting(
    schedule: Schedule, started: Iterable[Stage], stages: Iterable[Stage], made: Callable[[Model], nn.Module]
) -> None:
    """RecipeError for weights that stages which are still to be `started` can't be given, and for what `stages` say of parameters that
    their networks, as `made`, don't have. Before the first update."""
    problems = Problems(schedule.files)
    for stage in started:
        look_into(schedule, stage, problems)
    good: list[tuple[object, ...]] = []  # of hundreds of stages, most have the same
    for stage in stages:
        own = stage.model, stage.solver.param, stage.solver.freeze, stage.solver.compress
        if stage.enabled and own not in good:
            before = problems.all()
            _report_idle(stage, problems, made(stage.model))
            if problems.all() == before:
                good.append(own)
    if problems:
        raise RecipeError(problems.all())


def _report_idle(stage: Stage, problems: Problems, model: nn.Module) -> None:
    """Adds the rules and patterns of a stage that fit nothing in its network, and those that leave nothing to train."""
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
    compressed = solver.compress.param if solver.compress is not None else ()
    places: dict[str, Sequence[ParamRule | CompressionRule]] = {
        "param": solver.param,
        "compress_param.param": compressed,
    }
    for field, rules in places.items():
        for rule, hint in idle_rules(model, rules):
            text = f"`{field}` with name `{rule.name}` and kind {rule.kind.value} fits no parameter of the model"
            add(field, text, hint)


def look_into(schedule: Schedule, stage: Stage, problems: Problems) -> Transfer | None:
    """Adds what is wrong; what can't be looked into is a mistake, too, and there is nothing then."""
    try:
        made, mistakes = planned_transfer(schedule, stage)
    except StagerunError as error:
        made, mistakes = None, (Mistake("file", error.message, error.hint),)
    report(stage, mistakes, problems)
    return made
