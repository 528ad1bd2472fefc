"""The resolved schedule, as frozen values: every default applied, every duration in iterations. No I/O.

Only `language.resolve` makes it; everything else reads it. `protos/stagerun.proto` has the meaning, unit, range and default of a field, under
the same name (`proto.path_to`); the comments here only name differences. `images` and `settings` have the parts, which are exported here.
"""

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from stagerun.base.code import Sources
from stagerun.base.errors import Span
from stagerun.base.images import *  # noqa: F403
from stagerun.base.images import Data, Import, Source, each_once, message
from stagerun.base.proto.enums_pb2 import *  # noqa: F403
from stagerun.base.proto.enums_pb2 import Determinism, EnsembleRule, LossType
from stagerun.base.settings import *  # noqa: F403
from stagerun.base.settings import PROTO, EarlyStop, Metric, Model, Solver


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a field's value. `span`: None for a default, and for a value read from an LMDB."""

    text: str
    layer: str  # "default", "schedule", "stage", "sweep", "--set" or "LMDB"
    span: Span | None = None


# Facts of a snapshot's environment on which the bits don't depend.
IGNORED = {
    Determinism.FIXED: frozenset[str](),
    Determinism.ELASTIC: frozenset({"workers"}),
    Determinism.PORTABLE: frozenset({"workers", "processor", "processor flags"}),
}

# Keys in a stage's identity, besides its fields.
FROM_ITER = "from_iter"  # the parent's iteration that it starts from, or BEST; missing for the parent's end
FROM_WEIGHTS = "from_weights"  # EMA if it starts from the parent's averaged weights
FOLLOWED = "best_evaluation"  # a stage starts from its best evaluation, which its snapshots then record
BEST, EMA = "best", "ema"  # after the `@` of a start
# Prefix of the keys of the average that a stage starts from: its rule, shape and `batch_norm_iter`, the members' iterations, and, only in a
# plan, their ids.
AVERAGE = "average."
AVERAGE_OF = "average.of"
AVERAGE_MEMBERS = "average.members"
# The digest of the file in `Solver.start`. It is in `origins` of every stage with such a file, and in its identity once the file was read: a
# missing file makes nothing stale. For a .solverstate: `ITER DIGEST DIGEST`, of the state and of the weights.
WEIGHTS_DIGEST = "weights.sha256"
MEAN_DIGEST = "mean.sha256"  # likewise for the `mean_file` of training
FILES = frozenset({WEIGHTS_DIGEST, MEAN_DIGEST})
TEACHER = "teacher"  # the id of the teacher's snapshot; only in snapshots and plans
CLEARED = "clear."  # prefix of keys in `origins`: paths in `clear` that remove nothing
NET = "model.net"  # the digest of a Caffe net
CODE = "code."  # prefix: `code.mynet.py` has the file's digest, `code.timm` the package's version
ABSENT = "not installed"  # instead of a version
LAST_USED = "data.train.last_used"  # when the training set was used last, if the parent has another set
LABELS = "data.train.labels_digest"  # of images with several labels
TESTED_LABELS = "data.val.labels_digest"  # of the first validation set, only with `early_stop`, which depends on it
FLOAT_DATA = "float_data"  # instead of the name of a file with labels: the Datums have them


@message
class Stage:
    """A node of the tree. `parent`: None for a stage that starts from fresh weights; `parent_iter`: the parent's
    iteration that it starts from, None for the parent's end; `parent_at`: BEST, whose `parent_iter` only a plan knows, once
    the parent has ended, or EMA. `average`: the ensemble whose averaged weights it starts
    with; `parent` is then its last member, after which it continues the data stream. `group`: the block in
    schedule.prototxt if that makes several stages. A stage below a disabled one is disabled. `data`: the schedule's,
    with the images of this stage. `identity` maps each field that snapshots depend on, including shared ones
    (`solver.base_lr`, `model.name`, ...), to its canonical text; two stages with equal identity and equal parent
    snapshots train to the same bits. `origins` has the same keys, and the keys of the other fields of Solver."""

    name: str
    parent: str | None
    parent_iter: int | None = None
    parent_at: str | None = None
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
        """Return the start as in `from`: `main`, `main@7638`, an ensemble, '' for fresh weights."""
        at = self.parent_at if self.parent_iter is None else self.parent_iter
        return self.average or (self.parent or "") + (f"@{at}" if at is not None else "")

    @property
    def begins(self) -> int:
        """Return the iteration at which it begins: its `solverstate`'s, once that was read, else 0."""
        iter, *digests = self.identity.get(WEIGHTS_DIGEST, "").split() or [""]
        return int(iter) if digests and self.solver.solverstate is not None else 0

    def written(self, *fields: str) -> Span | None:
        """Return the span of the first of these fields (`solver.base_lr`) that is written; None if none is."""
        spans = (self.origins[field].span for field in fields if field in self.origins)
        return next(filter(None, spans), None)


@message
class Ensemble:
    """An ensemble. `members`: in order, groups and ranges resolved: `trunk` for a stage's end, `trunk@6000` for an earlier iteration.
    `shape`: of the decay that the average imitates (`schedule.policies`); None for the plain mean."""

    name: str
    members: tuple[str, ...]
    rule: EnsembleRule = PROTO
    batch_norm_iter: int = PROTO
    shape: str | None = None
    span: Span = field(default_factory=lambda: Span("", 1, 1))

    @property
    def averages(self) -> bool:
        """Return whether it averages the members' weights to one network."""
        return self.rule is EnsembleRule.WEIGHT_AVERAGE

    @property
    def points(self) -> tuple[tuple[str, int | None], ...]:
        """Return the members as stage and iteration, None for its end."""
        return tuple(point(member) for member in self.members)


