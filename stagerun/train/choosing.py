"""`method: AUTO` of `compress_param`: how a stage's gradients are sent, chosen once, before its first update, and kept from then on.

The link is measured, and what each allowed method costs here on each tensor; what that predicts is tried in real steps, in turn with
dense gradients, which stay unless another way is clearly faster. The choice is in OUT/choices, for a run that is killed before its
first snapshot, and for stretches that are trained once more; and in each snapshot.
"""

import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from stagerun.base.compression import Choice, applied
from stagerun.base.errors import ResumeRefused
from stagerun.base.events import CompressionChosen, Event, Note, Stopped
from stagerun.base.recipe import Compression, Method, Scope
from stagerun.base.text import duration, listed
from stagerun.comm import Comm, gather_json, runs_of
from stagerun.comm.compression import Operator
from stagerun.comm.reduce import chunks_of
from stagerun.engine.compression import can_try, operator, rules_of, senders
from stagerun.engine.feed import DeviceBatch
from stagerun.engine.state import TrainState
from stagerun.engine.trials import Trial, cost_of, measure_link, random_state_kept, unseen, vectors
from stagerun.models import build
from stagerun.plan import State
from stagerun.plan.link import Coding, Senders, Speeds
from stagerun.plan.prediction import Link
from stagerun.plan.ways import DENSE, Job, Way, decided, enough, still_tried, ways, worth_trying
from stagerun.system.pulse import Section
from stagerun.train.agreement import everyone, rank0
from stagerun.train.choices import Chosen, grouped, identity_of, read_chosen, write_chosen
from stagerun.train.progress import progress_of
from stagerun.train.stage_start import arithmetic_of, parent_id
from stagerun.train.worker import StageRun

# Ways that are tried besides dense gradients: one, where each takes more bytes than this, since a sender's residual is as large as the
# network.
_MOST, _ROOM = 3, 2e9
# Seconds that measuring may take and still be done a second time.
_SHORT = 3.0

_T = TypeVar("_T")


def resolved(run: StageRun, state: TrainState) -> Generator[Event, None, Compression | None]:
    """How the stage compresses its gradients, with what AUTO chooses in its place. Collective. Method AUTO after a Stopped.

    ResumeRefused for a snapshot without a choice, or with one that `compress_param` doesn't allow.
    """
    how = run.stage.solver.compress
    if how is None or how.method is not Method.AUTO:
        return how
    why = "as this run has chosen it before"
    if not run.choice:
        run.choice, why = rank0(run.worker.comm, lambda: _known(run, state, how))
    if run.choice:
        if run.rollbacks is None:
            yield CompressionChosen(stage=run.stage.name, methods=_groups(state, run.choice), why=why)
        return applied(how, run.choice)
    if run.worker.comm.size == 1:
        run.choice = {"*": DENSE}
        chosen = _record(run, Speeds(Link(0.0), Link(0.0)), {}, {})
        yield from _publish(run, state, chosen, "one worker sends nothing")
        return applied(how, run.choice)
    if run.is_piece:
        text = f"what stage `{run.stage.name}` chose is not in the output folder any more: it is chosen anew, and the bits may be others"
        yield Note(text=text, warning=True)
    done = yield from _choose(run, state, how)
    return applied(how, run.choice) if done else how


