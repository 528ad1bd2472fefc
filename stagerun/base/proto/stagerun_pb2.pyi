from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Determinism(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FIXED: _ClassVar[Determinism]
    ELASTIC: _ClassVar[Determinism]

class EnsembleRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEAN_PROBABILITY: _ClassVar[EnsembleRule]
    MEAN_LOGIT: _ClassVar[EnsembleRule]
    WEIGHT_AVERAGE: _ClassVar[EnsembleRule]
    GREEDY_SOUP: _ClassVar[EnsembleRule]

class ZeroGamma(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AS_PUBLISHED: _ClassVar[ZeroGamma]
    NONE: _ClassVar[ZeroGamma]
    LAST: _ClassVar[ZeroGamma]
    ALL: _ClassVar[ZeroGamma]

class Cache(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AUTO: _ClassVar[Cache]
    DISK: _ClassVar[Cache]
    MEMORY: _ClassVar[Cache]
    DEVICE: _ClassVar[Cache]

class OnBadRecord(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP: _ClassVar[OnBadRecord]
    REPLACE: _ClassVar[OnBadRecord]

class ScratchCopy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BEFORE: _ClassVar[ScratchCopy]
    BESIDE: _ClassVar[ScratchCopy]

class ScratchFrom(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEASURED: _ClassVar[ScratchFrom]
    SOURCE: _ClassVar[ScratchFrom]
    NODES: _ClassVar[ScratchFrom]

class Sampling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNIFORM: _ClassVar[Sampling]
    BALANCED: _ClassVar[Sampling]
    FILE: _ClassVar[Sampling]

class DecayFrom(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_START: _ClassVar[DecayFrom]
    WARMUP_END: _ClassVar[DecayFrom]

class MomentumForm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAFFE: _ClassVar[MomentumForm]
    TORCH: _ClassVar[MomentumForm]

class Precision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FP32: _ClassVar[Precision]
    BF16: _ClassVar[Precision]
    FP64: _ClassVar[Precision]

class ParamKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ANY: _ClassVar[ParamKind]
    WEIGHT: _ClassVar[ParamKind]
    BIAS: _ClassVar[ParamKind]
    NORM: _ClassVar[ParamKind]
    BIAS_AND_NORM: _ClassVar[ParamKind]
FIXED: Determinism
ELASTIC: Determinism
MEAN_PROBABILITY: EnsembleRule
MEAN_LOGIT: EnsembleRule
WEIGHT_AVERAGE: EnsembleRule
GREEDY_SOUP: EnsembleRule
AS_PUBLISHED: ZeroGamma
NONE: ZeroGamma
LAST: ZeroGamma
ALL: ZeroGamma
AUTO: Cache
DISK: Cache
MEMORY: Cache
DEVICE: Cache
STOP: OnBadRecord
REPLACE: OnBadRecord
BEFORE: ScratchCopy
BESIDE: ScratchCopy
MEASURED: ScratchFrom
SOURCE: ScratchFrom
NODES: ScratchFrom
UNIFORM: Sampling
BALANCED: Sampling
FILE: Sampling
STAGE_START: DecayFrom
WARMUP_END: DecayFrom
CAFFE: MomentumForm
TORCH: MomentumForm
FP32: Precision
BF16: Precision
FP64: Precision
ANY: ParamKind
WEIGHT: ParamKind
BIAS: ParamKind
NORM: ParamKind
BIAS_AND_NORM: ParamKind
IDENTITY_FIELD_NUMBER: _ClassVar[int]
identity: _descriptor.FieldDescriptor
AT_LEAST_FIELD_NUMBER: _ClassVar[int]
at_least: _descriptor.FieldDescriptor
ABOVE_FIELD_NUMBER: _ClassVar[int]
above: _descriptor.FieldDescriptor
AT_MOST_FIELD_NUMBER: _ClassVar[int]
at_most: _descriptor.FieldDescriptor
BELOW_FIELD_NUMBER: _ClassVar[int]
below: _descriptor.FieldDescriptor
HINT_FIELD_NUMBER: _ClassVar[int]
hint: _descriptor.FieldDescriptor
NOT_ZERO_FIELD_NUMBER: _ClassVar[int]
not_zero: _descriptor.FieldDescriptor
NOT_EMPTY_FIELD_NUMBER: _ClassVar[int]
not_empty: _descriptor.FieldDescriptor
REQUIRED_FIELD_NUMBER: _ClassVar[int]
required: _descriptor.FieldDescriptor
QUIET_FIELD_NUMBER: _ClassVar[int]
quiet: _descriptor.FieldDescriptor
ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
arguments: _descriptor.FieldDescriptor
EPOCHS_FIELD_NUMBER: _ClassVar[int]
epochs: _descriptor.FieldDescriptor
EPOCHS_OF_FIELD_NUMBER: _ClassVar[int]
epochs_of: _descriptor.FieldDescriptor
SAME_AS_FIELD_NUMBER: _ClassVar[int]
same_as: _descriptor.FieldDescriptor
RETIRED_FIELD_NUMBER: _ClassVar[int]
retired: _descriptor.FieldDescriptor
CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
class_name: _descriptor.FieldDescriptor
RETIRED_VALUE_FIELD_NUMBER: _ClassVar[int]
retired_value: _descriptor.FieldDescriptor

class Schedule(_message.Message):
    __slots__ = ("name", "seed", "model", "data", "solver", "stage", "determinism", "keep_snapshots", "ensemble")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SOLVER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DETERMINISM_FIELD_NUMBER: _ClassVar[int]
    KEEP_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    ENSEMBLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    seed: int
    model: Model
    data: Data
    solver: Solver
    stage: _containers.RepeatedCompositeFieldContainer[StageEntry]
    determinism: Determinism
    keep_snapshots: int
    ensemble: _containers.RepeatedCompositeFieldContainer[Ensemble]
    def __init__(self, name: _Optional[str] = ..., seed: _Optional[int] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., data: _Optional[_Union[Data, _Mapping]] = ..., solver: _Optional[_Union[Solver, _Mapping]] = ..., stage: _Optional[_Iterable[_Union[StageEntry, _Mapping]]] = ..., determinism: _Optional[_Union[Determinism, str]] = ..., keep_snapshots: _Optional[int] = ..., ensemble: _Optional[_Iterable[_Union[Ensemble, _Mapping]]] = ...) -> None: ...

class StageEntry(_message.Message):
    __slots__ = ("name", "solver", "enabled", "sweep", "solver_param")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOLVER_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    SWEEP_FIELD_NUMBER: _ClassVar[int]
    SOLVER_PARAM_FIELD_NUMBER: _ClassVar[int]
    name: str
    solver: str
    enabled: bool
    sweep: _containers.RepeatedCompositeFieldContainer[Sweep]
    solver_param: Solver
    def __init__(self, name: _Optional[str] = ..., solver: _Optional[str] = ..., enabled: bool = ..., sweep: _Optional[_Iterable[_Union[Sweep, _Mapping]]] = ..., solver_param: _Optional[_Union[Solver, _Mapping]] = ..., **kwargs) -> None: ...

class Sweep(_message.Message):
    __slots__ = ("name", "solver")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    SOLVER_FIELD_NUMBER: _ClassVar[int]
    name: str
    solver: Solver
    def __init__(self, name: _Optional[str] = ..., solver: _Optional[_Union[Solver, _Mapping]] = ..., **kwargs) -> None: ...

class Ensemble(_message.Message):
    __slots__ = ("name", "members", "rule", "batch_norm_iter", "shape", "hold_out")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    BATCH_NORM_ITER_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    HOLD_OUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    members: _containers.RepeatedScalarFieldContainer[str]
    rule: EnsembleRule
    batch_norm_iter: int
    shape: str
    hold_out: str
    def __init__(self, name: _Optional[str] = ..., members: _Optional[_Iterable[str]] = ..., rule: _Optional[_Union[EnsembleRule, str]] = ..., batch_norm_iter: _Optional[int] = ..., shape: _Optional[str] = ..., hold_out: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "num_classes", "channels", "batch_norm_param", "zero_gamma", "fc_weight_filler", "fc_bias_filler", "blur_pool", "spare_classes", "args", "caffe_net")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_CLASSES_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    BATCH_NORM_PARAM_FIELD_NUMBER: _ClassVar[int]
    ZERO_GAMMA_FIELD_NUMBER: _ClassVar[int]
    FC_WEIGHT_FILLER_FIELD_NUMBER: _ClassVar[int]
    FC_BIAS_FILLER_FIELD_NUMBER: _ClassVar[int]
    BLUR_POOL_FIELD_NUMBER: _ClassVar[int]
    SPARE_CLASSES_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    CAFFE_NET_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_classes: int
    channels: int
    batch_norm_param: BatchNormParameter
    zero_gamma: ZeroGamma
    fc_weight_filler: FillerParameter
    fc_bias_filler: FillerParameter
    blur_pool: bool
    spare_classes: bool
    args: str
    caffe_net: str
    def __init__(self, name: _Optional[str] = ..., num_classes: _Optional[int] = ..., channels: _Optional[int] = ..., batch_norm_param: _Optional[_Union[BatchNormParameter, _Mapping]] = ..., zero_gamma: _Optional[_Union[ZeroGamma, str]] = ..., fc_weight_filler: _Optional[_Union[FillerParameter, _Mapping]] = ..., fc_bias_filler: _Optional[_Union[FillerParameter, _Mapping]] = ..., blur_pool: bool = ..., spare_classes: bool = ..., args: _Optional[str] = ..., caffe_net: _Optional[str] = ...) -> None: ...

class FillerParameter(_message.Message):
    __slots__ = ("type", "value", "min", "max", "mean", "std", "variance_norm")
    class VarianceNorm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FAN_IN: _ClassVar[FillerParameter.VarianceNorm]
        FAN_OUT: _ClassVar[FillerParameter.VarianceNorm]
        AVERAGE: _ClassVar[FillerParameter.VarianceNorm]
    FAN_IN: FillerParameter.VarianceNorm
    FAN_OUT: FillerParameter.VarianceNorm
    AVERAGE: FillerParameter.VarianceNorm
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STD_FIELD_NUMBER: _ClassVar[int]
    VARIANCE_NORM_FIELD_NUMBER: _ClassVar[int]
    type: str
    value: float
    min: float
    max: float
    mean: float
    std: float
    variance_norm: FillerParameter.VarianceNorm
    def __init__(self, type: _Optional[str] = ..., value: _Optional[float] = ..., min: _Optional[float] = ..., max: _Optional[float] = ..., mean: _Optional[float] = ..., std: _Optional[float] = ..., variance_norm: _Optional[_Union[FillerParameter.VarianceNorm, str]] = ...) -> None: ...

class BatchNormParameter(_message.Message):
    __slots__ = ("moving_average_fraction", "eps", "moving_average_passes")
    MOVING_AVERAGE_FRACTION_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    MOVING_AVERAGE_PASSES_FIELD_NUMBER: _ClassVar[int]
    moving_average_fraction: float
    eps: float
    moving_average_passes: int
    def __init__(self, moving_average_fraction: _Optional[float] = ..., eps: _Optional[float] = ..., moving_average_passes: _Optional[int] = ...) -> None: ...

class Data(_message.Message):
    __slots__ = ("train", "val", "scratch", "shuffle", "loader_threads", "cache", "on_bad_record", "scratch_reserve", "scratch_copy", "scratch_from")
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    VAL_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    LOADER_THREADS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    ON_BAD_RECORD_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_RESERVE_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_COPY_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_FROM_FIELD_NUMBER: _ClassVar[int]
    train: Source
    val: _containers.RepeatedCompositeFieldContainer[Source]
    scratch: str
    shuffle: bool
    loader_threads: int
    cache: Cache
    on_bad_record: OnBadRecord
    scratch_reserve: float
    scratch_copy: ScratchCopy
    scratch_from: ScratchFrom
    def __init__(self, train: _Optional[_Union[Source, _Mapping]] = ..., val: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., scratch: _Optional[str] = ..., shuffle: bool = ..., loader_threads: _Optional[int] = ..., cache: _Optional[_Union[Cache, str]] = ..., on_bad_record: _Optional[_Union[OnBadRecord, str]] = ..., scratch_reserve: _Optional[float] = ..., scratch_copy: _Optional[_Union[ScratchCopy, str]] = ..., scratch_from: _Optional[_Union[ScratchFrom, str]] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("source", "images", "name", "labels")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    source: str
    images: int
    name: str
    labels: str
    def __init__(self, source: _Optional[str] = ..., images: _Optional[int] = ..., name: _Optional[str] = ..., labels: _Optional[str] = ...) -> None: ...

class StageData(_message.Message):
    __slots__ = ("train", "val")
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    VAL_FIELD_NUMBER: _ClassVar[int]
    train: Source
    val: _containers.RepeatedCompositeFieldContainer[Source]
    def __init__(self, train: _Optional[_Union[Source, _Mapping]] = ..., val: _Optional[_Iterable[_Union[Source, _Mapping]]] = ...) -> None: ...

class Solver(_message.Message):
    __slots__ = ("clear", "base_lr", "lr_policy", "power", "gamma", "stepsize", "stepsize_epoch", "stepvalue", "stepvalue_epoch", "lr_iter", "lr_epoch", "warmup_iter", "warmup_epoch", "warmup_start_lr", "decay_from", "policy_start_iter", "policy_start_epoch", "base_lr_batch", "end_lr", "start_lr", "peak_iter", "peak_epoch", "knot", "plateau_winsize", "plateau_winsize_epoch", "average_loss", "max_iter", "max_epoch", "batch_size", "device_batch_size", "iter_size", "type", "momentum", "momentum_policy", "momentum2", "rms_decay", "delta", "regularization_type", "local_lr_auto", "local_gw_ratio", "local_lr_passes", "momentum_form", "weight_decay", "weight_decay_policy", "clip_gradients", "ema_decay", "ema_interval", "param", "compress_param", "model", "weights", "solverstate", "freeze", "sync_param", "carry", "transform_param", "test_transform_param", "mixup_alpha", "cutmix_alpha", "label_smoothing", "loss", "early_stop", "class_weight", "sampling", "sampling_file", "random_seed", "precision", "channels_last", "on_nan", "max_nan", "audit_param", "compile", "display", "display_epoch", "test_interval", "test_epoch", "test_iter", "test_batch_size", "snapshot", "snapshot_epoch", "data", "net")
    class OnNan(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STOP: _ClassVar[Solver.OnNan]
        SKIP: _ClassVar[Solver.OnNan]
        ROLLBACK: _ClassVar[Solver.OnNan]
    STOP: Solver.OnNan
    SKIP: Solver.OnNan
    ROLLBACK: Solver.OnNan
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    BASE_LR_FIELD_NUMBER: _ClassVar[int]
    LR_POLICY_FIELD_NUMBER: _ClassVar[int]
    POWER_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    STEPSIZE_FIELD_NUMBER: _ClassVar[int]
    STEPSIZE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEPVALUE_FIELD_NUMBER: _ClassVar[int]
    STEPVALUE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LR_ITER_FIELD_NUMBER: _ClassVar[int]
    LR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WARMUP_ITER_FIELD_NUMBER: _ClassVar[int]
    WARMUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WARMUP_START_LR_FIELD_NUMBER: _ClassVar[int]
    DECAY_FROM_FIELD_NUMBER: _ClassVar[int]
    POLICY_START_ITER_FIELD_NUMBER: _ClassVar[int]
    POLICY_START_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LR_BATCH_FIELD_NUMBER: _ClassVar[int]
    END_LR_FIELD_NUMBER: _ClassVar[int]
    START_LR_FIELD_NUMBER: _ClassVar[int]
    PEAK_ITER_FIELD_NUMBER: _ClassVar[int]
    PEAK_EPOCH_FIELD_NUMBER: _ClassVar[int]
    KNOT_FIELD_NUMBER: _ClassVar[int]
    PLATEAU_WINSIZE_FIELD_NUMBER: _ClassVar[int]
    PLATEAU_WINSIZE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_LOSS_FIELD_NUMBER: _ClassVar[int]
    MAX_ITER_FIELD_NUMBER: _ClassVar[int]
    MAX_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    ITER_SIZE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_POLICY_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM2_FIELD_NUMBER: _ClassVar[int]
    RMS_DECAY_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    REGULARIZATION_TYPE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_LR_AUTO_FIELD_NUMBER: _ClassVar[int]
    LOCAL_GW_RATIO_FIELD_NUMBER: _ClassVar[int]
    LOCAL_LR_PASSES_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FORM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_POLICY_FIELD_NUMBER: _ClassVar[int]
    CLIP_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    EMA_DECAY_FIELD_NUMBER: _ClassVar[int]
    EMA_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    COMPRESS_PARAM_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SOLVERSTATE_FIELD_NUMBER: _ClassVar[int]
    FREEZE_FIELD_NUMBER: _ClassVar[int]
    SYNC_PARAM_FIELD_NUMBER: _ClassVar[int]
    CARRY_FIELD_NUMBER: _ClassVar[int]
    TRANSFORM_PARAM_FIELD_NUMBER: _ClassVar[int]
    TEST_TRANSFORM_PARAM_FIELD_NUMBER: _ClassVar[int]
    MIXUP_ALPHA_FIELD_NUMBER: _ClassVar[int]
    CUTMIX_ALPHA_FIELD_NUMBER: _ClassVar[int]
    LABEL_SMOOTHING_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOP_FIELD_NUMBER: _ClassVar[int]
    CLASS_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FILE_FIELD_NUMBER: _ClassVar[int]
    RANDOM_SEED_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_LAST_FIELD_NUMBER: _ClassVar[int]
    ON_NAN_FIELD_NUMBER: _ClassVar[int]
    MAX_NAN_FIELD_NUMBER: _ClassVar[int]
    AUDIT_PARAM_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TEST_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    TEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TEST_ITER_FIELD_NUMBER: _ClassVar[int]
    TEST_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    NET_FIELD_NUMBER: _ClassVar[int]
    clear: _containers.RepeatedScalarFieldContainer[str]
    base_lr: float
    lr_policy: str
    power: float
    gamma: float
    stepsize: int
    stepsize_epoch: float
    stepvalue: _containers.RepeatedScalarFieldContainer[int]
    stepvalue_epoch: _containers.RepeatedScalarFieldContainer[float]
    lr_iter: int
    lr_epoch: float
    warmup_iter: int
    warmup_epoch: float
    warmup_start_lr: float
    decay_from: DecayFrom
    policy_start_iter: int
    policy_start_epoch: float
    base_lr_batch: int
    end_lr: float
    start_lr: float
    peak_iter: int
    peak_epoch: float
    knot: _containers.RepeatedCompositeFieldContainer[Knot]
    plateau_winsize: _containers.RepeatedScalarFieldContainer[int]
    plateau_winsize_epoch: _containers.RepeatedScalarFieldContainer[float]
    average_loss: int
    max_iter: int
    max_epoch: float
    batch_size: int
    device_batch_size: int
    iter_size: int
    type: str
    momentum: float
    momentum_policy: bool
    momentum2: float
    rms_decay: float
    delta: float
    regularization_type: str
    local_lr_auto: bool
    local_gw_ratio: float
    local_lr_passes: int
    momentum_form: MomentumForm
    weight_decay: float
    weight_decay_policy: bool
    clip_gradients: float
    ema_decay: float
    ema_interval: int
    param: _containers.RepeatedCompositeFieldContainer[ParamSpec]
    compress_param: CompressionParameter
    model: Model
    weights: WeightsParameter
    solverstate: str
    freeze: _containers.RepeatedScalarFieldContainer[str]
    sync_param: SyncParameter
    carry: Carry
    transform_param: TransformParameter
    test_transform_param: TransformParameter
    mixup_alpha: float
    cutmix_alpha: float
    label_smoothing: float
    loss: LossParameter
    early_stop: EarlyStopParameter
    class_weight: _containers.RepeatedScalarFieldContainer[float]
    sampling: Sampling
    sampling_file: str
    random_seed: int
    precision: Precision
    channels_last: bool
    on_nan: Solver.OnNan
    max_nan: int
    audit_param: AuditParameter
    compile: bool
    display: int
    display_epoch: float
    test_interval: int
    test_epoch: float
    test_iter: int
    test_batch_size: int
    snapshot: int
    snapshot_epoch: float
    data: StageData
    net: str
    def __init__(self, clear: _Optional[_Iterable[str]] = ..., base_lr: _Optional[float] = ..., lr_policy: _Optional[str] = ..., power: _Optional[float] = ..., gamma: _Optional[float] = ..., stepsize: _Optional[int] = ..., stepsize_epoch: _Optional[float] = ..., stepvalue: _Optional[_Iterable[int]] = ..., stepvalue_epoch: _Optional[_Iterable[float]] = ..., lr_iter: _Optional[int] = ..., lr_epoch: _Optional[float] = ..., warmup_iter: _Optional[int] = ..., warmup_epoch: _Optional[float] = ..., warmup_start_lr: _Optional[float] = ..., decay_from: _Optional[_Union[DecayFrom, str]] = ..., policy_start_iter: _Optional[int] = ..., policy_start_epoch: _Optional[float] = ..., base_lr_batch: _Optional[int] = ..., end_lr: _Optional[float] = ..., start_lr: _Optional[float] = ..., peak_iter: _Optional[int] = ..., peak_epoch: _Optional[float] = ..., knot: _Optional[_Iterable[_Union[Knot, _Mapping]]] = ..., plateau_winsize: _Optional[_Iterable[int]] = ..., plateau_winsize_epoch: _Optional[_Iterable[float]] = ..., average_loss: _Optional[int] = ..., max_iter: _Optional[int] = ..., max_epoch: _Optional[float] = ..., batch_size: _Optional[int] = ..., device_batch_size: _Optional[int] = ..., iter_size: _Optional[int] = ..., type: _Optional[str] = ..., momentum: _Optional[float] = ..., momentum_policy: bool = ..., momentum2: _Optional[float] = ..., rms_decay: _Optional[float] = ..., delta: _Optional[float] = ..., regularization_type: _Optional[str] = ..., local_lr_auto: bool = ..., local_gw_ratio: _Optional[float] = ..., local_lr_passes: _Optional[int] = ..., momentum_form: _Optional[_Union[MomentumForm, str]] = ..., weight_decay: _Optional[float] = ..., weight_decay_policy: bool = ..., clip_gradients: _Optional[float] = ..., ema_decay: _Optional[float] = ..., ema_interval: _Optional[int] = ..., param: _Optional[_Iterable[_Union[ParamSpec, _Mapping]]] = ..., compress_param: _Optional[_Union[CompressionParameter, _Mapping]] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., weights: _Optional[_Union[WeightsParameter, _Mapping]] = ..., solverstate: _Optional[str] = ..., freeze: _Optional[_Iterable[str]] = ..., sync_param: _Optional[_Union[SyncParameter, _Mapping]] = ..., carry: _Optional[_Union[Carry, _Mapping]] = ..., transform_param: _Optional[_Union[TransformParameter, _Mapping]] = ..., test_transform_param: _Optional[_Union[TransformParameter, _Mapping]] = ..., mixup_alpha: _Optional[float] = ..., cutmix_alpha: _Optional[float] = ..., label_smoothing: _Optional[float] = ..., loss: _Optional[_Union[LossParameter, _Mapping]] = ..., early_stop: _Optional[_Union[EarlyStopParameter, _Mapping]] = ..., class_weight: _Optional[_Iterable[float]] = ..., sampling: _Optional[_Union[Sampling, str]] = ..., sampling_file: _Optional[str] = ..., random_seed: _Optional[int] = ..., precision: _Optional[_Union[Precision, str]] = ..., channels_last: bool = ..., on_nan: _Optional[_Union[Solver.OnNan, str]] = ..., max_nan: _Optional[int] = ..., audit_param: _Optional[_Union[AuditParameter, _Mapping]] = ..., compile: bool = ..., display: _Optional[int] = ..., display_epoch: _Optional[float] = ..., test_interval: _Optional[int] = ..., test_epoch: _Optional[float] = ..., test_iter: _Optional[int] = ..., test_batch_size: _Optional[int] = ..., snapshot: _Optional[int] = ..., snapshot_epoch: _Optional[float] = ..., data: _Optional[_Union[StageData, _Mapping]] = ..., net: _Optional[str] = ...) -> None: ...

class LossParameter(_message.Message):
    __slots__ = ("type", "normalization", "teacher", "temperature", "weight", "function", "args", "teacher_weights", "teacher_model")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SOFTMAX: _ClassVar[LossParameter.Type]
        BINARY: _ClassVar[LossParameter.Type]
        DISTILL: _ClassVar[LossParameter.Type]
        PYTHON: _ClassVar[LossParameter.Type]
    SOFTMAX: LossParameter.Type
    BINARY: LossParameter.Type
    DISTILL: LossParameter.Type
    PYTHON: LossParameter.Type
    class Normalization(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        BATCH_SIZE: _ClassVar[LossParameter.Normalization]
        FULL: _ClassVar[LossParameter.Normalization]
    BATCH_SIZE: LossParameter.Normalization
    FULL: LossParameter.Normalization
    TYPE_FIELD_NUMBER: _ClassVar[int]
    NORMALIZATION_FIELD_NUMBER: _ClassVar[int]
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    TEACHER_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TEACHER_MODEL_FIELD_NUMBER: _ClassVar[int]
    type: LossParameter.Type
    normalization: LossParameter.Normalization
    teacher: str
    temperature: float
    weight: float
    function: str
    args: str
    teacher_weights: bool
    teacher_model: bool
    def __init__(self, type: _Optional[_Union[LossParameter.Type, str]] = ..., normalization: _Optional[_Union[LossParameter.Normalization, str]] = ..., teacher: _Optional[str] = ..., temperature: _Optional[float] = ..., weight: _Optional[float] = ..., function: _Optional[str] = ..., args: _Optional[str] = ..., teacher_weights: bool = ..., teacher_model: bool = ...) -> None: ...

class EarlyStopParameter(_message.Message):
    __slots__ = ("metric", "patience_iter", "patience_epoch", "min_delta")
    class Metric(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TOP1: _ClassVar[EarlyStopParameter.Metric]
        LOSS: _ClassVar[EarlyStopParameter.Metric]
        MAP: _ClassVar[EarlyStopParameter.Metric]
    TOP1: EarlyStopParameter.Metric
    LOSS: EarlyStopParameter.Metric
    MAP: EarlyStopParameter.Metric
    METRIC_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_ITER_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MIN_DELTA_FIELD_NUMBER: _ClassVar[int]
    metric: EarlyStopParameter.Metric
    patience_iter: int
    patience_epoch: float
    min_delta: float
    def __init__(self, metric: _Optional[_Union[EarlyStopParameter.Metric, str]] = ..., patience_iter: _Optional[int] = ..., patience_epoch: _Optional[float] = ..., min_delta: _Optional[float] = ...) -> None: ...

class AuditParameter(_message.Message):
    __slots__ = ("proof_iter", "compare_iter", "replay_iter", "on_difference")
    class OnDifference(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STOP: _ClassVar[AuditParameter.OnDifference]
        ROLLBACK: _ClassVar[AuditParameter.OnDifference]
    STOP: AuditParameter.OnDifference
    ROLLBACK: AuditParameter.OnDifference
    PROOF_ITER_FIELD_NUMBER: _ClassVar[int]
    COMPARE_ITER_FIELD_NUMBER: _ClassVar[int]
    REPLAY_ITER_FIELD_NUMBER: _ClassVar[int]
    ON_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    proof_iter: int
    compare_iter: int
    replay_iter: int
    on_difference: AuditParameter.OnDifference
    def __init__(self, proof_iter: _Optional[int] = ..., compare_iter: _Optional[int] = ..., replay_iter: _Optional[int] = ..., on_difference: _Optional[_Union[AuditParameter.OnDifference, str]] = ...) -> None: ...

class Knot(_message.Message):
    __slots__ = ("iter", "epoch", "factor")
    ITER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    iter: int
    epoch: float
    factor: float
    def __init__(self, iter: _Optional[int] = ..., epoch: _Optional[float] = ..., factor: _Optional[float] = ...) -> None: ...

class ParamSpec(_message.Message):
    __slots__ = ("name", "kind", "lr_mult", "decay_mult", "adapt")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LR_MULT_FIELD_NUMBER: _ClassVar[int]
    DECAY_MULT_FIELD_NUMBER: _ClassVar[int]
    ADAPT_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: ParamKind
    lr_mult: float
    decay_mult: float
    adapt: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[ParamKind, str]] = ..., lr_mult: _Optional[float] = ..., decay_mult: _Optional[float] = ..., adapt: bool = ...) -> None: ...

class CompressionParameter(_message.Message):
    __slots__ = ("method", "ratio", "threshold", "qstates", "rank", "scope", "memory", "as_released", "start_iter", "start_epoch", "allow", "param")
    class Scope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LAYERWISE: _ClassVar[CompressionParameter.Scope]
        ENTIRE_MODEL: _ClassVar[CompressionParameter.Scope]
    LAYERWISE: CompressionParameter.Scope
    ENTIRE_MODEL: CompressionParameter.Scope
    class Memory(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[CompressionParameter.Memory]
        RESIDUAL: _ClassVar[CompressionParameter.Memory]
    NONE: CompressionParameter.Memory
    RESIDUAL: CompressionParameter.Memory
    METHOD_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    QSTATES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    AS_RELEASED_FIELD_NUMBER: _ClassVar[int]
    START_ITER_FIELD_NUMBER: _ClassVar[int]
    START_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    method: CompressionRule.Method
    ratio: float
    threshold: float
    qstates: int
    rank: int
    scope: CompressionParameter.Scope
    memory: CompressionParameter.Memory
    as_released: bool
    start_iter: int
    start_epoch: float
    allow: _containers.RepeatedScalarFieldContainer[CompressionRule.Method]
    param: _containers.RepeatedCompositeFieldContainer[CompressionRule]
    def __init__(self, method: _Optional[_Union[CompressionRule.Method, str]] = ..., ratio: _Optional[float] = ..., threshold: _Optional[float] = ..., qstates: _Optional[int] = ..., rank: _Optional[int] = ..., scope: _Optional[_Union[CompressionParameter.Scope, str]] = ..., memory: _Optional[_Union[CompressionParameter.Memory, str]] = ..., as_released: bool = ..., start_iter: _Optional[int] = ..., start_epoch: _Optional[float] = ..., allow: _Optional[_Iterable[_Union[CompressionRule.Method, str]]] = ..., param: _Optional[_Iterable[_Union[CompressionRule, _Mapping]]] = ...) -> None: ...

class CompressionRule(_message.Message):
    __slots__ = ("name", "kind", "method", "ratio", "threshold", "qstates", "rank", "memory")
    class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[CompressionRule.Method]
        TOP_K: _ClassVar[CompressionRule.Method]
        RANDOM_K: _ClassVar[CompressionRule.Method]
        THRESHOLD: _ClassVar[CompressionRule.Method]
        ADAPTIVE_THRESHOLD: _ClassVar[CompressionRule.Method]
        TERNGRAD: _ClassVar[CompressionRule.Method]
        QSGD: _ClassVar[CompressionRule.Method]
        TWO_BIT: _ClassVar[CompressionRule.Method]
        SIGN: _ClassVar[CompressionRule.Method]
        POWER_SGD: _ClassVar[CompressionRule.Method]
        INT8: _ClassVar[CompressionRule.Method]
        BF16: _ClassVar[CompressionRule.Method]
        FP16: _ClassVar[CompressionRule.Method]
        LOSSLESS: _ClassVar[CompressionRule.Method]
        AUTO: _ClassVar[CompressionRule.Method]
    NONE: CompressionRule.Method
    TOP_K: CompressionRule.Method
    RANDOM_K: CompressionRule.Method
    THRESHOLD: CompressionRule.Method
    ADAPTIVE_THRESHOLD: CompressionRule.Method
    TERNGRAD: CompressionRule.Method
    QSGD: CompressionRule.Method
    TWO_BIT: CompressionRule.Method
    SIGN: CompressionRule.Method
    POWER_SGD: CompressionRule.Method
    INT8: CompressionRule.Method
    BF16: CompressionRule.Method
    FP16: CompressionRule.Method
    LOSSLESS: CompressionRule.Method
    AUTO: CompressionRule.Method
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    QSTATES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: ParamKind
    method: CompressionRule.Method
    ratio: float
    threshold: float
    qstates: int
    rank: int
    memory: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[ParamKind, str]] = ..., method: _Optional[_Union[CompressionRule.Method, str]] = ..., ratio: _Optional[float] = ..., threshold: _Optional[float] = ..., qstates: _Optional[int] = ..., rank: _Optional[int] = ..., memory: bool = ...) -> None: ...

class SyncParameter(_message.Message):
    __slots__ = ("method", "replicas", "rule", "period", "alpha", "start", "momentum", "outer", "max_staleness", "servers")
    class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LOCAL: _ClassVar[SyncParameter.Method]
        DILOCO: _ClassVar[SyncParameter.Method]
        ASYNC: _ClassVar[SyncParameter.Method]
    LOCAL: SyncParameter.Method
    DILOCO: SyncParameter.Method
    ASYNC: SyncParameter.Method
    class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CONSTANT: _ClassVar[SyncParameter.Rule]
        QSR: _ClassVar[SyncParameter.Rule]
    CONSTANT: SyncParameter.Rule
    QSR: SyncParameter.Rule
    class Start(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WARMUP_END: _ClassVar[SyncParameter.Start]
        STAGE_START: _ClassVar[SyncParameter.Start]
    WARMUP_END: SyncParameter.Start
    STAGE_START: SyncParameter.Start
    class Momentum(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KEEP: _ClassVar[SyncParameter.Momentum]
        AVERAGE: _ClassVar[SyncParameter.Momentum]
    KEEP: SyncParameter.Momentum
    AVERAGE: SyncParameter.Momentum
    METHOD_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    OUTER_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    method: SyncParameter.Method
    replicas: int
    rule: SyncParameter.Rule
    period: int
    alpha: float
    start: SyncParameter.Start
    momentum: SyncParameter.Momentum
    outer: OuterParameter
    max_staleness: int
    servers: int
    def __init__(self, method: _Optional[_Union[SyncParameter.Method, str]] = ..., replicas: _Optional[int] = ..., rule: _Optional[_Union[SyncParameter.Rule, str]] = ..., period: _Optional[int] = ..., alpha: _Optional[float] = ..., start: _Optional[_Union[SyncParameter.Start, str]] = ..., momentum: _Optional[_Union[SyncParameter.Momentum, str]] = ..., outer: _Optional[_Union[OuterParameter, _Mapping]] = ..., max_staleness: _Optional[int] = ..., servers: _Optional[int] = ...) -> None: ...

class OuterParameter(_message.Message):
    __slots__ = ("type", "base_lr", "momentum")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    BASE_LR_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    type: str
    base_lr: float
    momentum: float
    def __init__(self, type: _Optional[str] = ..., base_lr: _Optional[float] = ..., momentum: _Optional[float] = ...) -> None: ...

class WeightsParameter(_message.Message):
    __slots__ = ("file", "drop", "rename", "strict")
    FILE_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    RENAME_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    file: str
    drop: _containers.RepeatedScalarFieldContainer[str]
    rename: _containers.RepeatedCompositeFieldContainer[Rename]
    strict: bool
    def __init__(self, file: _Optional[str] = ..., drop: _Optional[_Iterable[str]] = ..., rename: _Optional[_Iterable[_Union[Rename, _Mapping]]] = ..., strict: bool = ...) -> None: ...

class Rename(_message.Message):
    __slots__ = ("to",)
    FROM_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    to: str
    def __init__(self, to: _Optional[str] = ..., **kwargs) -> None: ...

class Carry(_message.Message):
    __slots__ = ("momentum", "data", "residual")
    class Start(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ZERO: _ClassVar[Carry.Start]
        KEEP: _ClassVar[Carry.Start]
    ZERO: Carry.Start
    KEEP: Carry.Start
    class Position(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CONTINUE: _ClassVar[Carry.Position]
        RESTART: _ClassVar[Carry.Position]
    CONTINUE: Carry.Position
    RESTART: Carry.Position
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    momentum: Carry.Start
    data: Carry.Position
    residual: Carry.Start
    def __init__(self, momentum: _Optional[_Union[Carry.Start, str]] = ..., data: _Optional[_Union[Carry.Position, str]] = ..., residual: _Optional[_Union[Carry.Start, str]] = ...) -> None: ...

class TransformParameter(_message.Message):
    __slots__ = ("scale", "mirror", "crop_size", "mean_value", "pad", "random_aspect_ratio_param", "random_resize_param", "pad_mode", "random_resized_crop_param", "channel_order", "std_value", "cutout_size", "lighting_std", "color_jitter_param", "rand_augment_param", "trivial_augment", "rectangular", "crop_size_ramp_param", "python", "mean_file")
    class PadMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ZERO: _ClassVar[TransformParameter.PadMode]
        REFLECT: _ClassVar[TransformParameter.PadMode]
    ZERO: TransformParameter.PadMode
    REFLECT: TransformParameter.PadMode
    class ChannelOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        BGR: _ClassVar[TransformParameter.ChannelOrder]
        RGB: _ClassVar[TransformParameter.ChannelOrder]
    BGR: TransformParameter.ChannelOrder
    RGB: TransformParameter.ChannelOrder
    SCALE_FIELD_NUMBER: _ClassVar[int]
    MIRROR_FIELD_NUMBER: _ClassVar[int]
    CROP_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEAN_VALUE_FIELD_NUMBER: _ClassVar[int]
    PAD_FIELD_NUMBER: _ClassVar[int]
    RANDOM_ASPECT_RATIO_PARAM_FIELD_NUMBER: _ClassVar[int]
    RANDOM_RESIZE_PARAM_FIELD_NUMBER: _ClassVar[int]
    PAD_MODE_FIELD_NUMBER: _ClassVar[int]
    RANDOM_RESIZED_CROP_PARAM_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ORDER_FIELD_NUMBER: _ClassVar[int]
    STD_VALUE_FIELD_NUMBER: _ClassVar[int]
    CUTOUT_SIZE_FIELD_NUMBER: _ClassVar[int]
    LIGHTING_STD_FIELD_NUMBER: _ClassVar[int]
    COLOR_JITTER_PARAM_FIELD_NUMBER: _ClassVar[int]
    RAND_AUGMENT_PARAM_FIELD_NUMBER: _ClassVar[int]
    TRIVIAL_AUGMENT_FIELD_NUMBER: _ClassVar[int]
    RECTANGULAR_FIELD_NUMBER: _ClassVar[int]
    CROP_SIZE_RAMP_PARAM_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    MEAN_FILE_FIELD_NUMBER: _ClassVar[int]
    scale: float
    mirror: bool
    crop_size: int
    mean_value: _containers.RepeatedScalarFieldContainer[float]
    pad: int
    random_aspect_ratio_param: RandomAspectRatioParameter
    random_resize_param: RandomResizeParameter
    pad_mode: TransformParameter.PadMode
    random_resized_crop_param: RandomResizedCropParameter
    channel_order: TransformParameter.ChannelOrder
    std_value: _containers.RepeatedScalarFieldContainer[float]
    cutout_size: int
    lighting_std: float
    color_jitter_param: bool
    rand_augment_param: RandAugmentParameter
    trivial_augment: bool
    rectangular: bool
    crop_size_ramp_param: CropSizeRampParameter
    python: str
    mean_file: str
    def __init__(self, scale: _Optional[float] = ..., mirror: bool = ..., crop_size: _Optional[int] = ..., mean_value: _Optional[_Iterable[float]] = ..., pad: _Optional[int] = ..., random_aspect_ratio_param: _Optional[_Union[RandomAspectRatioParameter, _Mapping]] = ..., random_resize_param: _Optional[_Union[RandomResizeParameter, _Mapping]] = ..., pad_mode: _Optional[_Union[TransformParameter.PadMode, str]] = ..., random_resized_crop_param: _Optional[_Union[RandomResizedCropParameter, _Mapping]] = ..., channel_order: _Optional[_Union[TransformParameter.ChannelOrder, str]] = ..., std_value: _Optional[_Iterable[float]] = ..., cutout_size: _Optional[int] = ..., lighting_std: _Optional[float] = ..., color_jitter_param: bool = ..., rand_augment_param: _Optional[_Union[RandAugmentParameter, _Mapping]] = ..., trivial_augment: bool = ..., rectangular: bool = ..., crop_size_ramp_param: _Optional[_Union[CropSizeRampParameter, _Mapping]] = ..., python: _Optional[str] = ..., mean_file: _Optional[str] = ...) -> None: ...

class CropSizeRampParameter(_message.Message):
    __slots__ = ("start_size", "start_epoch", "end_epoch", "multiple")
    START_SIZE_FIELD_NUMBER: _ClassVar[int]
    START_EPOCH_FIELD_NUMBER: _ClassVar[int]
    END_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    start_size: int
    start_epoch: float
    end_epoch: float
    multiple: int
    def __init__(self, start_size: _Optional[int] = ..., start_epoch: _Optional[float] = ..., end_epoch: _Optional[float] = ..., multiple: _Optional[int] = ...) -> None: ...

class RandomResizedCropParameter(_message.Message):
    __slots__ = ("min_area_ratio", "max_area_ratio", "min_aspect_ratio", "max_aspect_ratio", "max_attempt", "resize_param")
    MIN_AREA_RATIO_FIELD_NUMBER: _ClassVar[int]
    MAX_AREA_RATIO_FIELD_NUMBER: _ClassVar[int]
    MIN_ASPECT_RATIO_FIELD_NUMBER: _ClassVar[int]
    MAX_ASPECT_RATIO_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESIZE_PARAM_FIELD_NUMBER: _ClassVar[int]
    min_area_ratio: float
    max_area_ratio: float
    min_aspect_ratio: float
    max_aspect_ratio: float
    max_attempt: int
    resize_param: ResizeParameter
    def __init__(self, min_area_ratio: _Optional[float] = ..., max_area_ratio: _Optional[float] = ..., min_aspect_ratio: _Optional[float] = ..., max_aspect_ratio: _Optional[float] = ..., max_attempt: _Optional[int] = ..., resize_param: _Optional[_Union[ResizeParameter, _Mapping]] = ...) -> None: ...

class RandAugmentParameter(_message.Message):
    __slots__ = ("num_ops", "magnitude", "num_magnitude_bins")
    NUM_OPS_FIELD_NUMBER: _ClassVar[int]
    MAGNITUDE_FIELD_NUMBER: _ClassVar[int]
    NUM_MAGNITUDE_BINS_FIELD_NUMBER: _ClassVar[int]
    num_ops: int
    magnitude: int
    num_magnitude_bins: int
    def __init__(self, num_ops: _Optional[int] = ..., magnitude: _Optional[int] = ..., num_magnitude_bins: _Optional[int] = ...) -> None: ...

class RandomAspectRatioParameter(_message.Message):
    __slots__ = ("min_area_ratio", "max_area_ratio", "aspect_ratio_change", "max_attempt", "resize_param")
    MIN_AREA_RATIO_FIELD_NUMBER: _ClassVar[int]
    MAX_AREA_RATIO_FIELD_NUMBER: _ClassVar[int]
    ASPECT_RATIO_CHANGE_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESIZE_PARAM_FIELD_NUMBER: _ClassVar[int]
    min_area_ratio: float
    max_area_ratio: float
    aspect_ratio_change: float
    max_attempt: int
    resize_param: ResizeParameter
    def __init__(self, min_area_ratio: _Optional[float] = ..., max_area_ratio: _Optional[float] = ..., aspect_ratio_change: _Optional[float] = ..., max_attempt: _Optional[int] = ..., resize_param: _Optional[_Union[ResizeParameter, _Mapping]] = ...) -> None: ...

class RandomResizeParameter(_message.Message):
    __slots__ = ("min_size", "max_size", "resize_param")
    MIN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SIZE_FIELD_NUMBER: _ClassVar[int]
    RESIZE_PARAM_FIELD_NUMBER: _ClassVar[int]
    min_size: int
    max_size: int
    resize_param: ResizeParameter
    def __init__(self, min_size: _Optional[int] = ..., max_size: _Optional[int] = ..., resize_param: _Optional[_Union[ResizeParameter, _Mapping]] = ...) -> None: ...

class ResizeParameter(_message.Message):
    __slots__ = ("interp_mode",)
    class InterpMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LINEAR: _ClassVar[ResizeParameter.InterpMode]
        AREA: _ClassVar[ResizeParameter.InterpMode]
        NEAREST: _ClassVar[ResizeParameter.InterpMode]
        CUBIC: _ClassVar[ResizeParameter.InterpMode]
        LANCZOS4: _ClassVar[ResizeParameter.InterpMode]
        ANTIALIAS: _ClassVar[ResizeParameter.InterpMode]
        AUTO: _ClassVar[ResizeParameter.InterpMode]
    LINEAR: ResizeParameter.InterpMode
    AREA: ResizeParameter.InterpMode
    NEAREST: ResizeParameter.InterpMode
    CUBIC: ResizeParameter.InterpMode
    LANCZOS4: ResizeParameter.InterpMode
    ANTIALIAS: ResizeParameter.InterpMode
    AUTO: ResizeParameter.InterpMode
    INTERP_MODE_FIELD_NUMBER: _ClassVar[int]
    interp_mode: ResizeParameter.InterpMode
    def __init__(self, interp_mode: _Optional[_Union[ResizeParameter.InterpMode, str]] = ...) -> None: ...
