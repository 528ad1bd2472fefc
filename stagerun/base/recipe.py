"""The resolved schedule, as frozen values: every default applied, every duration in iterations. No I/O.

Made by `language.resolve` alone; read by everything else. What a field means, its unit, range and default stand in `protos/stagerun.proto`,
where the field has the same name (`proto.path_to`); here only what differs is said.
"""

import posixpath
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from stagerun.base import proto
from stagerun.base.code import Sources
from stagerun.base.errors import Span
from stagerun.base.proto.enums_pb2 import (
    Cache,
    ChannelOrder,
    DecayFrom,
    Determinism,
    EnsembleRule,
    InterpMode,
    LossType,
    Memory,
    Method,
    Metric,
    MomentumForm,
    Normalization,
    OnBadRecord,
    OnNan,
    PadMode,
    ParamKind,
    Precision,
    Sampling,
    Scope,
    ScratchCopy,
    ScratchFrom,
    SyncMethod,
    SyncMomentum,
    SyncRule,
    SyncStart,
    VarianceNorm,
    ZeroGamma,
)

if TYPE_CHECKING:
    from typing import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda function: function


PROTO: Any = object()  # in place of the default that stagerun.proto states
T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(kind: type[T]) -> type[T]:
    """Make a frozen dataclass of the values of a message, with the defaults of stagerun.proto."""
    for attribute, value in list(vars(kind).items()):
        if value is PROTO:
            stated = proto.default(proto.path_to(kind, attribute)[-1])
            setattr(kind, attribute, kind.__annotations__[attribute](stated))
    return dataclass(frozen=True, slots=True, kw_only=True)(kind)


@message
class Filler:
    type: str = PROTO
    value: float = PROTO
    min: float = PROTO
    max: float = PROTO
    mean: float = PROTO
    std: float = PROTO
    variance_norm: VarianceNorm = PROTO


@message
class Model:
    """`name` of a net of Caffe's: its path as written."""

    name: str
    num_classes: int
    channels: int = PROTO
    # Of most networks, eps too; `language.networks` has those of each. None: those of each layer, in a network from outside.
    moving_average_fraction: float | None = 0.9
    eps: float | None = 1e-5
    moving_average_passes: int | None = None  # None: 1, and of a net of Caffe's as many as there are device batches
    zero_gamma: ZeroGamma = PROTO
    fc_weight_filler: Filler | None = None
    fc_bias_filler: Filler | None = None
    blur_pool: bool = PROTO
    spare_classes: bool = PROTO  # of what `run` checks, not of the network: the canonical form leaves it out
    args: str | None = None  # as `language.arguments` writes them
    # The Python files of a network from outside, which may be run. None where that isn't allowed: read from a snapshot.
    sources: Sources | None = None
    net: str | None = None  # the canonical text of a net of Caffe's
    input_shape: tuple[int, ...] = ()  # of an image, for which its layers are made: channels, height, width