def _known(run: StageRun, state: TrainState, how: Compression) -> tuple[dict[str, str], str]:
    """Rank 0's: what the snapshot or the output folder has, empty if there is nothing yet; and where it is from."""
    names = {"*", *(p.name for p in state.solver.parameters)}
    if run.planned.state is State.RESUME:
        choice = progress_of(run.step.files).choice if run.step.files is not None else {}
        try:
            applied(how, choice)
        except ValueError:
            choice = {}
        if not choice or not choice.keys() <= names:
            raise ResumeRefused(
                f"the snapshot of stage `{run.stage.name}` does not say what `method: AUTO` chose for this network",
                "take `--redo` for the stage, or another --out",
            )
        return choice, "as the snapshot has it"
    assert run.worker.keeper is not None
    chosen = read_chosen(run.worker.keeper.out, run.stage)
    # What is trained once more must have its bits. Where nothing is trained yet, other workers may choose otherwise.
    same = chosen is not None and (run.is_piece or (chosen.workers == run.worker.comm.size and not run.planned.again))
    if chosen is None or not same or chosen.parent != parent_id(run.planned) or not chosen.choice.keys() <= names:
        return {}, ""
    try:
        applied(how, chosen.choice)
    except ValueError:
        return {}, ""
    return chosen.choice, "as chosen before, in OUT/choices"


def _choose(run: StageRun, state: TrainState, how: Compression) -> Generator[Event, None, bool]:
    """Measures, tries, publishes. Collective; False after a Stopped."""
    comm, name, began = unseen(run.worker.comm), run.stage.name, time.monotonic()
    allowed = listed([method.value for method in how.allow])
    yield Note(text=f"{name}: choosing how gradients are sent, dense or by {allowed}: measuring the link")
    with random_state_kept(run.worker.device):
        trial = everyone(comm, lambda: _trial(run, state))
        speeds = _speeds(comm, run.worker.device)
        yield Note(
            text=f"{name}: {_link(speeds)} between {comm.size} workers; measuring each method on the network's tensors"
        )
        found, rates = _ways(comm, trial, how, speeds)
        tried = worth_trying(found, _room(run, state))
        yield Note(
            text=f"{name}: predicted per iteration: {', '.join(f'{_called(w.name)} {_ms(w.predicted)}' for w in found)}"
        )
        if len(tried) > 1:
            yield Note(text=f"{name}: trying {listed([_called(way.name) for way in tried])} in turn")
        taken = _race(run, comm, trial, how, tried) if len(tried) > 1 else {tried[0].name: [tried[0].predicted]}
    if not taken:
        yield Stopped(stage=name, iter=state.iter, reason="asked to stop while it chose how gradients are sent")
        return False
    best, why = decided(taken)
    why = why if len(tried) > 1 else "nothing else comes near, by what was measured"
    run.choice = dict(next(way.choice for way in tried if way.name == best))
    seconds = {way: statistics.median(times) for way, times in taken.items()}
    chosen = _record(run, speeds, seconds, rates)
    yield from _publish(run, state, chosen, f"{why}; it took {duration(time.monotonic() - began, '.1f')} to choose")
    return True


def _race(run: StageRun, comm: Comm, trial: Trial, how: Compression, tried: Sequence[Way]) -> dict[str, list[float]]:
    """Seconds of steps of each way, in turn; of the slowest worker. Empty where someone asks to stop. Collective."""
    reducers = {way.name: trial.reducer(comm, applied(how, way.choice)) for way in tried}
    live, taken, began = list(reducers), dict[str, list[float]](), time.monotonic()
    first: dict[str, list[float]] = {}
    while True:
        run.worker.comm.pulse.enter(Section.START)
        turn = live if len(taken.get(live[0], ())) % 2 else live[::-1]
        mine = {}
        for name in turn:
            comm.barrier()
            mine[name] = trial.step(reducers[name])
        stop = run.worker.stop() or run.worker.stopping.asked
        answers = gather_json(comm, [mine, stop, time.monotonic() - began])
        if any(stop for _, stop, _ in answers):
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
    """Of the slowest worker. Collective."""
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
    job = Job(
        who=Senders(comm.size, runs[-1].stop),
        speeds=speeds,
        computing=alone,
        one_pass=alone / len(trial.own),
        dense=[element * sum(part) for part in _cut(sizes, chunks_of(sizes, element))],
    )
    by_chunk = [{item.name: next(cut) for item in chunk} for chunk in chunks]
    return ways(by_chunk, job, how.scope is Scope.LAYERWISE), _rates(items, codings)


