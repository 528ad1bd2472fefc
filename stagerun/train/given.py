"""Where the weights of a stage come from at its start: a file, the stage before, or the seed. On rank 0; the others are handed them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from stagerun.base.errors import DataError, Problems, RecipeError, Span, StagerunError
from stagerun.base.recipe import WEIGHTS_DIGEST, Model, Schedule, Stage
from stagerun.base.text import size
from stagerun.engine.parameters import still_in
from stagerun.engine.weights_file import tensors_in
from stagerun.models.skeleton import shapes, without_memory
from stagerun.plan import Plan, PlannedStage, State
from stagerun.plan.transfer import COUNTER, Mistake, Origin, Transfer, transfer
from stagerun.plan.weights_table import table
from stagerun.store.given import Found, data_of, find, header_of
from stagerun.system.host import available_memory

# What a counter of BatchNorm is that the file does not have beside its statistics, or has at 0, as files that were converted from other
# libraries do: those are of long training.
LONG = 1_000_000


def is_given(schedule: Schedule, stage: Stage) -> bool:
    """Whether a start of the stage is more than all that its parent ends with."""
    other = stage.parent is not None and schedule.stage(stage.parent).model != stage.model
    return other or stage.solver.weights is not None


def fill(schedule: Schedule, stage: Stage, live: Mapping[str, Tensor], parent: Mapping[str, Tensor] | None) -> Transfer:
    """Puts them into the network's tensors, `live`, which have those of the seed. `parent`: those that the stage before ended with.
    RecipeError, UsageError, DataError."""
    weights = stage.solver.weights
    file: dict[str, Tensor] = {}
    if weights is not None:
        most = 16 * sum(t.nbytes for t in live.values()) + 64_000_000
        file = tensors_in(data_of(weights, most, stage.identity.get(WEIGHTS_DIGEST, "")), weights.file)
    of_file = {name: tuple(t.shape) for name, t in file.items()} if weights is not None else None
    of_parent = {name: tuple(t.shape) for name, t in parent.items()} if parent is not None else None
    of_network = {name: tuple(t.shape) for name, t in live.items()}
    made, mistakes = transfer(of_network, of_parent, of_file, weights)
    require_none(schedule, stage, mistakes)
    with torch.no_grad():
        for row in made.rows:
            if row.origin is Origin.FILE:
                _copy(live[row.name], file[row.was], row.name, weights.file if weights is not None else "")
            elif row.origin is Origin.PARENT and parent is not None:
                _copy(live[row.name], parent[row.name], row.name, "the snapshot")
        taken = {row.name for row in made.of(Origin.FILE)}
        for name in live:
            mean, var = (f"{name.removesuffix(COUNTER)}running_{which}" for which in ("mean", "var"))
            if not name.endswith(COUNTER) or mean not in taken:
                continue
            fresh = not bool(live[mean].any()) and bool((live[var] == 1).all())
            if name not in taken or (not fresh and not bool(live[name])):
                live[name].fill_(LONG)
    return made


def _copy(live: Tensor, given: Tensor, name: str, where: str) -> None:
    if live.is_floating_point() != given.is_floating_point():
        raise DataError(f"`{name}` is {given.dtype} in {where} and {live.dtype} in the network", "drop it")
    if given.is_floating_point() and not bool(torch.isfinite(given).all()):
        raise DataError(
            f"`{name}` in {where} is not all numbers: it has NaN or infinity", "drop it, or take other weights"
        )
    live.copy_(given)


def require_none(schedule: Schedule, stage: Stage, mistakes: Sequence[Mistake]) -> None:
    """RecipeError with all of them, each at its line."""
    problems = problems_in(schedule)
    report(stage, mistakes, problems)
    if problems:
        raise RecipeError(problems.all())


def problems_in(schedule: Schedule) -> Problems:
    """None so far; those that are added are shown with their lines."""
    problems = Problems()
    problems.files(schedule.files)
    return problems


def report(stage: Stage, mistakes: Sequence[Mistake], problems: Problems) -> None:
    for one in mistakes:
        fields = (f"solver.weights.{one.field}", "solver.weights.file")
        spans = (stage.origins[field].span for field in fields if field in stage.origins)
        problems.add(next(filter(None, spans), Span(stage.name, 1, 1)), one.message, one.hint)


def start_of(stage: Stage) -> str:
    """What the stage starts from, in words."""
    return "the seed" if stage.parent is None else f"`{stage.parent}`"


def frozen_in(network: nn.Module, stage: Stage) -> dict[str, bool]:
    """Whether each parameter stays as it is, by name."""
    still = still_in(network, stage.solver.freeze)
    return {name: name in still for name, _ in network.named_parameters()}


def record(made: Transfer) -> dict[str, dict[str, str]]:
    """What a snapshot keeps of it: of each tensor where it came from, and what was left in the file."""
    tensors = {row.name: ": ".join(filter(None, (row.origin.value, row.was or row.why))) for row in made.rows}
    left = {one.name: one.why for one in made.left}
    return {"tensors": tensors, "left": left} if left else {"tensors": tensors}


# -- before anything is trained


def planned_transfer(schedule: Schedule, stage: Stage) -> tuple[Transfer, tuple[Mistake, ...]]:
    """The same from names and shapes alone. UsageError, DataError and the like where the file can't be looked into."""
    parent = schedule.stage(stage.parent).model if stage.parent is not None else None
    weights = stage.solver.weights
    file = shapes_in(find(weights), weights.file) if weights is not None else None
    return transfer(_shapes(stage.model), _shapes(parent) if parent is not None else None, file, weights)


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return shapes(without_memory(model))


def shapes_in(found: Found, name: str) -> Mapping[str, tuple[int, ...]]:
    """The shapes of its tensors; a safetensors file says them in its header."""
    header = header_of(found)
    if header is not None:
        return header
    needed, free = found.path.stat().st_size, available_memory()
    if needed > free:
        raise DataError(f"{name} has {size(needed)}, and {size(free)} of memory are free here")
    return {key: tuple(tensor.shape) for key, tensor in tensors_in(found.path.read_bytes(), name).items()}


def mistakes_in(schedule: Schedule, planned: Sequence[PlannedStage], problems: Problems) -> None:
    """Adds what is wrong with the weights of stages that are still to be started. What can't be looked into is a mistake, too."""
    for one in planned:
        if one.state in (State.FRESH, State.STALE) and one.stage.enabled and one.stage.solver.weights is not None:
            try:
                report(one.stage, planned_transfer(schedule, one.stage)[1], problems)
            except StagerunError as error:
                report(one.stage, [Mistake("file", error.message, error.hint)], problems)


def tables(plan: Plan) -> list[str]:
    """What `plan --weights` shows: of each stage that takes weights from elsewhere, has another network than the stage before, or
    freezes something. RecipeError with all mistakes."""
    problems, found = problems_in(plan.schedule), []
    for stage in plan.schedule.stages:
        if not is_given(plan.schedule, stage) and not stage.solver.freeze:
            continue
        try:
            made, mistakes = planned_transfer(plan.schedule, stage)
        except StagerunError as error:
            report(stage, [Mistake("file", error.message, error.hint)], problems)
            continue
        report(stage, mistakes, problems)
        frozen = frozen_in(without_memory(stage.model), stage)
        found.append(table(made, stage, start_of(stage), frozen))
    if problems:
        raise RecipeError(problems.all())
    return found