@message
class Source:
    source: str  # as written; `path` is what it means on this machine
    path: str
    images: int
    name: str = ""  # of one of several validation sets
    labels: str | None = None  # likewise, and `labels_path`
    labels_path: str | None = None
    labels_digest: str | None = None

    def same(self, other: "Source") -> bool:
        """Whether both are one set of images."""
        return (self.path, self.images) == (other.path, other.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """The LMDB that a Source of class folders becomes on this machine, there or not yet. `counts`: images of each class. `files` and `state`:
    digests in hex over the names and sizes of the images, and over these and their times of change. `bytes`: of all their files."""

    lmdb: str
    in_scratch: bool
    classes: tuple[str, ...]
    counts: tuple[int, ...]
    files: str
    state: str
    bytes: int

    @property
    def images(self) -> int:
        return sum(self.counts)


def _each_once(sources: Iterable[Source]) -> tuple[Source, ...]:
    found: dict[str, Source] = {}
    for source in sources:
        found.setdefault(source.path, source)
    return tuple(found.values())


@message
class Data:
    train: Source
    val: tuple[Source, ...] = ()  # the first decides wherever one number is needed
    scratch: str | None = None
    shuffle: bool = PROTO
    loader_threads: int | None = None
    cache: Cache = PROTO
    on_bad_record: OnBadRecord = PROTO  # retired, as are the next two; canonical forms have them
    scratch_reserve: float = PROTO  # gigabytes
    scratch_copy: ScratchCopy = PROTO
    scratch_from: ScratchFrom = PROTO


@message
class RandomAspectRatio:
    min_area_ratio: float
    max_area_ratio: float
    aspect_ratio_change: float
    max_attempt: int
    interp_mode: InterpMode


@message
class RandomResize:
    min_size: int
    max_size: int
    interp_mode: InterpMode


@message
class RandomResizedCrop:
    min_area_ratio: float = PROTO
    max_area_ratio: float = PROTO
    min_aspect_ratio: float = PROTO
    max_aspect_ratio: float = PROTO
    max_attempt: int = PROTO
    interp_mode: InterpMode = PROTO


@message
class RandAugment:
    num_ops: int = PROTO
    magnitude: int = PROTO
    # Retired, as are all but two fields of RandomResizedCrop; canonical forms have them.
    num_magnitude_bins: int = PROTO


@message
class CropSizeRamp:
    start_size: int
    start_epoch: float = PROTO
    end_epoch: float
    multiple: int = PROTO


@message
class Transform:
    scale: float = PROTO
    mirror: bool = PROTO
    crop_size: int | None = None
    mean_value: tuple[float, ...] = ()
    pad: int = PROTO
    random_aspect_ratio: RandomAspectRatio | None = None
    random_resize: RandomResize | None = None
    pad_mode: PadMode = PROTO
    random_resized_crop: RandomResizedCrop | None = None
    channel_order: ChannelOrder = PROTO
    std_value: tuple[float, ...] = ()
    cutout_size: int = PROTO
    lighting_std: float = PROTO  # retired; canonical forms have it
    color_jitter: bool | None = None  # retired
    rand_augment: RandAugment | None = None
    trivial_augment: bool = PROTO
    rectangular: bool = PROTO
    crop_size_ramp: CropSizeRamp | None = None
    python: str | None = None
    mean_file: str | None = None
    mean_path: str = ""  # what it means on this machine

    @property
    def changes_colours(self) -> bool:
        return self.rand_augment is not None or self.trivial_augment


@message
class ParamRule:
    name: str = PROTO
    kind: ParamKind = PROTO
    lr_mult: float = PROTO
    decay_mult: float = PROTO
    adapt: bool = PROTO


@message
class Rename:
    from_: str  # `from` in the language
    to: str


@message
class Weights:
    """`path`: what `file` means on this machine, an absolute path; of a snapshot that of its output folder; '' for
    published weights. `state`: the file is a .solverstate, and the weights are those that it names."""

    file: str
    path: str
    drop: tuple[str, ...] = ()
    rename: tuple[Rename, ...] = ()
    strict: bool = PROTO
    state: bool = False


@message
class CompressionRule:
    """The method for some parameters. Settings that the method doesn't read are None."""

    name: str = PROTO
    kind: ParamKind = PROTO
    method: Method
    ratio: float | None = None
    threshold: float | None = None
    qstates: int | None = None
    rank: int | None = None
    memory: Memory = Memory.NONE


@message
class Compression:
    """`ratio`, `threshold`, `qstates` and `rank` are None where the method doesn't read them. `allow` is empty for
    all but `AUTO`. `as_released` was retired; canonical forms have it."""

    method: Method
    ratio: float | None = None
    threshold: float | None = None
    qstates: int | None = None
    rank: int | None = None
    scope: Scope = PROTO
    memory: Memory
    as_released: bool = PROTO
    start_iter: int = PROTO
    allow: tuple[Method, ...] = ()
    param: tuple[CompressionRule, ...] = ()


@message
class Outer:
    type: str = PROTO
    base_lr: float = PROTO
    momentum: float = PROTO


@message
class Sync:
    """`alpha` is None but with `QSR`, `outer` but with `DILOCO`, `max_staleness` but with `ASYNC`, and `period` with that."""

    method: SyncMethod
    replicas: int
    rule: SyncRule = PROTO
    period: int | None = None
    alpha: float | None = None
    start: SyncStart = PROTO
    momentum: SyncMomentum = PROTO
    outer: Outer | None = None
    max_staleness: int | None = None


@message
class Loss:
    """`teacher` is the name of a stage. `function`, `args` and `sources` are of `PYTHON`, and as in Model."""

    type: LossType
    normalization: Normalization = PROTO
    teacher: str | None = None
    temperature: float = PROTO
    weight: float = PROTO
    function: str | None = None
    args: str | None = None
    sources: Sources | None = None


@message
class EarlyStop:
    metric: Metric
    patience_iter: int
    min_delta: float = PROTO


@message
class Audit:
    proof_iter: int = PROTO


@message
class Knot:
    iter: float  # of the policy; a knot that was written in epochs need not be a whole one
    factor: float


@message
class Solver:
    """One stage's settings. Durations are iterations of this stage, whatever unit they were written in. Learning rates are
    those of batch_size: `base_lr_batch` is in them already."""

    base_lr: float
    lr_policy: str
    max_iter: int
    batch_size: int
    device_batch_size: int
    power: float | None = None
    gamma: float | None = None
    stepsize: int | None = None
    stepvalue: tuple[int, ...] = ()
    lr_iter: int | None = None
    warmup_iter: int = 0
    warmup_start_lr: float = PROTO
    decay_from: DecayFrom = PROTO
    policy_start_iter: int = PROTO
    end_lr: float = PROTO
    start_lr: float = PROTO  # retired; canonical forms have it
    knot: tuple[Knot, ...] = ()
    plateau_winsize: tuple[int, ...] = ()
    average_loss: int = PROTO
    epoch_iter: float | None = None  # of one epoch, in fractions; derived, and None in an older snapshot's recipe
    type: str = PROTO
    momentum: float = PROTO
    momentum2: float = PROTO
    rms_decay: float = PROTO
    delta: float = PROTO
    regularization_type: str = PROTO
    local_lr_auto: bool = PROTO
    local_gw_ratio: float = PROTO
    local_lr_passes: int = PROTO
    ema_decay: float | None = None
    ema_interval: int = PROTO
    momentum_form: MomentumForm = PROTO
    weight_decay: float = PROTO
    clip_gradients: float | None = None
    param: tuple[ParamRule, ...] = ()
    carry_momentum: bool = False
    carry_data: bool = True
    compress: Compression | None = None
    model: Model | None = None
    weights: Weights | None = None
    solverstate: str | None = None
    solverstate_path: str = ""  # what it means on this machine
    freeze: tuple[str, ...] = ()
    sync: Sync | None = None
    transform: Transform = field(default_factory=Transform)
    test_transform: Transform = field(default_factory=Transform)
    mixup_alpha: float = PROTO
    cutmix_alpha: float = PROTO
    label_smoothing: float = PROTO
    loss: Loss | None = None
    early_stop: EarlyStop | None = None
    class_weight: tuple[float, ...] = ()
    sampling: Sampling = PROTO
    random_seed: int
    precision: Precision = PROTO
    channels_last: bool = PROTO
    compile: bool = PROTO
    on_nan: OnNan = PROTO
    max_nan: int = PROTO
    audit: Audit | None = None
    display: int = PROTO
    test_interval: int = PROTO
    test_iter: int | None = None
    test_batch_size: int
    snapshot: int = PROTO

    @property
    def logical_workers(self) -> int:
        """Device batches per iteration, over the whole job."""
        return self.batch_size // self.device_batch_size

    @property
    def asynchronous(self) -> bool:
        """Whether an iteration is a push (`sync_param { method: ASYNC }`), which one worker computes alone."""
        return self.sync is not None and self.sync.method is SyncMethod.ASYNC

    @property
    def most_workers(self) -> int:
        """No more than these have something to do."""
        return self.sync.replicas if self.sync is not None and self.asynchronous else self.logical_workers

    @property
    def start(self) -> Weights | None:
        """The file that the stage's own weights come from."""
        if self.solverstate is not None:
            return Weights(file=self.solverstate, path=self.solverstate_path, state=True)
        return self.weights

    @property
    def teacher(self) -> str | None:
        """The stage that teaches this one (`loss { type: DISTILL }`)."""
        return self.loss.teacher if self.loss is not None else None

    @property
    def start_field(self) -> str:
        """The field that names that file."""
        return "solver.weights.file" if self.solverstate is None else "solver.solverstate"

    @property
    def earliest_end(self) -> int:
        """The iteration that the stage reaches in any case: `early_stop` may end it there."""
        if self.early_stop is None or not self.test_interval:
            return self.max_iter
        return earliest_end(self.max_iter, self.test_interval, self.early_stop.patience_iter)


def earliest_end(max_iter: int, test_interval: int, patience_iter: int) -> int:
    """The first evaluation is the best so far; the first that comes so late after it may be the last.

    >>> earliest_end(1000, 100, 250), earliest_end(300, 100, 250)
    (400, 300)
    """
    return min(max_iter, (1 - -patience_iter // test_interval) * test_interval)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a field of a stage got its value: `span` is None for a default, and for what was read from an LMDB."""

    text: str
    layer: str  # "default", "schedule", "stage", "sweep", "--set" or "LMDB"
    span: Span | None = None


# The key in a stage's identity of the iteration of its parent that it starts from. Not there where that is the parent's end.
FROM_ITER = "from_iter"
# What the keys there begin with of the average of snapshots that a stage starts from: its rule, shape and `batch_norm_iter`, the members'
# iterations, and, in a plan alone, their ids.
AVERAGE = "average."
AVERAGE_OF = "average.of"
AVERAGE_MEMBERS = "average.members"
# The key of the digest of what `Solver.start` names. It is in `origins` of every stage that has one, and in its identity as far as someone
# has looked: a file that is gone makes nothing stale. Of a .solverstate: `ITER DIGEST DIGEST`, of the state and of the weights.
WEIGHTS_DIGEST = "weights.sha256"
# The key of the digest of the `mean_file` of training, likewise.
MEAN_DIGEST = "mean.sha256"
FILES = frozenset({WEIGHTS_DIGEST, MEAN_DIGEST})
# The key in a snapshot's identity of the id of the snapshot that was its teacher; a stage's own identity has it in a plan alone.
TEACHER = "teacher"
# What the keys in `origins` of paths in `clear` that take nothing away begin with.
CLEARED = "clear."
# The key of the digest of the net of Caffe's that a stage trains. Not there for another network.
NET = "model.net"
# What the keys of the Python that a stage needs begin with: `code.mynet.py` and its digest, `code.timm` and its version.
CODE = "code."
ABSENT = "not installed"  # in place of that version
# The key of where a stage's training set was used last, where the stage that it starts from has another. Not there elsewhere.
LAST_USED = "data.train.last_used"
# The key of the digest of the labels of images that have several.
LABELS = "data.train.labels_digest"
# Likewise of the first validation set. There only with `early_stop`, which may end the stage by what it was tested for.
TESTED_LABELS = "data.val.labels_digest"
FLOAT_DATA = "float_data"  # in place of the name of a file with labels: the Datums have them


@message
class Stage:
    """One node of the tree. `parent` is None for a stage that starts from the seed; `parent_iter` is the iteration of the
    parent that it starts from, None for the parent's end. `average` names the ensemble whose averaged weights it starts with; `parent` is then
    the member named last, behind which it goes on in the images. `group` is the stage in schedule.prototxt that several were made of.
    A stage below one that is not enabled is not enabled either. `data` is the schedule's, with the images that this stage trains on and
    is evaluated on.

    `model` is its network: its own, or the schedule's.

    `identity` maps each field that snapshots depend on, shared ones included (`solver.base_lr`, `model.name`, ...), to
    its canonical text; two stages with equal identity and equal parent snapshots train to the same bits. `origins` has
    the same keys, and those of the other fields of Solver too.
    """

    name: str
    parent: str | None
    parent_iter: int | None = None
    average: str | None = None
    enabled: bool = PROTO
    group: str | None = None
    model: Model
    data: Data
    solver: Solver
    identity: Mapping[str, str]
    origins: Mapping[str, Origin]
    span: Span

    @property
    def starts_from(self) -> str:
        """As `from` has it: `main`, `main@7638`, an ensemble, '' for the seed."""
        at = f"@{self.parent_iter}" if self.parent_iter is not None else ""
        return self.average or f"{self.parent or ''}{at}"

    @property
    def begins(self) -> int:
        """The iteration at which it begins: that of its `solverstate`, as far as someone has looked."""
        iter, *digests = self.identity.get(WEIGHTS_DIGEST, "").split() or [""]
        return int(iter) if digests and self.solver.solverstate is not None else 0

    def written(self, *fields: str) -> Span | None:
        """Where the first of these fields that is written stands, as `solver.base_lr`; None where none is."""
        spans = (self.origins[field].span for field in fields if field in self.origins)
        return next(filter(None, spans), None)


@message
class Ensemble:
    """`members`, groups and ranges resolved, in the order in which they are written: `trunk` for a stage's end, `trunk@6000` for a place
    before it. `shape`: of the decay that the average imitates (`schedule.averages`); None for the plain mean."""

    name: str
    members: tuple[str, ...]
    rule: EnsembleRule = PROTO
    batch_norm_iter: int = PROTO
    shape: str | None = None
    span: Span = field(default_factory=lambda: Span("", 1, 1))

    @property
    def averages(self) -> bool:
        """Whether it makes one network of the members' weights."""
        return self.rule is EnsembleRule.WEIGHT_AVERAGE

    @property
    def points(self) -> tuple[tuple[str, int | None], ...]:
        """The members as stage and iteration, None for its end."""
        return tuple(point(member) for member in self.members)


def point(member: str) -> tuple[str, int | None]:
    """The stage and the iteration, None for its end, of a member as `Ensemble.members` has it. ValueError for other texts.

    >>> point("trunk@6000"), point("trunk")
    (('trunk', 6000), ('trunk', None))
    """
    stage, mark, iter = member.partition("@")
    return stage, int(iter) if mark else None


@message
class Schedule:
    """`stages` are in the order in which they run: parents before children. `data` is what they share: which images a stage has, it says
    itself. `files` are (path, text) as read, the Python files that it names last. `sets`: which images the LMDBs hold (`image_sets.set_of`),
    by their path, as far as someone has looked. `class_sizes`: how many training images each class has, likewise, by the stage's name,
    where its sampling depends on it; images that it ignores are of none. `imports`: of the sources that are folders of class folders, by
    their path (`imports.with_imports`)."""

    name: str
    seed: int
    model: Model
    data: Data
    determinism: Determinism = PROTO
    keep_snapshots: int = PROTO
    stages: tuple[Stage, ...]
    ensembles: tuple[Ensemble, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    sets: Mapping[str, str] = field(default_factory=dict, compare=False)
    class_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False)
    imports: Mapping[str, Import] = field(default_factory=dict, compare=False)

    def lmdb(self, source: Source) -> str:
        """The folder of the LMDB that the images of a source are read from."""
        found = self.imports.get(source.path)
        return source.path if found is None else found.lmdb

    def class_sizes_of(self, stage: Stage) -> tuple[int, ...]:
        """How many training images each class of the stage has; () where no one has looked, or it doesn't matter."""
        return self.class_sizes.get(stage.name, ())

    @property
    def python(self) -> Sources:
        """The Python files that the schedule names, and those that they import."""
        folder = posixpath.dirname(self.files[0][0]) if self.files else ""
        python = [(path, text) for path, text in self.files if path.endswith(".py")]
        return Sources(folder, tuple((posixpath.relpath(path, folder or "."), text) for path, text in python))

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Where the shared fields got their values, as the stages have it."""

        def shares(stage: Stage) -> int:
            own_images = (stage.data.train, stage.data.val) != (self.data.train, self.data.val)
            return (stage.solver.model is not None) + own_images

        return min(self.stages, key=shares).origins

    def ensemble(self, name: str) -> Ensemble:
        """The ensemble of that name. KeyError if there is none."""
        return {ensemble.name: ensemble for ensemble in self.ensembles}[name]

    def stage(self, name: str) -> Stage:
        """The stage of that name. KeyError if there is none."""
        return {stage.name: stage for stage in self.stages}[name]

    @property
    def training_sets(self) -> tuple[Source, ...]:
        """What the enabled stages train on, each path once, in running order."""
        return _each_once(data.train for data in self._of_enabled())

    @property
    def validation_sets(self) -> tuple[Source, ...]:
        """What the enabled stages are evaluated on, likewise."""
        return _each_once(source for data in self._of_enabled() for source in data.val)

    @property
    def sources(self) -> tuple[Source, ...]:
        """All of these, those of training first."""
        return _each_once((*self.training_sets, *self.validation_sets))

    def with_data(self, change: Callable[[Data], Data]) -> "Schedule":
        """The schedule with its own data changed, and that of every stage."""
        stages = tuple(replace(stage, data=change(stage.data)) for stage in self.stages)
        return replace(self, data=change(self.data), stages=stages)

    def _of_enabled(self) -> list[Data]:
        return [stage.data for stage in self.stages if stage.enabled] or [self.data]

    def changes_set(self, stage: Stage) -> bool:
        """Whether a stage trains on other images than the one that it starts from."""
        return stage.parent is not None and not stage.data.train.same(self.stage(stage.parent).data.train)

    def teacher_model(self, stage: Stage) -> Model | None:
        """The network of the stage's teacher; None where it has none. A teacher that is left out is taken to be like the stage."""
        loss = stage.solver.loss
        if loss is None or loss.type is not LossType.DISTILL:
            return None
        taught = next((other.model for other in self.stages if other.name == loss.teacher), None)
        return taught or stage.model

    def start_iter(self, stage: Stage) -> int:
        """Updates of its parent that a stage starts after; 0 from the seed."""
        if stage.parent is None:
            return 0
        return self.stage(stage.parent).solver.max_iter if stage.parent_iter is None else stage.parent_iter

    def branch_points(self, name: str) -> tuple[int, ...]:
        """The iterations of a stage, before its end, at which another one starts, or that an ensemble has: growing."""
        last = self.stage(name).solver.max_iter
        points = {(s.parent, s.parent_iter) for s in self.stages}
        points |= {point for ensemble in self.ensembles for point in ensemble.points}
        return tuple(sorted(iter for stage, iter in points if stage == name and iter is not None and iter < last))
