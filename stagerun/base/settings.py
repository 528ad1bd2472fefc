"""Values of networks and of a stage's settings. See `recipe`."""

from dataclasses import field

from stagerun.base.code import Sources
from stagerun.base.images import PROTO, Transform, message
from stagerun.base.proto.enums_pb2 import (
    DecayFrom,
    LossType,
    Memory,
    Method,
    Metric,
    MomentumForm,
    Normalization,
    OnNan,
    ParamKind,
    Precision,
    Sampling,
    Scope,
    SyncMethod,
    SyncMomentum,
    SyncRule,
    SyncStart,
    VarianceNorm,
    ZeroGamma,
)


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
    """A network. `name` of a Caffe net: its path as written."""

    name: str
    num_classes: int
    channels: int = PROTO
    # This and eps are most networks' values; `language.networks` has each network's. None, in a network from outside: each layer has its value.
    moving_average_fraction: float | None = 0.9
    eps: float | None = 1e-5
    moving_average_passes: int | None = None  # None: 1, or in a Caffe net one per device batch
    zero_gamma: ZeroGamma = PROTO
    fc_weight_filler: Filler | None = None
    fc_bias_filler: Filler | None = None
    blur_pool: bool = PROTO
    spare_classes: bool = PROTO  # for a check of `run`, not for the network: the canonical form leaves it out
    args: str | None = None  # as `language.arguments` writes them
    # The Python files of a network from outside, with consent to run them. None without consent: read from a snapshot.
    sources: Sources | None = None
    net: str | None = None  # the canonical text of a Caffe net
    input_shape: tuple[int, ...] = ()  # of the images that its layers are made for: channels, height, width


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
    """The first weights of a stage. `path`: the absolute path of `file`, or of a snapshot's output folder; '' for published weights. `state`:
    the file is a .solverstate, which names the weights."""

    file: str
    path: str
    drop: tuple[str, ...] = ()
    rename: tuple[Rename, ...] = ()
    strict: bool = PROTO
    state: bool = False


@message
class CompressionRule:
    """The compression of some parameters. Settings that the method doesn't read are None."""

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
    """Compression of gradients. `ratio`, `threshold`, `qstates` and `rank` are None if the method doesn't read them. `allow` is () except for
    `AUTO`. `as_released` was retired; canonical forms have it."""

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
    """Replicas. `alpha` is None except with `QSR`, `outer` except with `DILOCO`, `max_staleness` except with `ASYNC`; `period` is None with
    `ASYNC`."""

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
    """A loss. `teacher`: the name of a stage. `function`, `args` and `sources`: for `PYTHON`, as in Model."""

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
    iter: float  # in the policy's count; a knot written in epochs need not be whole
    factor: float


@message
class Solver:
    """A stage's settings. Durations are iterations of this stage, in whatever unit they were written. Learning rates are for batch_size:
    `base_lr_batch` is applied already."""

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
    epoch_iter: float | None = None  # iterations of an epoch, unrounded; derived; None in an older snapshot's recipe
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
    solverstate_path: str = ""  # the absolute path
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
        """Return the device batches per iteration, over the whole job."""
        return self.batch_size // self.device_batch_size

    @property
    def asynchronous(self) -> bool:
        """Return whether an iteration is a push (`sync_param { method: ASYNC }`), which one worker computes alone."""
        return self.sync is not None and self.sync.method is SyncMethod.ASYNC

    @property
    def most_workers(self) -> int:
        """Return the number of workers that can have work."""
        return self.sync.replicas if self.sync is not None and self.asynchronous else self.logical_workers

    @property
    def start(self) -> Weights | None:
        """Return the file of the stage's first weights; None if they are its parent's or random."""
        if self.solverstate is not None:
            return Weights(file=self.solverstate, path=self.solverstate_path, state=True)
        return self.weights

    @property
    def teacher(self) -> str | None:
        """Return the stage that teaches this one (`loss { type: DISTILL }`)."""
        return self.loss.teacher if self.loss is not None else None

    @property
    def start_field(self) -> str:
        """Return the field that names the file of `start`."""
        return "solver.weights.file" if self.solverstate is None else "solver.solverstate"

    @property
    def earliest_end(self) -> int:
        """Return the earliest iteration at which the stage may end: with `early_stop` before max_iter."""
        if self.early_stop is None or not self.test_interval:
            return self.max_iter
        return earliest_end(self.max_iter, self.test_interval, self.early_stop.patience_iter)


def earliest_end(max_iter: int, test_interval: int, patience_iter: int) -> int:
    """Return the earliest end with `early_stop`: the first evaluation is the best so far, and the first one a patience later may be the last.

    >>> earliest_end(1000, 100, 250), earliest_end(300, 100, 250)
    (400, 300)
    """
    return min(max_iter, (1 - -patience_iter // test_interval) * test_interval)
