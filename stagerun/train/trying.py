"""How to send a stage's gradients, found by measuring and by trying: the link, what each allowed method costs here on each tensor, and
real steps of what that predicts to be fastest, in turn with dense gradients, which stay unless another way is clearly faster.
"""

import statistics
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch

from stagerun.base.compression import Choice, applied
from stagerun.base.recipe import Compression, Method, Scope
from stagerun.base.text import listed
from stagerun.comm import Comm, dense_bytes, gather_json
from stagerun.comm.compression import Operator
from stagerun.comm.reduce import chunks_of
from stagerun.engine.compression import operator, rules_of, senders
from stagerun.engine.trials import Trial, cost_of, lossless_cost, measure_link, unseen, vectors
from stagerun.plan.coding import rate_text
from stagerun.plan.link import Coding, Senders, Speeds, ring_bytes
from stagerun.plan.prediction import Link
from stagerun.plan.ways import DENSE, Job, Way, decided, enough, still_tried, ways, with_lossless, worth_trying

# Seconds that measuring may take and still be done a second time.
_SHORT = 3.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`seconds`: of an iteration, of each way that was tried, or that was predicted where nothing was. `rates` as of `Chosen`."""

    choice: Choice
    why: str
    speeds: Speeds
    seconds: Mapping[str, float]
    rates: Mapping[str, list[float]]


def find(
    comm: Comm, trial: Trial, how: Compression, stop: Callable[[], bool], most: int
) -> Generator[str, None, Found | None]:
    """What to take; yields what it is doing, in words. `most`: ways that are tried besides dense gradients. Collective; None if any
    rank's `stop` says so."""
    with unseen(comm):
        return (yield from _find(comm, trial, how, stop, most))


def _find(
    comm: Comm, trial: Trial, how: Compression, stop: Callable[[], bool], most: int
) -> Generator[str, None, Found | None]:
    yield f"choosing how gradients are sent, dense or by {listed([m.value for m in how.allow])}: measuring the link"
    speeds = _speeds(comm, trial.how.normalise.device)
    yield f"{_link(speeds)} between {comm.size} workers; measuring each method on the network's tensors"
    found, rates = _ways(comm, trial, how, speeds)
    tried = worth_trying(found, most)
    yield f"predicted per iteration: {', '.join(f'{called(way.name)} {_ms(way.predicted)}' for way in found)}"
    best, why = tried[0].name, "nothing else comes near, by what was measured"
    taken = {best: [tried[0].predicted]}
    if len(tried) > 1:
        yield f"trying {listed([called(way.name) for way in tried])} in turn"
        taken = _race(comm, trial, how, tried, stop)
        if not taken:
            return None
        best, why = decided(taken)
    return Found(
        choice=next(way.choice for way in tried if way.name == best),
        why=why,
        speeds=speeds,
        seconds={way: statistics.median(times) for way, times in taken.items()},
        rates=rates,
    )


def _race(
    comm: Comm, trial: Trial, how: Compression, tried: Sequence[Way], stop: Callable[[], bool]
) -> dict[str, list[float]]:
    """Seconds of steps of each way, in turn; of the slowest worker. Empty where someone asks to stop. Collective."""
    reducers = {way.name: trial.reducer(comm, applied(how, way.choice)) for way in tried}
    live, taken, began = list(reducers), dict[str, list[float]](), time.monotonic()
    first: dict[str, list[float]] = {}
    while True:
        turn = live if len(taken.get(live[0], ())) % 2 else live[::-1]
        mine = {}
        for name in turn:
            comm.barrier()
            mine[name] = trial.step(reducers[name])
        answers = gather_json(comm, [mine, stop(), time.monotonic() - began])
        if any(asked for _, asked, _ in answers):
            return {}
        slowest = {name: max(times[name] for times, _, _ in answers) for name in live}
        if not first:
            first = {name: [seconds] for name, seconds in slowest.items()}
            live = still_tried(first, live, first=True)
        else:
            for name, seconds in slowest.items():
                taken.setdefault(name, []).append(seconds)
            live = still_tried(taken, live, first=False)
        if enough(len(taken.get(live[0], ())), answers[0][2], len(live)):
            return first | taken


def _speeds(comm: Comm, device: torch.device) -> Speeds:
    """That of the slowest worker. Collective."""
    measured = gather_json(comm, [[kind.bandwidth, kind.latency] for kind in measure_link(comm, device)])
    ring, messages = (Link(min(m[kind][0] for m in measured), max(m[kind][1] for m in measured)) for kind in (0, 1))
    return Speeds(ring, messages)


@dataclass(frozen=True, slots=True)
class _Item:
    """What one message is made of, and the operators it may go through, by method: one where a rule says which."""

    name: str
    vector: torch.Tensor
    operators: Mapping[str, Operator]


