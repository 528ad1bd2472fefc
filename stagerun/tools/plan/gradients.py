"""`plan --link`: the tensors of each stage that compresses its gradients or has replicas, and what is sent of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stagerun.base.compression import applied
from stagerun.base.errors import UsageError
from stagerun.base.recipe import Compression, Determinism, Method, Schedule, Scope, Stage
from stagerun.base.text import count
from stagerun.language.networks import from_outside
from stagerun.plan.coding import BY_CONTENT, PER_MESSAGE, RATES, Rate, Sending, Share, lossless, replicas, sending
from stagerun.plan.gradients import method_text
from stagerun.plan.link import Coding, Senders, ring_bytes
from stagerun.plan.prediction import Link
from stagerun.schedule import parting, synchronisations
from stagerun.system import signals
from stagerun.train.choices import read_chosen


def sends_less(stage: Stage) -> bool:
    how = stage.solver.compress
    return stage.solver.sync is not None or (how is not None and how.method is not Method.NONE)


def sendings(schedule: Schedule, out: Path, workers: int, link: Link) -> list[Sending]:
    """One for each stage that compresses or has replicas, of AUTO one for each method that it may choose."""
    found: list[Sending] = []
    for stage in filter(sends_less, schedule.stages):
        rates = read_rates(out, stage)
        job = _job(schedule, stage, workers, link, rates)
        found += _of_stage(job, stage) if stage.solver.sync is None else [_of_replicas(job, stage)]
    return found


def read_rates(out: Path, stage: Stage) -> Mapping[Method, Rate]:
    """What AUTO measured on this machine for the stage, by method; empty if it didn't."""
    chosen = read_chosen(out, stage)
    if chosen is None:
        return {}
    return {Method(name): Rate(1e9 * e, 1e9 * a, s) for name, (e, a, s) in chosen.rates.items()}


@dataclass(frozen=True, slots=True)
class _Job:
    """A stage's network without memory. `numbers` and `shapes` of what is trained, as it is sent; `counts`: parameters per chunk; `dense`: bytes
    of each, behind those of the tail; `own`: the methods whose rates were measured here."""

    determinism: Determinism
    state: Any
    workers: int
    link: Link
    shapes: Mapping[str, Sequence[int]]
    element: int
    counts: Sequence[int]
    dense: Sequence[float]
    tail: float
    rates: Mapping[Method, Rate]
    own: frozenset[Method]


def require_known(stage: Stage) -> None:
    """UsageError for a network from outside: `plan` runs no code of the user's, and doesn't know its tensors."""
    if from_outside(stage.model):
        raise UsageError(
            f"`plan` doesn't run `{stage.model.name}`, and can't know what its gradients come to",
            "leave --workers and --bandwidth out; `rehearse` measures with the workers that it is given",
        )


def _job(schedule: Schedule, stage: Stage, workers: int, link: Link, own: Mapping[Method, Rate]) -> _Job:
    with signals.held():
        import torch

        from stagerun.comm.reduce import chunks_of
        from stagerun.engine.state import make_state
        from stagerun.engine.traffic import every_iteration
        from stagerun.engine.update import TAIL
        from stagerun.models import build

    solver = replace(stage.solver, compile=False, ema_decay=None)
    require_known(stage)
    with torch.device("meta"):
        network = build(stage.model)
    state = make_state(network, solver, torch.device("meta"))
    parameters = list(reversed(state.solver.parameters))
    element, tail = parameters[0].tensor.element_size(), 8 * (state.statistics.n + TAIL)
    numbers = [p.tensor.numel() for p in parameters]
    counts = chunks_of(numbers, element)
    # A tree (ELASTIC) may send more than a ring.
    whole = every_iteration(schedule.determinism, state, solver, workers)
    more = whole / ring_bytes(element * sum(numbers) + tail, workers)
    return _Job(
        determinism=schedule.determinism,
        state=state,
        workers=workers,
        link=link,
        shapes={p.name: tuple(p.tensor.shape) for p in parameters},
        element=element,
        counts=counts,
        dense=[more * tail, *(more * element * sum(part) for part in cut(numbers, counts))],
        tail=tail,
        rates={**RATES, **own},
        own=frozenset(own),
    )


