"""`stagerun diff` of two runs: the first iteration at which they differ, by their proofs, snapshots and logs, and what explains it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stagerun import store
from stagerun.base.errors import StagerunError
from stagerun.base.events import Event, Iterated, StageStarted
from stagerun.base.recipe import CODE, FILES, IGNORED, LABELS, MEAN_DIGEST, WEIGHTS_DIGEST, Determinism
from stagerun.base.snapshots import TRAINING_SET, SnapshotRef, same_set
from stagerun.logs.log_file import LOG
from stagerun.store.layout import snapshots_folder
from stagerun.system import signals
from stagerun.tools.output import DISK
from stagerun.tools.verify_run import Course, courses_of, events_of
from stagerun.train.progress import MOST_STATE, STATE, progress_of

if TYPE_CHECKING:
    from stagerun.tools.states import Changed

# Facts of the environment (`engine.device.environment`) by what they are; the others are of the processor.
_KINDS = {
    **dict.fromkeys(("torch", "numpy", "image library", "colour library", "cudnn"), "library"),
    **dict.fromkeys(("workers", "reducer"), "workers"),
    "stagerun": "code",
    "threads": "threads",
    TRAINING_SET: "data",
}
# Prefixes of fields that act through an update's learning rate, which the log has.
_POLICY = tuple("base_lr lr_ power gamma step warmup_ decay_from policy_start end_lr knot plateau".split())
MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Cause:
    """`kind`: code, schedule, library, processor, threads, workers, data, weights, bit, or unknown."""

    kind: str
    text: str


@dataclass(slots=True)
class First:
    """The first difference, in the state after `iter` updates of `stage`. `same`: the newest iteration before it at which both states are
    known to be equal; `proven`: the first at which their proofs or snapshots differ; `start`: it is where the stage begins. `positions`: of
    the images that were trained on in between. `of`: the number of tensors. The first of `causes` is the likeliest. `searched`: stretches
    were trained again."""

    stage: str
    same: int | None
    iter: int
    proven: int | None
    start: bool
    positions: tuple[int, int] | None = None
    tensors: "list[Changed] | None" = None
    of: int = 0
    causes: list[Cause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    searched: bool = False


class Run:
    """A run: its snapshots, and what its log says of each stage. `updates`: learning rate, momentum, decay and loss by iteration."""

    def __init__(self, out: Path) -> None:
        self.out, self.refs = out, store.inventory(DISK, out, looking=True).snapshots
        self.begins: dict[str, int] = {}
        self.updates: dict[str, dict[int, tuple[float, ...]]] = {}
        events = list[Event]()
        for event in events_of(out, "Iterated") if (out / LOG).exists() else ():
            if isinstance(event, Iterated):
                values = event.lr, event.momentum, event.weight_decay, event.loss
                self.updates.setdefault(event.stage, {})[event.iter] = values
                continue
            if isinstance(event, StageStarted):
                self.begins[event.stage] = event.begins
            events.append(event)
        self.courses = courses_of(events, unproven=True)[0]

    def of(self, stage: str) -> list[SnapshotRef]:
        return [ref for ref in self.refs if ref.stage == stage]

    def at(self, stage: str, iter: int) -> SnapshotRef | None:
        return next((ref for ref in reversed(self.of(stage)) if ref.iter == iter), None)

    def parent(self, stage: str) -> str:
        """Return what a stage started from: `trunk@60`, or '' if unknown."""
        ids = {ref.parent for ref in self.of(stage)}
        return next((f"{ref.stage}@{ref.iter}" for ref in reversed(self.refs) if ref.id in ids), "")

    def proofs(self, stage: str) -> dict[int, str]:
        return {iter: proof.state for iter, proof in self.courses.get(stage, Course()).proofs.items()}

    def identity(self, stage: str) -> Mapping[str, str]:
        return next((ref.identity for ref in reversed(self.of(stage))), {})

    def environment(self, stage: str, iter: int) -> dict[str, str]:
        """Return the environment in which an iteration was trained: of the nearest snapshot of its process life, and the log's own."""
        lives = self.courses.get(stage, Course()).trained(max(iter, 1) - 1, max(iter, 1))
        attempt = lives[-1].attempt if lives else None
        refs = self.of(stage) or self.refs
        order = lambda ref: (ref.attempt != attempt, ref.iter < iter, abs(ref.iter - iter))  # noqa: E731
        facts = dict(min(refs, key=order).environment) if refs else {}
        for life in lives[-1:]:
            facts |= {"workers": str(life.workers), "threads": str(life.threads), "stagerun": life.version}
        return facts

    def positions(self, stage: str, after: int, until: int) -> tuple[int, int] | None:
        """Return the first and the last position of the images of the iterations after `after` up to `until`; None if unknown."""
        refs = self.of(stage)
        if not refs or until <= after:
            return None
        ref = min(refs, key=lambda ref: (ref.iter < until, abs(ref.iter - until)))
        with suppress(StagerunError, store.Damaged, ValueError, KeyError):
            state = store.read_file(DISK, snapshots_folder(self.out) / ref.name, STATE, MOST_STATE)[1]
            batch = ref.whole("solver.batch_size", 1)
            begins = progress_of({STATE: state}).position - ref.iter * batch
            if abs(begins) < 1 << 50:  # else damaged: no run comes so far
                return begins + after * batch, begins + until * batch - 1
        return None


