"""Events of a run, as values. The loop yields them, sinks show and store them; nothing flows back.

Every rank makes them, in the same order, except the ones that only rank 0 makes: snapshots, notes on them, on other ranks and on promises,
and Compressed. Only rank 0 has sinks. `OUT/log.jsonl` holds one line per event: its fields, `time` (seconds since the epoch) and `event`
(the class's name), without `sent_bytes`, `dense_bytes`, `gradients`, `staleness` and `replica` at their defaults.
"""

import hashlib
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import dataclass_transform  # a dependency of torch; in typing from Python 3.11 on

from stagerun.base.text import count


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of the events, each a frozen dataclass made by keywords. `kinds`: the classes by name."""

    kinds: ClassVar[dict[str, type["Event"]]] = {}
    __test__ = False  # pytest would collect TestDue and Tested

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.__name__] = dataclass(frozen=True, kw_only=True)(cls)


class StageEvent(Event):
    """An event of a stage. `iter`: updates of the stage done so far."""

    stage: str
    iter: int


class RunStarted(Event):
    schedule: str
    out: str
    workers: int
    device: str
    threads: int
    stages: tuple[str, ...]  # the enabled ones
    iterations: int  # of all of them
    iterations_left: int  # including pieces
    version: str
    ensembles: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()  # stages of the schedule that are not enabled
    hosts: tuple[str, ...] = ()  # by rank
    attempt: int = 0  # the process life, on rank 0; 0 in older logs
    side_by_side: int = 0  # workers that train a stage each (`run --parallel`), instead of `workers` that share one
    rest: bool = False  # the same process has trained stages side by side, and now does the rest


class Note(Event):
    """A note for the user; `warning` if it may need an answer."""

    text: str
    warning: bool = False


class StageStarted(Event):
    stage: str
    number: int  # 1-based, of all stages
    iter: int  # `begins`, or where it resumes
    max_iter: int
    start: str  # the origin of its weights, in words
    batch_size: int
    device_batch_size: int
    carried_over: str = ""  # from its parent, in words
    iterations_left: int = 0  # of all stages including this one, on rank 0
    train_seconds: float = 0.0  # spent on the stage's iterations so far, over all process lives, on rank 0
    dense_bytes: int = 0  # that rank 0 would send in an iteration without compression; 0 if nothing is compressed
    gradients: str = ""  # how they are sent, in words; '' for a plain sum at every iteration
    begins: int = 0  # the stage's first iteration, from its `solverstate`
    weights: str = ""  # the file of its first weights, if it begins now and has no parent
    display: int = 1  # iterations from one display to the next; 0: never; 1 in older logs


class CompressionChosen(Event):
    """The compression of a stage's gradients (`method: AUTO`): chosen now, or earlier, and then without `tried`."""

    stage: str
    methods: tuple[tuple[str, int, int, str], ...]  # method; its tensors and numbers; which, in words
    why: str  # in words
    tried: tuple[tuple[str, float], ...] = ()  # candidate; seconds of an iteration, the median

    @property
    def words(self) -> str:
        """Return `dense`, `TOP_K`, `dense for 34 tensors, TOP_K for 16`."""
        (first, tensors), *rest = [("dense" if name == "NONE" else name, n) for name, n, *_ in self.methods]
        if not rest:
            return first
        return ", ".join([f"{first} for {count(tensors, 'tensor')}", *(f"{name} for {n}" for name, n in rest)])


class Iterated(StageEvent):
    """A weight update was done. `iter` counts it; lr, momentum and weight_decay are the ones it used."""

    epoch: float  # of the stage's training set, along the path of ancestors
    lr: float
    momentum: float
    weight_decay: float
    loss: float  # mean over the global batch, before the update
    images: int
    seconds: float
    update_seconds: float = 0.0  # within `seconds`: from the last backward pass to the new weights, once per iteration
    sent_bytes: int = 0  # that this worker sent for the gradients, including BatchNorm statistics and loss
    staleness: int | None = None  # for `method: ASYNC`: updates since its weights were pulled, on rank 0
    replica: int | None = None  # likewise the rank that computed it


class NotFinite(StageEvent):
    """The loss or gradients of an iteration were not finite; weights and momentum are as before it. `iter`: updates done before it. After a
    rollback, a StageStarted (or PieceStarted) reports where training resumes."""

    lr: float  # of the failed update
    what: str  # is not finite, in words
    done: str  # the reaction, of recipe.OnNan: STOP also if it happened once too often
    number: int  # for SKIP: consecutive iterations, including this one; for ROLLBACK: failures in the stage
    most: int  # `max_nan`
    position: int  # of its first image
    images: int
    seconds: float
    keys: tuple[str, ...] = ()  # of its images in the LMDB, in order, on rank 0
    back_to: int | None = None  # ROLLBACK: the updates kept
    snapshot: str = ""  # ROLLBACK: their snapshot, or `seed N`, on rank 0
    until: int | None = None  # of a piece (PieceStarted)


class Renamed(Event):
    """Snapshots of a stage under its earlier name. Only on rank 0."""

    stage: str
    snapshots: tuple[str, ...]  # by their names on disk


class PieceStarted(StageEvent):
    """A piece, a finished stretch of a stage, is retrained for a snapshot at `until`: its updates are Retraced, and nothing is evaluated."""

    until: int
    start: str  # the origin of its weights, in words
    children: tuple[str, ...]  # the stages that will start from the snapshot, on rank 0
    iterations_left: int = 0  # in all, including the piece, on rank 0


