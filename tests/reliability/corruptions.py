"""Silent corruption on one worker of 2, 3 or 4, in runs with `audit_param`. A trial is a run of 8 iterations with two snapshots, and one of these:

1 to 8 flipped bits in a weight, in what is remembered of updates, in averaged weights or BatchNorm's statistics, in what replicas have in common, in a
sum of gradients or an average of replicas as one rank has received it, at a random moment: found before a snapshot is published whose replicated state
is not that of a run left alone; 1 to 8 bits of one device batch's gradient, or arithmetic of one rank that is wrong by a thousandth in it: found if and only if
it is the one that is audited; or from some iteration on: found by the next audit, and with three workers or more that rank is named and no other; bits
of a residual, which no other worker has: not found, and the workers stay alike; or nothing: no alarm, and the same bits. Workers are threads of one
process.
"""

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from nan_help import lives, make_data, make_schedule
from processes import content
from reliability.trial import Scenario, Trial

from stagerun.base.errors import RanksDiffer, StagerunError
from stagerun.base.events import Iterated
from stagerun.comm import runs_of
from stagerun.engine import apart, audit, replicas, update
from stagerun.engine.state import TrainState, average, common, momentum, weights
from stagerun.schedule.audits import audited_worker, is_due
from stagerun.train import stage
from stagerun.train.progress import RESIDUAL