def first_difference(a: Run, b: Run, stages: Iterable[str]) -> tuple[First | None, dict[str, int]]:
    """Return the first difference of two runs, by their records alone, and how many states of each stage were compared."""
    compared = dict[str, int]()
    for stage in stages:
        ids = [{ref.iter: ref.id for ref in run.of(stage)} for run in (a, b)]
        equal: dict[int, bool] = {}
        for one, other in (ids, [run.proofs(stage) for run in (a, b)]):
            equal |= {iter: one[iter] == other[iter] for iter in one.keys() & other.keys()}
        compared[stage] = len(equal)
        unequal = [iter for iter, same in equal.items() if not same]
        proven = min(unequal, default=None)
        until = math.inf if proven is None else proven
        same = max((iter for iter, same in equal.items() if same and iter < until), default=None)
        before, now = (run.updates.get(stage, {}) for run in (a, b))
        after = -1 if same is None else same
        seen = unequal + [i for i in before.keys() & now.keys() if i > after and repr(before[i]) != repr(now[i])]
        if seen:
            begins = a.begins.get(stage, 0)
            first = First(stage, same, min(seen), proven, start=min(seen) == proven == begins)
            if not first.start:
                first.positions = a.positions(stage, begins if same is None else same, first.iter)
            first.causes = causes(first, a, b)
            return first, compared
    return None, compared


