"""What happens in a run, as values. The loop yields them, sinks show and store them; nothing flows back.

Every rank makes them, in the same order but for what rank 0 alone knows: snapshots, and notes on them, on other ranks, on what is
promised, and Compressed. Only rank 0 has sinks. `OUT/log.jsonl` holds one line per event: its fields, `time` (seconds since the
epoch) and `event` (the class's name), without `sent_bytes`, `dense_bytes`, `gradients`, `staleness` and `replica` that say nothing.
"""

import hashlib
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import dataclass_transform  # which torch brings; of typing from Python 3.11 on

from stagerun.base.text import count


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """Each subclass is a frozen dataclass, made by keywords. `kinds` has them by name."""

    kinds: ClassVar[dict[str, type["Event"]]] = {}
    __test__ = False  # no case of pytest, for which it takes TestDue and Tested

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.__name__] = dataclass(frozen=True, kw_only=True)(cls)


class StageEvent(Event):
    """`iter`: updates of the stage done by then."""

    stage: str
    iter: int


class RunStarted(Event):
    schedule: str
    out: str
    workers: int
    device: str
    threads: int
    stages: tuple[str, ...]  # that are enabled
    iterations: int  # of all of them
    iterations_left: int  # that are to be done now; pieces among them
    version: str
    ensembles: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()  # stages of the schedule that are not enabled
    hosts: tuple[str, ...] = ()  # by rank
    attempt: int = 0  # the process life, rank 0 knows; 0 in logs of before
    side_by_side: int = 0  # workers that train a stage each (`run --parallel`), in place of `workers` that share one
    rest: bool = False  # the same process has trained stages side by side, and does now what is left


class Note(Event):
    """Something the user should know; `warning` if it may need an answer."""

    text: str
    warning: bool = False


class StageStarted(Event):
    stage: str
    number: int  # 1-based, of all stages
    iter: int  # `begins`, or where it goes on
    max_iter: int
    start: str  # what its weights come from, in words
    batch_size: int
    device_batch_size: int
    carried_over: str = ""  # from the stage it starts from, in words
    iterations_left: int = 0  # of all stages, this one among them; rank 0 knows
    train_seconds: float = 0.0  # spent on the stage's iterations before, over all process lives; rank 0 knows
    dense_bytes: int = 0  # that rank 0 would send in an iteration without compression; 0 where every iteration is one
    gradients: str = ""  # how they are sent, in words; '' where they are added up as they are at every iteration
    begins: int = 0  # the stage's first iteration: that of its `solverstate`
    weights: str = ""  # the file that its weights come from, if it begins now and has no stage before it
    display: int = 1  # iterations from one that is displayed to the next; 0: none; 1 in logs of before


class CompressionChosen(Event):
    """How a stage's gradients are compressed (`method: AUTO`): now, or as it was chosen before, which has nothing of what was tried."""

    stage: str
    methods: tuple[tuple[str, int, int, str], ...]  # method; tensors and numbers that have it; which, in words
    why: str  # in words
    tried: tuple[tuple[str, float], ...] = ()  # way; seconds of an iteration, the median

    @property
    def words(self) -> str:
        """`dense`, `TOP_K`, `dense for 34 tensors, TOP_K for 16`"""
        (first, tensors), *rest = [("dense" if name == "NONE" else name, n) for name, n, *_ in self.methods]
        if not rest:
            return first
        return ", ".join([f"{first} for {count(tensors, 'tensor')}", *(f"{name} for {n}" for name, n in rest)])


class Iterated(StageEvent):
    """One weight update was done. `iter` counts it; lr, momentum and weight_decay are those it was done with."""

    epoch: float  # of the stage's training set, along the path of ancestors
    lr: float
    momentum: float
    weight_decay: float
    loss: float  # mean over the global batch, before the update
    images: int
    seconds: float
    update_seconds: float = 0.0  # of them: from the last backward pass to the new weights, once per iteration
    sent_bytes: int = 0  # that this worker sent for the gradients, BatchNorm statistics and loss among them
    staleness: int | None = None  # of `method: ASYNC`: updates since its weights were pulled; rank 0 knows
    replica: int | None = None  # of the same, the rank that computed it; rank 0 knows