def _items(trial: Trial, how: Compression) -> list[list[_Item]]:
    """By chunk, in the order in which they are sent: as `CompressedReducer` has them."""
    rules, gradients = rules_of(trial.state, how), vectors(trial.gradients())
    shapes = {p.name: p.tensor.shape for p in trial.state.solver.parameters}
    names = list(reversed(rules))
    methods = [Method.NONE, *(method for method in how.allow if can_try(method))]
    chosen = {method.value: applied(how, {"*": method.value}) for method in methods}

    def item(name: str, vector: torch.Tensor, shape: Sequence[int]) -> _Item:
        rule = rules[name]
        free = rule.method is Method.AUTO
        known = chosen if free else {rule.method.value: rule}
        return _Item(name, vector, {method: operator(each, shape) for method, each in known.items()})

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


def _room(run: StageRun, state: TrainState) -> int:
    """How many ways besides dense gradients fit into memory: each sender of this rank has a gradient and a residual."""
    runs = senders(run.worker.schedule.determinism, run.stage.solver.logical_workers, run.worker.comm.size)
    size = sum(p.tensor.nbytes for p in state.solver.parameters)
    return _MOST if 2 * len(runs[0]) * size < _ROOM else 1


def _trial(run: StageRun, state: TrainState) -> Trial:
    solver = run.stage.solver
    own = runs_of(solver.logical_workers, run.worker.comm.size)[run.worker.comm.rank]
    start = run.planned.position + run.planned.skipped
    first = start + state.iter * solver.batch_size + own.start * solver.device_batch_size
    with run.worker.images.loader(run.stage, start).stream([(first, solver.device_batch_size)]) as batches:
        batch = next(iter(batches))

        def placed(values: Any) -> Any:
            return None if values is None else torch.as_tensor(np.array(values)).to(run.worker.device)

        kept = DeviceBatch(
            images=placed(batch.images),
            labels=placed(batch.labels),
            positions=np.array(batch.positions),
            lighting=placed(batch.lighting),
            cutout=placed(batch.cutout),
        )
    arithmetic = arithmetic_of(run.worker.schedule.model, solver, run.worker.device)
    model = build(run.worker.schedule.model)
    return Trial(model, state, solver, run.worker.schedule.determinism, arithmetic, kept, own)


def _record(run: StageRun, speeds: Speeds, seconds: Mapping[str, float], rates: Mapping[str, list[float]]) -> Chosen:
    return Chosen(
        stage=run.stage.name,
        identity=identity_of(run.stage),
        parent=parent_id(run.planned),
        workers=run.worker.comm.size,
        choice=dict(run.choice),
        seconds=dict(seconds),
        rates=dict(rates),
        bandwidth=speeds.messages.bandwidth,
        latency=speeds.messages.latency,
    )


def _publish(run: StageRun, state: TrainState, chosen: Chosen, why: str) -> Iterator[Event]:
    """Has it on disk before the first update. Collective."""

    def write() -> None:
        assert run.worker.keeper is not None
        run.worker.keeper.require_held()
        write_chosen(run.worker.keeper.disk, run.worker.keeper.out, chosen)

    rank0(run.worker.comm, write)
    yield CompressionChosen(
        stage=run.stage.name,
        methods=_groups(state, chosen.choice),
        why=why,
        tried=tuple((_called(name), taken) for name, taken in chosen.seconds.items()),
        bandwidth=chosen.bandwidth,
        latency=chosen.latency,
    )


def _groups(state: TrainState, choice: Choice) -> tuple[tuple[str, int, int, str], ...]:
    return tuple(grouped({p.name: p.tensor.numel() for p in state.solver.parameters}, choice))


def _called(way: str) -> str:
    return "dense" if way == DENSE else way


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _link(speeds: Speeds) -> str:
    link = speeds.messages
    return f"{8e-6 * link.bandwidth:.3g} Mbit/s, {_ms(link.latency)} per message,"