def _of_stage(job: _Job, stage: Stage) -> Iterator[Sending]:
    how = stage.solver.compress
    assert how is not None
    elastic = job.determinism is Determinism.ELASTIC
    who = Senders(job.workers, stage.solver.logical_workers if elastic else job.workers)
    for method in how.allow if how.method is Method.AUTO else (how.method,):
        if method is Method.LOSSLESS:
            yield lossless(stage.name, job.rates[method], job.dense, who, job.link, method in job.own)
            continue
        each = applied(how, {"*": method.value}) if how.method is Method.AUTO else how
        rules = _rules(job, each)
        methods = {rule.method for rule in rules.values()}
        yield sending(
            stage.name,
            method_text(method, each),
            [[Coding(rounds=(job.tail,))], *_codings(job, each, rules)],
            job.dense,
            who,
            job.link,
            about=bool(methods & set(BY_CONTENT)),
            measured=methods <= job.own,
        )


def _codings(job: _Job, how: Compression, rules: Mapping[str, Compression]) -> list[list[Coding]]:
    items = [(name, job.shapes[name], rules[name]) for name in job.shapes]
    chunks = cut(items, job.counts)
    if how.scope is Scope.ENTIRE_MODEL:
        together = [item for item in items if item[2] == how]
        one = (sum(_numel(shape) for _, shape, _ in together),)
        chunks = [[("", one, how)], [item for item in items if item[2] != how]]
    return [[_coding(shape, rule, job.rates, job.element) for _, shape, rule in chunk] for chunk in chunks]


def _of_replicas(job: _Job, stage: Stage) -> Sending:
    from stagerun.engine import traffic
    from stagerun.engine.replicas import compresses_changes

    solver, how = stage.solver, stage.solver.compress
    assert solver.sync is not None
    start, found = parting(solver), synchronisations(solver)
    every = traffic.every_iteration(job.determinism, job.state, solver, job.workers)
    apart = Share(solver.max_iter - start, traffic.apart(job.determinism, job.state, solver, job.workers))
    plain = [Share(start, every), apart, Share(len(found), traffic.meeting(job.state, solver, job.workers))]
    shares, words = plain, [solver.sync.method.value, count(len(found), "synchronisation")]
    if how is not None and compresses_changes(solver):
        rules = _rules(job, how)
        messages = [one for chunk in _codings(job, how, rules) for one in chunk]
        late = sum(iter > how.start_iter for iter in found)
        rest = Share(late, traffic.meeting(job.state, solver, job.workers, compressed=True))
        dense_start = min(start, how.start_iter)
        elastic = job.determinism is Determinism.ELASTIC
        gradients = Senders(job.workers, solver.logical_workers if elastic else job.workers)
        tail = [Coding(rounds=(job.tail,))]
        shares = [
            Share(dense_start, every),
            Share.of(start - dense_start, [*tail, *messages], gradients),
            apart,
            Share(len(found) - late, plain[-1].bytes),
            rest,
            Share.of(late, messages, Senders(job.workers, solver.sync.replicas)),
        ]
        words.append(method_text(how.method, how))
    elif how is not None and how.method is Method.LOSSLESS:
        shares = [
            plain[0].coded(job.rates[Method.LOSSLESS]),
            apart,
            plain[-1].coded(job.rates[Method.LOSSLESS]),
        ]
        words.append(method_text(how.method, how))
    methods = {rule.method for rule in _rules(job, how).values()} if how is not None else set()
    return replicas(
        stage.name,
        ", ".join(words),
        job.dense,
        shares,
        plain,
        solver.max_iter,
        job.workers,
        job.link,
        about=bool(methods & set(BY_CONTENT)),
    )


def _rules(job: _Job, how: Compression) -> dict[str, Compression]:
    from stagerun.engine.compression import rule_of
    from stagerun.engine.parameters import kind_of

    return {name: rule_of(name, kind_of(job.state.model, name), how) for name in job.shapes}


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