ITERATIONS, SNAPSHOT, REPLAY, LOGICAL = 8, 4, 2, 4
WAYS = {
    "FIXED": ("", "", 3),
    "ELASTIC": ("", "determinism: ELASTIC", 3),
    "TOP_K": ("compress_param { method: TOP_K ratio: 0.1 }", "", 3),
    "LOCAL": ("sync_param { method: LOCAL replicas: 2 period: 3 }", "", 3),
    "DILOCO": ("sync_param { method: DILOCO replicas: 4 period: 3 }", "", 3),
}
PARTED = ("LOCAL", "DILOCO")
STATE = {
    "weight": lambda state: {n: t for n, t in weights(state).items() if "running" not in n and t.is_floating_point()},
    "momentum": momentum,
    "average": average,
    "statistics": lambda state: {n: t for n, t in weights(state).items() if "running" in n},
    "common": common,
    "residual": lambda state: {"": state.residual.vectors[0]} if state.residual is not None else {},
}
KINDS = (
    "weight", "weight", "weight", "momentum", "momentum", "momentum", "average", "average", "statistics", "statistics",
    "received", "received", "averaged", "common", "gradient", "gradient", "residual", "once", "stays", "nothing", "nothing",
)  # fmt: skip
# What each can happen to, if not to all but DILOCO, of whose replicas each has one holder: others have not what is harmed, or no one to compare with.
ONLY = {
    "averaged": PARTED, "common": ("DILOCO",), "residual": ("TOP_K",), "average": ("FIXED", "ELASTIC", "TOP_K"),
    "once": ("FIXED", "ELASTIC", "TOP_K"), "stays": ("FIXED", "ELASTIC", "TOP_K"), "gradient": ("FIXED", "ELASTIC", "TOP_K"),
    "nothing": tuple(WAYS),
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    kind: str
    workers: int
    way: str
    rank: int
    iter: int  # updates done before it, or, of arithmetic and sums, before the update in which it is
    batch: int  # of the rank's device batches
    seed: int

    def __str__(self) -> str:
        return f"{self.kind} on rank {self.rank} of {self.workers}, {self.way}, at {self.iter}, batch {self.batch}, seed {self.seed}"


def flip(tensors: dict[str, torch.Tensor], seed: int) -> None:
    """1 to 8 bits of a number."""
    rng = random.Random(seed)
    tensor = tensors[rng.choice(sorted(tensors))]
    bits = tensor.detach().reshape(-1)[rng.randrange(tensor.numel())].clone().view(torch.int32)
    for bit in rng.sample(range(32), rng.randint(1, 8)):
        bits ^= -(1 << 31) if bit == 31 else 1 << bit
    where = rng.randrange(tensor.numel())
    flat = torch.zeros(tensor.numel(), dtype=torch.bool)
    flat[where] = True
    with torch.no_grad():
        tensor.masked_fill_(flat.view(tensor.shape), float(bits.view(torch.float32)))


class Harm:
    """What a fault does to a run, once: where the run goes back, it is over."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.mine, self.done, self.calls = fault, set[int](), False, 0
        self.events, self.loss_of, self.apply, self.average = (
            stage._events,
            update.loss_of,
            update.apply,
            replicas.average,
        )
        self.comm: object = None

    def noticing(self, run: stage.StageRun, loop: object, state: TrainState, *rest: object) -> Iterator[object]:
        fault = self.fault
        if run.worker.comm.rank == fault.rank:
            self.mine.add(id(state))
            self.comm = run.worker.comm
        for event in self.events(run, loop, state, *rest):  # type: ignore[arg-type]
            here = isinstance(event, Iterated) and event.iter == fault.iter and id(state) in self.mine
            if here and fault.kind in STATE and not self.done and (held := STATE[fault.kind](state)):
                self.done = True
                flip(held, fault.seed)
            yield event

    def wrong(self, state: TrainState, *rest: object) -> torch.Tensor:
        found, fault = self.loss_of(state, *rest), self.fault  # type: ignore[arg-type]
        if id(state) not in self.mine:
            return found
        if fault.kind == "stays":
            return found * 1.001 if state.iter >= fault.iter else found
        if fault.kind == "once" and state.iter == fault.iter and not self.done:
            self.calls += 1
            self.done = self.calls == fault.batch + 1
            return found * 1.001 if self.done else found
        return found

    def before(self, state: TrainState, *rest: object) -> torch.Tensor:
        """Of the device batch that is next: its gradient gets another bit as it comes to a parameter."""
        fault = self.fault
        if id(state) in self.mine and state.iter == fault.iter and not self.done:
            self.calls += 1
            self.done = self.calls == fault.batch + 1
            if self.done:
                parameter = random.Random(fault.seed).choice(state.solver.parameters).tensor

                def spoil(gradient: torch.Tensor) -> torch.Tensor:
                    handle.remove()
                    found = gradient.clone()
                    flip({"": found}, fault.seed)
                    return found

                handle = parameter.register_hook(spoil)
        return self.loss_of(state, *rest)  # type: ignore[arg-type]

    def averaging(self, comm: object, holders: object, own: object, out: list[torch.Tensor]) -> None:
        self.average(comm, holders, own, out)  # type: ignore[arg-type]
        if comm is self.comm and not self.done:
            self.calls += 1
            if self.calls == 1 + self.fault.iter % 3:  # a synchronisation's, or that of a snapshot
                self.done = True
                flip({str(n): t for n, t in enumerate(out) if t.is_floating_point()}, self.fault.seed)

    def applying(self, state: TrainState, found: update.Summed, *rest: object) -> None:
        fault = self.fault
        if fault.kind == "received" and id(state) in self.mine and state.iter == fault.iter and not self.done:
            self.done = True
            flip(found.gradients, fault.seed)
        self.apply(state, found, *rest)  # type: ignore[arg-type]


def solver(way: str) -> str:
    more, _, compare = WAYS[way]
    return f"ema_decay: 0.9 snapshot: {SNAPSHOT} {more} audit_param {{ compare_iter: {compare} replay_iter: {REPLAY} }}".replace(
        "ema_decay: 0.9 ", "" if way in PARTED else "ema_decay: 0.9 "
    )


Held = dict[str, tuple[str, str]]  # by snapshot the digests of what is replicated, and of all


def held(out: Path) -> Held:
    all = content(out)
    return {name: (digest, all[name]) for name, digest in content(out, RESIDUAL).items()}


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, make_data(folder / "lmdb")
        self.alone: dict[tuple[str, int], Held] = {}

    def run(self, way: str, workers: int, fault: Fault | None) -> tuple[list[str], Held, str]:
        """What any rank said, the snapshots that are there then, and how it ended."""
        out, said = self.folder / "out", list[str]()
        shutil.rmtree(out, ignore_errors=True)
        schedule = make_schedule(
            self.folder / "s",
            self.data,
            solver(way),
            shared=f"{WAYS[way][1]} keep_snapshots: 9",
            main=f"max_iter: {ITERATIONS}",
        )
        inner = RanksDiffer.__init__

        def init(error: RanksDiffer, message: str, *rest: object, **more: object) -> None:
            said.append(message)
            inner(error, message, *rest, **more)  # type: ignore[arg-type]

        with ExitStack() as stack:
            stack.enter_context(patch.object(RanksDiffer, "__init__", init))
            if fault is not None:
                harm = Harm(fault)
                stack.enter_context(patch.object(stage, "_events", harm.noticing))
                harming = harm.before if fault.kind == "gradient" else harm.wrong
                stack.enter_context(patch.object(update, "loss_of", harming))
                stack.enter_context(
                    patch.object(replicas, "average", harm.averaging if fault.kind == "averaged" else harm.average)
                )
                if fault.kind == "stays":
                    stack.enter_context(patch.object(audit, "loss_of", harm.wrong))
                for module in (update, apart):
                    stack.enter_context(patch.object(module, "apply", harm.applying))
            try:
                lives(schedule, out, workers)
                ended = ""
            except StagerunError as error:
                ended = str(int(error.exit_code))
        return said, held(out) if (out / "snapshots").is_dir() else {}, ended

    def left_alone(self, way: str, workers: int) -> Held:
        if (way, workers) not in self.alone:
            said, found, ended = self.run(way, workers, None)
            assert not said and not ended and len(found) == 2
            self.alone[way, workers] = found
        return self.alone[way, workers]


def outcome(fault: Fault, runs: Runs) -> tuple[str, str]:
    """What came of it, and why that is wrong; '' if it isn't."""
    wanted = runs.left_alone(fault.way, fault.workers)
    said, found, ended = runs.run(fault.way, fault.workers, None if fault.kind == "nothing" else fault)
    spoiled = [name for name, its in found.items() if wanted[name][0] != its[0]]
    if fault.kind == "nothing":
        return "clean runs without an alarm", "a false alarm" if said or ended or found != wanted else ""
    if fault.kind in ("once", "stays", "gradient"):
        return arithmetic(fault, said, ended)
    if fault.kind == "residual":
        alone = "flips in residuals, which no other worker has, not found"
        return alone, "" if ended in ("", "79") else f"ended with {ended}: {said}"
    if spoiled:
        return "", f"{spoiled} published"
    if not ended and found == wanted:
        return "flips that left no trace in any snapshot", ""
    if not ended:  # rounded away in all that is replicated before it was compared
        return "flips that left a trace in residuals alone", ""
    if ended == "79":
        return "flips that made a loss infinite", ""
    if ended != "80":
        return "", f"ended with {ended or 0}"
    if fault.workers == 2 and "wrong was what" in said[-1]:
        right = f"wrong was what rank {fault.rank} on" in said[-1] and f"rank {1 - fault.rank} on" not in said[-1]
        return "flips found, and which of two was found out", "" if right else "the wrong one is named"
    named = f"rank {fault.rank} has other bits than the other" in said[-1]
    return "flips found, " + ("the rank named" if named else "which of two not known"), ""


def arithmetic(fault: Fault, said: list[str], ended: str) -> tuple[str, str]:
    run = runs_of(LOGICAL, fault.workers)[fault.rank]
    number = (fault.iter + 1) // REPLAY - 1
    audited = is_due(fault.iter, REPLAY) and audited_worker(run, number, fault.workers) == run[fault.batch]
    named = [rank for rank in range(fault.workers) if said and f"rank {rank} on " in said[-1]]
    if fault.kind in ("once", "gradient"):
        if ended in ("", "79"):
            return "errors in one device batch, not audited", "it was audited" if audited else ""
        right = named == [fault.rank] and "has once computed" in said[-1]
        return "errors in one device batch, audited, found and named", "" if audited and right else f"said: {said}"
    at = next(i for i in range(fault.iter, ITERATIONS) if is_due(i, REPLAY)) + 1
    if ended != "80" or not said[-1].startswith(f"iteration {at} of"):
        return "", f"not found by the audit of iteration {at}: {said}"
    if fault.workers == 2:
        return "lasting errors of one of two found", "" if "no third can say" in said[-1] else f"said: {said}"
    return "lasting errors found and named", "" if named == [fault.rank] and "computes" in said[-1] else f"said: {said}"


def draw(rng: random.Random) -> Fault:
    kind = rng.choice(KINDS)
    workers = rng.choice((2, 3, 4))
    workers = 4 if ONLY.get(kind, ()) in (PARTED, ("DILOCO",)) else workers
    ways = [w for w in ONLY.get(kind, tuple(WAYS)[:-1]) if w not in PARTED or workers == 4]
    rank = rng.randrange(workers)
    first = 0 if kind in ("received", "once", "stays", "gradient") else 1
    batch = rng.randrange(len(runs_of(LOGICAL, workers)[rank]))
    return Fault(kind, workers, rng.choice(ways), rank, rng.randrange(first, ITERATIONS), batch, rng.randrange(1 << 30))


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    runs = Runs(folder)
    while True:
        counts: Counter[str] = Counter()
        wrong, faults = "", 0
        for _ in range(20):
            fault = draw(rng)
            what, why = outcome(fault, runs)
            counts[what] += bool(what)
            faults += fault.kind != "nothing"
            wrong = wrong or (f"{fault}: {why}" if why else "")
        yield Trial(faults=faults, counts=dict(counts), wrong=wrong)


SCENARIO = Scenario(
    name="corruptions",
    fault="1 to 8 flipped bits in the state of one worker, or arithmetic that errs there",
    aim="10,000, none published; audited arithmetic named; 0 false alarms",
    wanted=10_000,
    trials=trials,
)