def causes(first: First, a: Run, b: Run) -> list[Cause]:
    """Return what the records of two runs explain the difference by, the likeliest first."""
    candidates = list[Cause]()
    parents = [run.parent(first.stage) for run in (a, b)]
    if first.start and all(parents) and parents[0] != parents[1]:
        candidates.append(Cause("schedule", f"from {parents[0]} -> {parents[1]}"))
    identities = a.identity(first.stage), b.identity(first.stage)
    for key in dict.fromkeys((*identities[0], *identities[1])) if all(identities) else ():
        before, now = (identity.get(key, "none") for identity in identities)
        name = key.removeprefix("solver.")
        by_rate = name in ("max_iter", "momentum", "weight_decay") or name.startswith(_POLICY)
        if before == now or (by_rate and not _other_rates(first, a, b)):
            continue
        kind = "weights" if key == WEIGHTS_DIGEST else "data" if key in (MEAN_DIGEST, LABELS) else "schedule"
        if key.startswith(CODE):
            kind, name = "code", key.removeprefix(CODE)
        if key in FILES or kind == "code":  # digests
            before, now = (text.removeprefix("sha256:")[:12] for text in (before, now))
        candidates.append(Cause(kind, f"{name} {before} -> {now}"))
    environments = [run.environment(first.stage, first.iter) for run in (a, b)]
    ignored = IGNORED[Determinism[identities[0].get("determinism", "FIXED")]]
    for key in sorted(environments[0].keys() & environments[1].keys()):
        before, now = (environment[key] for environment in environments)
        if before == now or "unknown" in (before, now) or key in ignored:
            continue
        if key == "reducer" and len({environment.get("workers") for environment in environments}) == 2:
            continue  # it follows from the number of workers
        if key == TRAINING_SET and same_set(before, now) is not False:
            continue
        text = f"{key} {before} -> {now}" if key != TRAINING_SET else f"{key}: other images, or in another order"
        if key == "processor flags":
            from stagerun.engine.device import flags_apart

            text = f"{key}: {flags_apart(before, now)}"
        candidates.append(Cause(_KINDS.get(key, "processor"), text))
    order = ["weights", "data", "schedule", "code", "library", "processor", "workers", "threads"]
    if first.start:
        order = ["weights", "schedule", "code", "library"]
    elif first.same is not None:  # the starting weights have led to the same state
        order.remove("weights")
    return sorted((one for one in candidates if one.kind in order), key=lambda one: order.index(one.kind))


def _other_rates(first: First, a: Run, b: Run) -> bool:
    """Return whether the updates in question had another rate, momentum or decay; also if that is unknown."""
    before, now = (run.updates.get(first.stage, {}) for run in (a, b))
    iters = range(first.iter if first.same is None else first.same + 1, first.iter + 1)
    return not all(i in before and i in now and before[i][:3] == now[i][:3] for i in iters)


def render(first: First) -> list[str]:
    """Return the lines that people read."""
    where = f"at iteration {first.iter}, equal up to {first.same}"
    if first.start:
        where = "in the state that it starts with"
    elif first.same is None:
        where = f"between its start and iteration {first.iter}"
    elif first.same + 1 < first.iter:
        where = f"between iterations {first.same + 1} and {first.iter}"
    rows = [("cause" if n == 0 else "also", f"{one.kind}: {one.text}") for n, one in enumerate(first.causes)]
    if not rows:
        hint = "" if first.searched else "; --first compares the images, and looks for an upset bit"
        rows = [("cause", f"nothing that is recorded differs{hint}")]
    if first.positions is not None:
        rows.insert(0, ("images", f"positions {first.positions[0]} to {first.positions[1]}"))
    if first.tensors is not None:
        named = [("", one.text) for one in first.tensors[:MOST_NAMED]]
        if more := len(first.tensors) - len(named):
            named.append(("", f"{more} more"))
        rows[:0] = [("tensors", f"{len(first.tensors)} of {first.of} differ"), *named]
    rows += [("note", text) for text in first.notes]
    return [
        f"the first difference: stage {first.stage}, {where}",
        *(f"  {a:7}  {b}".replace("\n", "\n           ") for a, b in rows),
    ]


def search(
    runs: tuple[Run, Run], stages: Sequence[str], again: bool, trust_code: bool, quiet: bool
) -> tuple[First | None, dict[str, int]]:
    """As `first_difference`. `again`: train stretches again."""
    first, compared = first_difference(*runs, stages)
    if first is not None and (again or all(run.at(first.stage, first.iter) for run in runs)):
        with signals.held():
            from stagerun.tools.states import Search, name_tensors  # and with it torch

        name_tensors(first, runs)
        if again:
            try:
                Search(first, runs, trust_code, quiet).search()
            except StagerunError as error:
                why = "; ".join(filter(None, (error.message, error.hint)))
                first.notes.append(f"it can't be trained again here: {why}")
    return first, compared
