"""`plan --link`: the tensors of each stage that compresses its gradients, and what each method makes of them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stagerun.base.compression import applied
from stagerun.base.recipe import Compression, Determinism, Method, Schedule, Scope, Stage
from stagerun.plan.coding import BY_CONTENT, PER_MESSAGE, RATES, Rate, Sending, lossless, sending
from stagerun.plan.gradients import method_text
from stagerun.plan.link import Coding, Senders, ring_bytes
from stagerun.plan.prediction import Link
from stagerun.system import signals
from stagerun.train.choices import read_chosen


def compresses(stage: Stage) -> bool:
    return stage.solver.compress is not None and stage.solver.compress.method is not Method.NONE


def sendings(schedule: Schedule, out: Path, workers: int, link: Link) -> list[Sending]:
    """One for each stage that compresses, of AUTO one for each method that it may choose."""
    with signals.held():
        import torch

        from stagerun.models import build

    with torch.device("meta"):
        network = build(schedule.model)
    found: list[Sending] = []
    for stage in filter(compresses, schedule.stages):
        found += _of_stage(schedule, stage, network, read_rates(out, stage), workers, link)
    return found


def read_rates(out: Path, stage: Stage) -> Mapping[Method, Rate]:
    """What AUTO measured on this machine for the stage, by method; empty if it didn't."""
    chosen = read_chosen(out, stage)
    if chosen is None:
        return {}
    return {Method(name): Rate(1e9 * e, 1e9 * a, s) for name, (e, a, s) in chosen.rates.items()}


def _of_stage(
    schedule: Schedule, stage: Stage, network: Any, own: Mapping[Method, Rate], workers: int, link: Link
) -> Iterator[Sending]:
    from stagerun.comm import dense_bytes
    from stagerun.comm.reduce import chunks_of
    from stagerun.engine.device import dtype_of
    from stagerun.engine.parameters import trained_parameters

    how = stage.solver.compress
    assert how is not None
    parameters = list(reversed(trained_parameters(network.to(dtype_of(stage.solver.precision)), stage.solver.param)))
    shapes = {p.name: tuple(p.tensor.shape) for p in parameters}
    element = parameters[0].tensor.element_size()
    numbers = [p.tensor.numel() for p in parameters]
    counts = chunks_of(numbers, element)
    # A tree (ELASTIC) may send more than a ring.
    whole = dense_bytes(schedule.determinism, sum(numbers), element, workers, stage.solver.logical_workers)
    more = whole / ring_bytes(element * sum(numbers), workers)
    dense = [more * element * sum(part) for part in cut(numbers, counts)]
    elastic = schedule.determinism is Determinism.ELASTIC
    who = Senders(workers, stage.solver.logical_workers if elastic else workers)
    rates = {**RATES, **own}
    for method in how.allow if how.method is Method.AUTO else (how.method,):
        if method is Method.LOSSLESS:
            yield lossless(stage.name, rates[method], dense, who, link, method in own)
            continue
        each = applied(how, {"*": method.value}) if how.method is Method.AUTO else how
        rules = _rules(network, list(shapes), each)
        items = [(name, shapes[name], rules[name]) for name in shapes]
        chunks = cut(items, counts)
        if each.scope is Scope.ENTIRE_MODEL:
            together = [item for item in items if item[2] == each]
            one = (sum(_numel(shape) for _, shape, _ in together),)
            chunks = [[("", one, each)], [item for item in items if item[2] != each]]
        codings = [[_coding(shape, rule, rates, element) for _, shape, rule in chunk] for chunk in chunks]
        methods = {rule.method for _, _, rule in items}
        yield sending(
            stage.name,
            method_text(method, each),
            codings,
            dense,
            who,
            link,
            about=bool(methods & set(BY_CONTENT)),
            measured=methods <= own.keys(),
        )


def _rules(network: Any, names: Sequence[str], how: Compression) -> dict[str, Compression]:
    from stagerun.engine.compression import rule_of
    from stagerun.engine.parameters import kind_of

    return {name: rule_of(name, kind_of(network, name), how) for name in names}


def _coding(shape: Sequence[int], rule: Compression, rates: Mapping[Method, Rate], element: int) -> Coding:
    import torch

    from stagerun.engine.compression import operator

    one, numbers, rate = operator(rule, shape, 1), _numel(shape), rates[rule.method]
    dtype = torch.float64 if element == 8 else torch.float32
    slices = one.wire(dtype)
    rounds: tuple[float, ...]
    if slices is not None:
        rounds, seconds = (float(slices.itemsize * numbers),), 0.0
        rate = rates[Method.NONE] if slices is dtype else rate
    else:
        sizes = one.sizes(numbers, element)
        rounds = tuple(min(rate.size, element) * numbers if size is None else float(size) for size in sizes)
        seconds = PER_MESSAGE
    return Coding(
        rounds=rounds,
        slices=str(slices or ""),
        varies=slices is None and None in one.sizes(numbers, element),
        encode=seconds + 1e-9 * rate.encode * numbers,
        add=seconds + 1e-9 * rate.add * numbers,
    )


def _numel(shape: Sequence[int]) -> int:
    found = 1
    for side in shape:
        found *= side
    return found


def cut(things: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    rest = iter(things)
    return [[next(rest) for _ in range(number)] for number in counts]