class NotFinite(StageEvent):
    """One iteration had a loss or gradients that are not finite; weights and momentum are as before it. `iter`: updates done before it.
    After a rollback a StageStarted (or PieceStarted) says where training goes on."""

    lr: float  # that it would have been done with
    what: str  # is not finite, in words
    done: str  # about it; of recipe.OnNan: STOP also where it has come once too often
    number: int  # of SKIP: iterations one after the other, this one among them; of ROLLBACK: failures in the stage
    most: int  # `max_nan`
    position: int  # of its first image
    images: int
    seconds: float
    keys: tuple[str, ...] = ()  # of its images in the LMDB, in their order; rank 0 knows
    back_to: int | None = None  # ROLLBACK: updates that are kept
    snapshot: str = ""  # ROLLBACK: from which they come, or `seed N`; rank 0 knows
    until: int | None = None  # of a stretch that is trained once more (PieceStarted)


class Renamed(Event):
    """Snapshots of a stage under its earlier name. Rank 0 knows."""

    stage: str
    snapshots: tuple[str, ...]  # by their names on disk


class PieceStarted(StageEvent):
    """A finished stretch of a stage is trained again, for a snapshot at `until`: its updates are Retraced, and nothing is evaluated."""

    until: int
    start: str  # what its weights come from, in words
    children: tuple[str, ...]  # the stages that will start there; rank 0 knows
    iterations_left: int = 0  # of all that is to be done, this among them; rank 0 knows


class Retraced(StageEvent):
    """One weight update of such a stretch was done, as an Iterated of the stage reported once."""

    until: int
    lr: float
    loss: float
    images: int
    seconds: float
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedItem:
    """What a message of one sender is made of, a parameter or the entire model, and what of it is lost. c: gradient plus residual."""

    name: str
    norm: float  # of c
    residual_norm: float | None  # of what the message lacks, remembered or not; None where no one knows
    kept: float | None  # 1 - (residual_norm / norm) ** 2; below 0 where what is sent is further from c than 0 is
    bytes: int  # of the message


class Compressed(StageEvent):
    """How the gradients of a displayed iteration were compressed: by rank 0's first sender, in model order. Rank 0 knows."""

    items: tuple[CompressedItem, ...]


class Synchronised(StageEvent):
    """The replicas of a stage (`sync_param`) have met after the iteration that an Iterated has reported."""

    bytes: int  # that this worker sent for it
    iterations: int  # since they last met or parted, or this process life began
    sent_bytes: int = 0  # in all of those, `bytes` among them


class Proof(StageEvent):
    """The state of a stage after `iter` updates (`audit_param { proof_iter }`), reported again after a kill or a rollback. Rank 0 knows."""

    state: str  # the digest of the state, 16 hexadecimal digits
    chain: str  # of that, of `iter` and of the chain before (`chained`); 32 hexadecimal digits


def chained(before: str, iter: int, state: str) -> str:
    """The next link of a chain of proofs: BLAKE2b of the link before ('' at its start), the iteration and the state's digest, in hex."""
    return hashlib.blake2b(f"{before} {iter} {state}".encode(), digest_size=16).hexdigest()


class SnapshotDue(StageEvent):
    pass


class SnapshotWritten(StageEvent):
    name: str
    bytes: int
    blocked_seconds: float  # training stood still
    seconds: float  # until it was on disk
    cpu_seconds: float = 0.0  # of this process: copying, digests, writing, reading back, deleting older ones


class SnapshotFailed(StageEvent):
    message: str


class TestDue(StageEvent):
    pass


class _Scored(StageEvent):
    images: int
    top1: float  # 0..1
    top5: float
    loss: float
    seconds: float
    ema: bool = False  # with the averaged weights (`ema_decay`) in place of the trained ones
    val: str = ""  # the validation set's name; '' where it has none
    mean_ap: float | None = None  # mean average precision, 0..1, of images with several labels


