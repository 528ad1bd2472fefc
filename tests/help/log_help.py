"""Made-up schedules and events for the tests of logs."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facade import Event, Inventory, Iterated, RunStarted, StageFinished, StageStarted, Tested

from stagerun.language import read
from stagerun.plan import Plan, make_plan

SCHEDULE = """
name: "tree"
seed: 7
model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 100 } val { source: "/d/val" images: 50 } }
solver { batch_size: 20 device_batch_size: 4 momentum: 0.9 display: 2 transform_param { crop_size: 28 } }
stage { name: "trunk" }
stage { name: "collapse" }
"""
TRUNK = 'base_lr: 0.5 lr_policy: "fixed" max_iter: 8 '
COLLAPSE = 'base_lr: 0.1 lr_policy: "poly" power: 2 max_iter: 4 weight_decay: 1e-3 warmup_iter: 1 '
BRANCH = 'stage { name: "early" from: "trunk" }'


def make(shared: str = SCHEDULE, **stages: str) -> Plan:
    """A trunk of 8 iterations or 1.6 epochs and a collapse of 4 or 0.8, and a stage `early` where `shared` has one."""
    texts = {"trunk": TRUNK, "collapse": COLLAPSE, "early": COLLAPSE, **stages}
    files = {"schedule.prototxt": shared.encode()} | {f"{n}.prototxt": t.encode() for n, t in texts.items()}
    return make_plan(read(files, "/s", []), Inventory())


def run_started(**changes: Any) -> RunStarted:
    whole = RunStarted(
        schedule="tree", out="out/tree", workers=2, device="cpu", threads=1, stages=("trunk", "collapse"),
        iterations=12, iterations_left=12, version="0",
    )  # fmt: skip
    return replace(whole, **changes)


def stage_started(stage: str, iter: int = 0, **changes: Any) -> StageStarted:
    whole = StageStarted(
        stage=stage, number=1, iter=iter, max_iter=8, start="seed 7", batch_size=20, device_batch_size=4
    )
    return replace(whole, **changes)


def iterated(stage: str, iter: int, **changes: Any) -> Iterated:
    whole = Iterated(
        stage=stage, iter=iter, epoch=0.0, lr=0.5, momentum=0.9, weight_decay=0.0, loss=2 + iter / 100, images=20, seconds=36.0
    )  # fmt: skip
    return replace(whole, **changes)


def evaluated(stage: str, iter: int, top1: float, **changes: Any) -> Tested:
    return replace(Tested(stage=stage, iter=iter, images=50, top1=top1, top5=0.9, loss=1.5, seconds=2.0), **changes)


def finished(stage: str, iterations: int, top1: float, train_seconds: float, **changes: Any) -> StageFinished:
    whole = StageFinished(
        stage=stage, iterations=iterations, epochs=1.6, first_lr=0.5, last_lr=0.5, weight_decay=0.0, augmentation="",
        loss=2.3, top1=top1, top5=0.9, test_loss=1.5, train_seconds=train_seconds, images_per_second=100.0,
        snapshot=f"{stage}-{iterations:08d}-a0001",
    )  # fmt: skip
    return replace(whole, **changes)


def trained(stage: str, iters: range) -> Iterator[Event]:
    for i in iters:
        yield iterated(stage, i)


def feed(sink: Any, *events: Event | Iterator[Event]) -> None:
    for event in events:
        for each in event if isinstance(event, Iterator) else [event]:
            sink(each)


# -- what was written, read back


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Steps and values as TensorBoard reads them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return [(e.step, round(e.value, 5)) for e in found.Scalars(tag)]


@contextmanager
def room(bytes: int) -> Iterator[None]:
    """No file may grow beyond so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