def point(member: str) -> tuple[str, int | None]:
    """Parse a member of `Ensemble.members` to stage and iteration, None for its end. ValueError for other texts.

    >>> point("trunk@6000"), point("trunk")
    (('trunk', 6000), ('trunk', None))
    """
    stage, mark, iter = member.partition("@")
    return stage, int(iter) if mark else None


@message
class Schedule:
    """A schedule. `stages`: in running order, parents before children. `data`: shared; each stage has its images. `files`: (path, text) as read,
    Python files last. `sets`: the images of the LMDBs (`image_sets.set_of`) by path, as far as known. `class_sizes`: the training images of
    each class, by stage, as far as known and needed for sampling; ignored images belong to none. `imports`: the imports of class folders,
    by path (`imports.with_imports`)."""

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
        """Return the folder of the LMDB with the images of a source."""
        made = self.imports.get(source.path)
        return source.path if made is None else made.lmdb

    def class_sizes_of(self, stage: Stage) -> tuple[int, ...]:
        """Return the number of training images of each class of the stage; () if unknown or not needed."""
        return self.class_sizes.get(stage.name, ())

    @property
    def python(self) -> Sources:
        """Return the Python files that the schedule names, and the files they import."""
        folder = posixpath.dirname(self.files[0][0]) if self.files else ""
        python = [(path, text) for path, text in self.files if path.endswith(".py")]
        return Sources(folder, tuple((posixpath.relpath(path, folder or "."), text) for path, text in python))

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Return the origins of the shared fields, from the stage that shares most."""

        def overrides(stage: Stage) -> int:
            other_images = (stage.data.train, stage.data.val) != (self.data.train, self.data.val)
            return [stage.solver.model is not None, other_images].count(True)

        return min(self.stages, key=overrides).origins

    def ensemble(self, name: str) -> Ensemble:
        """Return the ensemble of that name. KeyError."""
        return {ensemble.name: ensemble for ensemble in self.ensembles}[name]

    def stage(self, name: str) -> Stage:
        """Return the stage of that name. KeyError."""
        return {stage.name: stage for stage in self.stages}[name]

    @property
    def few_classes(self) -> frozenset[str]:
        """Return the stages of up to five classes, whose top-5 is always 1 and is not shown."""
        return frozenset(stage.name for stage in self.stages if stage.model.num_classes <= 5)

    @property
    def training_sets(self) -> tuple[Source, ...]:
        """Return the training images of the enabled stages, each path once, in running order."""
        return each_once(data.train for data in self._of_enabled())

    @property
    def validation_sets(self) -> tuple[Source, ...]:
        """Return the validation images of the enabled stages, each path once."""
        return each_once(source for data in self._of_enabled() for source in data.val)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Return the training and then the validation images of the enabled stages."""
        return each_once((*self.training_sets, *self.validation_sets))

    def with_data(self, change: Callable[[Data], Data]) -> "Schedule":
        """Return the schedule with its `data` and every stage's changed."""
        stages = tuple(replace(stage, data=change(stage.data)) for stage in self.stages)
        return replace(self, data=change(self.data), stages=stages)

    def _of_enabled(self) -> list[Data]:
        return [stage.data for stage in self.stages if stage.enabled] or [self.data]

    def changes_set(self, stage: Stage) -> bool:
        """Return whether a stage trains on other images than its parent."""
        return stage.parent is not None and not stage.data.train.same(self.stage(stage.parent).data.train)

    def teacher_model(self, stage: Stage) -> Model | None:
        """Return the network of the stage's teacher; None without one. A teacher that is left out is assumed to be like the stage."""
        loss = stage.solver.loss
        if loss is None or loss.type is not LossType.DISTILL:
            return None
        taught = next((other.model for other in self.stages if other.name == loss.teacher), None)
        return taught or stage.model

    def start_iter(self, stage: Stage) -> int:
        """Return the parent's updates before the stage's start; 0 for fresh weights."""
        if stage.parent is None:
            return 0
        return self.stage(stage.parent).solver.max_iter if stage.parent_iter is None else stage.parent_iter

    def branch_points(self, name: str) -> tuple[int, ...]:
        """Return the iterations of a stage, before its end, from which another stage starts, or that an ensemble uses, ascending."""
        last = self.stage(name).solver.max_iter
        points = {(s.parent, s.parent_iter) for s in self.stages}
        points |= {point for ensemble in self.ensembles for point in ensemble.points}
        return tuple(sorted(iter for stage, iter in points if stage == name and iter is not None and iter < last))

    def saved_at(self, name: str) -> tuple[int, ...]:
        """Return the `branch_points`, and each evaluation of a stage whose best one another stage starts from."""
        solver, points = self.stage(name).solver, self.branch_points(name)
        if not self.best_of(name) or not solver.test_interval:
            return points
        return tuple(sorted({*points, *range(solver.test_interval, solver.max_iter, solver.test_interval)}))

    def best_of(self, name: str) -> list[str]:
        """Return the stages that start from the best evaluation of a stage."""
        return [stage.name for stage in self.stages if (stage.parent, stage.parent_at) == (name, BEST)]

    def followed(self, stage: Stage) -> EarlyStop | None:
        """Return the rule that finds the best evaluation of a stage, if that counts: its `early_stop`, or one that never ends it."""
        never = EarlyStop(metric=Metric.TOP1, patience_iter=1 << 60)
        return stage.solver.early_stop or (never if self.best_of(stage.name) else None)