class Tested(_Scored):
    """The stage was evaluated on its first validation set, which decides."""


class TestedBeside(_Scored):
    """The same weights on another of the stage's validation sets, after a Tested."""


class StageFinished(Event):
    """A stage's last weights are on disk and evaluated. Also the content of OUT/results/SNAPSHOT.json."""

    stage: str
    iterations: int
    epochs: float
    first_lr: float
    last_lr: float
    weight_decay: float
    augmentation: str
    loss: float  # mean over the last iterations, 100 at most
    top1: float | None
    top5: float | None
    test_loss: float | None  # None also where it is not finite
    train_seconds: float  # over all process lives, without evaluation
    images_per_second: float
    snapshot: str
    ema_top1: float | None = None  # of the averaged weights, where the stage has `ema_decay`
    ema_top5: float | None = None
    ema_test_loss: float | None = None
    tested_on: str = ""  # what the evaluation depends on besides the weights; '' if nothing was evaluated
    last_weight_decay: float | None = None  # that of the last update, where it is another than the first one's
    skips: int = 0  # iterations without an update (`on_nan: SKIP`)
    rollbacks: int = 0  # `on_nan: ROLLBACK`
    tested_set: str = ""  # the images of the evaluation (`image_sets.set_of`); '' if unknown
    # Of other validation sets: name, top-1, top-5, loss, and whether the averaged weights had it.
    beside: tuple[tuple[str, float, float, float | None, bool], ...] = ()
    mean_ap: float | None = None  # as in Tested
    class_ap: tuple[float | None, ...] = ()  # of each class; None of one that no image has


class EnsembleTested(Event):
    """Several snapshots' weights were evaluated together: stages' last, or `trunk@6000`. Also the content of OUT/results/ensembles/NAME.json,
    which counts while `snapshots`, `rule`, `batch_norm_iter`, `tested_on` and `tested_set` are the same. `attempt`, `serial`: snapshots after
    these were trained later (0 in an older version)."""

    name: str
    rule: str  # of recipe.EnsembleRule
    members: tuple[str, ...]
    images: int
    top1: float  # 0..1
    top5: float
    loss: float | None  # None where it is not finite
    seconds: float
    best: str  # the member with the highest top-1 by itself, the first of several
    best_top1: float
    mean_top1: float  # of the members by themselves
    snapshots: tuple[str, ...]  # ids of the members' ends
    batch_norm_iter: int  # 0 where no weights are averaged
    tested_on: str
    attempt: int = 0
    serial: int = 0
    tested_set: str = ""
    shape: str | None = None  # of the decay that an average of weights imitates
    hold_out: str | None = None  # retired, as is `taken`: of logs with GREEDY_SOUP
    taken: tuple[str, ...] = ()
    alone: tuple[float, ...] = ()  # top-1 of each member by itself; () of an older version

    @property
    def stages(self) -> frozenset[str]:
        return frozenset(member.partition("@")[0] for member in self.members)

    def undone_by(self, stage: str, iter: int) -> bool:
        """Whether a member is trained anew when the stage goes on from `iter`."""
        points = (member.partition("@") for member in self.members)
        return any(name == stage and not (at and int(at) <= iter) for name, _, at in points)

    @property
    def gain(self) -> float:
        """Top-1 over that of the best member, as a fraction."""
        return self.top1 - self.best_top1

    @property
    def gain_over_mean(self) -> float:
        return self.top1 - self.mean_top1


class Stopped(StageEvent):
    """The run ends early, on demand, with everything saved."""

    reason: str


class Failed(Event):
    """The run ends in an error. `text` is '' where another worker reports it; a killed run leaves no such line."""

    code: int  # errors.ExitCode
    text: str


class RunFinished(Event):
    trained: bool  # whether there was anything to do
    seconds: float
    not_chosen: tuple[str, ...] = ()  # stages that are still to be trained, and were left out; rank 0 knows


class Indexed(Event):
    """In logs of earlier versions, which told readers what to skip. Nothing needs it any more."""

    since: int
    lines: tuple[int, ...]