class Retraced(StageEvent):
    """A weight update of a piece was done, which an Iterated of the stage has reported before."""

    until: int
    lr: float
    loss: float
    images: int
    seconds: float
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedItem:
    """A sender's message about a parameter or the entire model, and its loss of precision. c: gradient plus residual."""

    name: str
    norm: float  # of c
    residual_norm: float | None  # of the part that the message lacks, remembered or not; None if unknown
    kept: float | None  # 1 - (residual_norm / norm) ** 2; below 0 if the message is further from c than 0 is
    bytes: int  # of the message


class Compressed(StageEvent):
    """The compression of a displayed iteration's gradients by rank 0's first sender, in model order. Only on rank 0."""

    items: tuple[CompressedItem, ...]


class Synchronised(StageEvent):
    """The replicas of a stage (`sync_param`) synchronised after the iteration that an Iterated has reported."""

    bytes: int  # that this worker sent for it
    iterations: int  # since the last synchronisation, the parting, or the start of this process life
    sent_bytes: int = 0  # in these iterations, including `bytes`


class Proof(StageEvent):
    """The state of a stage after `iter` updates (`audit_param { proof_iter }`), reported again after a kill or a rollback. Only on rank 0."""

    state: str  # the digest of the state, 16 hexadecimal digits
    chain: str  # the digest of `state`, `iter` and the previous chain (`chained`); 32 hexadecimal digits


def chained(before: str, iter: int, state: str) -> str:
    """Return the next link of a chain of proofs: BLAKE2b of the previous link ('' at the start), the iteration and the state's digest, in hex."""
    return hashlib.blake2b(f"{before} {iter} {state}".encode(), digest_size=16).hexdigest()


class SnapshotDue(StageEvent):
    pass


class SnapshotWritten(StageEvent):
    name: str
    bytes: int
    blocked_seconds: float  # that training waited
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
    ema: bool = False  # with the averaged weights (`ema_decay`) instead of the trained ones
    val: str = ""  # the validation set's name; '' if unnamed
    mean_ap: float | None = None  # mean average precision, 0..1, for images with several labels


class Tested(_Scored):
    """The stage was evaluated on its first validation set, which decides."""


class TestedBeside(_Scored):
    """The stage was evaluated on another of its validation sets, after a Tested with the same weights."""


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
    ema_top1: float | None = None  # of the averaged weights, if the stage has `ema_decay`
    ema_top5: float | None = None
    ema_test_loss: float | None = None
    tested_on: str = ""  # the facts besides weights that the evaluation depends on; '' if nothing was evaluated
    last_weight_decay: float | None = None  # of the last update, if it differs from the first one's
    skips: int = 0  # iterations without an update (`on_nan: SKIP`)
    rollbacks: int = 0  # `on_nan: ROLLBACK`
    tested_set: str = ""  # the images of the evaluation (`image_sets.set_of`); '' if unknown
    # Other validation sets: name, top-1, top-5, loss, and whether it is for the averaged weights.
    beside: tuple[tuple[str, float, float, float | None, bool], ...] = ()
    mean_ap: float | None = None  # as in Tested
    class_ap: tuple[float | None, ...] = ()  # of each class; None for a class without images
    balanced_accuracy: float | None = None  # 0..1, as `macro_f1`; None for images with several labels
    macro_f1: float | None = None


class EnsembleTested(Event):
    """The weights of several snapshots were evaluated together: ends of stages, or `trunk@6000`. Also the content of
    OUT/results/ensembles/NAME.json, which counts while `snapshots`, `rule`, `batch_norm_iter`, `tested_on` and `tested_set` are the same.
    `attempt`, `serial`: snapshots with larger ones are newer than the evaluation (0 in older versions)."""

    name: str
    rule: str  # of recipe.EnsembleRule
    members: tuple[str, ...]
    images: int
    top1: float  # 0..1
    top5: float
    loss: float | None  # None if not finite
    seconds: float
    best: str  # the member with the highest top-1 alone, the first of several
    best_top1: float
    mean_top1: float  # of the members alone
    snapshots: tuple[str, ...]  # ids of the members' snapshots
    batch_norm_iter: int  # 0 unless weights are averaged
    tested_on: str
    attempt: int = 0
    serial: int = 0
    tested_set: str = ""
    shape: str | None = None  # of the decay that an average of weights imitates
    hold_out: str | None = None  # retired, as is `taken`: in logs with GREEDY_SOUP
    taken: tuple[str, ...] = ()
    alone: tuple[float, ...] = ()  # top-1 of each member alone; () in older versions

    @property
    def stages(self) -> frozenset[str]:
        return frozenset(member.partition("@")[0] for member in self.members)

    def undone_by(self, stage: str, iter: int) -> bool:
        """Return whether a member is retrained when the stage resumes from `iter`."""
        points = (member.partition("@") for member in self.members)
        return any(name == stage and not (at and int(at) <= iter) for name, _, at in points)

    @property
    def gain(self) -> float:
        """Return the gain in top-1 over the best member, as a fraction."""
        return self.top1 - self.best_top1

    @property
    def gain_over_mean(self) -> float:
        return self.top1 - self.mean_top1


class Stopped(StageEvent):
    """The run ends early, on request, with everything saved."""

    reason: str


class Failed(Event):
    """The run ends with an error. `text` is '' if another worker reports it; a killed run leaves no such line."""

    code: int  # errors.ExitCode
    text: str


class RunFinished(Event):
    trained: bool  # False if nothing was left to do
    seconds: float
    not_chosen: tuple[str, ...] = ()  # stages that were left out and still have to be trained, on rank 0


class Indexed(Event):
    """An index for readers, only in logs of earlier versions. Unused."""

    since: int
    lines: tuple[int, ...]