def _ways(comm: Comm, trial: Trial, how: Compression, speeds: Speeds) -> tuple[list[Way], dict[str, list[float]]]:
    """The ways there are, the fastest by prediction first; and seconds and bytes per number, by method. Collective."""
    alone = max(gather_json(comm, trial.alone()))
    chunks = _items(trial, how)
    items = [item for chunk in chunks for item in chunk]
    began, mine = time.monotonic(), [_costs(item) for item in items]
    if time.monotonic() - began < _SHORT:  # the first time is that of making room, too
        mine = [_combined(min, pair) for pair in zip(mine, map(_costs, items), strict=True)]
    codings = [
        {method: _coding(item, method, cost) for method, cost in _combined(max, costs).items()}
        for item, *costs in zip(items, *gather_json(comm, mine), strict=True)
    ]
    cut = iter(codings)
    element = items[0].vector.element_size()
    sizes = [p.tensor.numel() for p in reversed(trial.state.solver.parameters)]
    runs = senders(trial.determinism, trial.solver.logical_workers, comm.size)
    whole = dense_bytes(trial.determinism, sum(sizes), element, comm.size, trial.solver.logical_workers)
    more = whole / ring_bytes(element * sum(sizes), comm.size)  # of a tree (ELASTIC) than of a ring
    job = Job(
        who=Senders(comm.size, runs[-1].stop),
        speeds=speeds,
        computing=alone,
        one_pass=alone / len(trial.own),
        dense=[more * element * sum(part) for part in _cut(sizes, chunks_of(sizes, element))],
    )
    by_chunk = [{item.name: next(cut) for item in chunk} for chunk in chunks]
    found, rates = ways(by_chunk, job, how.scope is Scope.LAYERWISE), _rates(items, codings)
    coded = gather_json(comm, lossless_cost(item.vector for item in items))
    # It codes all that is sent; a rule for some tensors leaves no room for it.
    if Method.LOSSLESS in how.allow and not how.param and None not in coded:
        encode, decode, size = map(max, zip(*coded, strict=True))
        found = with_lossless(found, job, size / element, (encode + decode) / element)
        rates[Method.LOSSLESS.value] = [encode, decode, size]
    return found, rates


def _items(trial: Trial, how: Compression) -> list[list[_Item]]:
    """By chunk, in the order in which they are sent: as `CompressedReducer` has them."""
    rules, gradients = rules_of(trial.state, how), vectors(trial.gradients())
    shapes = {p.name: p.tensor.shape for p in trial.state.solver.parameters}
    names = list(reversed(rules))
    methods = [Method.NONE, *(method for method in how.allow if method is not Method.LOSSLESS)]
    chosen = {method.value: applied(how, {"*": method.value}) for method in methods}

    workers = trial.solver.logical_workers // len(trial.own)

    def item(name: str, vector: torch.Tensor, shape: Sequence[int]) -> _Item:
        rule = rules[name]
        free = rule.method is Method.AUTO
        known = chosen if free else {rule.method.value: rule}
        return _Item(name, vector, {method: operator(each, shape, workers) for method, each in known.items()})

    first: list[list[_Item]] = []
    if how.scope is Scope.ENTIRE_MODEL:
        whole = [name for name in names if rules[name].method is Method.AUTO]
        vector = torch.cat([gradients[name] for name in whole])
        first, names = [[item(whole[0], vector, vector.shape)]], [name for name in names if name not in whole]
    counts = chunks_of([gradients[name].numel() for name in names], next(iter(gradients.values())).element_size())
    return [*first, *_cut([item(name, gradients[name], shapes[name]) for name in names], counts)]


def _cut(things: Sequence[_T], counts: Iterable[int]) -> list[list[_T]]:
    rest = iter(things)
    return [list(islice(rest, count)) for count in counts]


_Costs = dict[str, list[float]]  # by method: seconds to make a message and to add one up, then its bytes in each round


def _costs(item: _Item) -> _Costs:
    found = {}
    for method, one in item.operators.items():
        sizes, encode, add = cost_of(one, item.vector)
        found[method] = [encode, add, *map(float, sizes)]
    return found


def _combined(choose: Callable[..., float], several: Sequence[_Costs]) -> _Costs:
    return {
        method: [choose(column) for column in zip(*(c[method] for c in several), strict=True)] for method in several[0]
    }


def _coding(item: _Item, method: str, cost: Sequence[float]) -> Coding:
    one, vector = item.operators[method], item.vector
    slices = one.wire(vector.dtype)
    return Coding(
        rounds=tuple(cost[2:]),
        slices=str(slices or ""),
        varies=slices is None and None in one.sizes(vector.numel(), vector.element_size()),
        encode=cost[0],
        add=cost[1],
    )


def _rates(items: Sequence[_Item], codings: Sequence[Mapping[str, Coding]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    free = [(item.vector.numel(), coding) for item, coding in zip(items, codings, strict=True) if len(coding) > 1]
    numbers = sum(n for n, _ in free)
    for method in free[0][1] if free else ():
        own = [coding[method] for _, coding in free]
        totals = sum(c.encode for c in own), sum(c.add for c in own), sum(sum(c.rounds) for c in own)
        found[method] = [total / numbers for total in totals]
    return found


def called(way: str) -> str:
    return "dense" if way == DENSE else way


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _link(speeds: Speeds) -> str:
    link = speeds.messages
    return f"{rate_text(link.bandwidth)}, {_ms(link.latency)} per message,"
