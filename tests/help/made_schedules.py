"""Schedules made by hand for what is drawn of them, and snapshots for what is planned with them: no files are read."""

from collections.abc import Mapping

from facade import Model, Schedule, SnapshotRef, Solver, Source, Span, Stage, Transform, recipe

IMAGES = 1000
MODEL = Model(name="resnet_small", num_classes=10)
DATA = recipe.Data(train=Source(source="/d", path="/d", images=IMAGES))


def solver(**settings: object) -> Solver:
    """100 images of 1000 per iteration: ten iterations are an epoch."""
    common = {"batch_size": 100, "device_batch_size": 50, "random_seed": 1, "test_batch_size": 50, "weight_decay": 5e-5}
    common |= {"transform": Transform(mirror=True, crop_size=28), "momentum": 0.9, "epoch_iter": 10.0}
    return Solver(**{**common, **settings})


def stage(name: str, parent: str | None = None, parent_iter: int | None = None, **settings: object) -> Stage:
    enabled = bool(settings.pop("enabled", True))
    return Stage(
        name=name, parent=parent, parent_iter=parent_iter, enabled=enabled, model=MODEL, data=DATA,
        solver=solver(**settings), identity={}, origins={}, span=Span("schedule.prototxt", 1, 1),
    )  # fmt: skip


def schedule(*stages: Stage, name: str = "made") -> Schedule:
    return Schedule(name=name, seed=1, model=MODEL, data=DATA, stages=stages)


def steps() -> Schedule:
    """Two stages in a row: a warm-up into steps, then a collapse with more weight decay and without augmentation."""
    falls = {"lr_policy": "multistep", "gamma": 0.1, "stepvalue": (60, 90), "max_iter": 120, "warmup_iter": 10}
    collapse = {"lr_policy": "poly", "power": 2.0, "max_iter": 40, "transform": Transform(crop_size=28)}
    return schedule(
        stage("main", base_lr=0.4, **falls),
        stage("collapse", "main", base_lr=0.02, weight_decay=2e-4, **collapse),
        name="steps",
    )


def branches() -> Schedule:
    """A constant trunk and three cooldowns, the last of which is not enabled: warmup-stable-decay."""
    cool = {"base_lr": 0.5, "lr_policy": "poly", "power": 1.0, "max_iter": 200}
    return schedule(
        stage("main", base_lr=0.5, lr_policy="fixed", max_iter=1000, warmup_iter=50),
        stage("cool_a", "main", 400, **cool),
        stage("cool_b", "main", 700, **cool, weight_decay=1e-4),
        stage("cool_c", "main", **{**cool, "max_iter": 300}, enabled=False, batch_size=200),
        name="branches",
    )


def snapshot(
    of: Schedule, stage: str, iter: int, parent: str = "", attempt: int = 1, told_by: str = "solver.base_lr"
) -> SnapshotRef:
    """One as on disk. Its id is one of its tensors, which the fields `told_by` have made, and of its place."""
    identity: Mapping[str, str] = of.stage(stage).identity
    key = " ".join(identity[field] for field in told_by.split())
    return SnapshotRef(
        name=f"{stage}-{iter:08d}-a{attempt:04d}", stage=stage, iter=iter, attempt=attempt,
        id=f"{stage}@{iter}<{parent}>{key}", parent=parent, identity=identity,
    )  # fmt: skip
