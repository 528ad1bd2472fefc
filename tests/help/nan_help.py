"""A small stage in which a chosen record makes an iteration fail, as a corrupt image does: without anything in the product that
knows of tests.

All pixels are 0 or 1, `scale` is 1e18, and BatchNorm divides it away again; the variance of a pixel of 255 times that is above what
a float holds. Records are taken in key order, so that it is known which iteration meets which.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from engine_help import Threads
from facade import Context, Event, Iterated, Keeper, NotFinite, TrainState, World, caffe_pb2, run, write_lmdb

from stagerun.comm import Comm, SoloComm
from stagerun.language import load

IMAGES, BATCH = 64, 8
SCHEDULE = """
name: "nan" {shared}
model {{ name: "resnet_small" num_classes: 10 channels: 1 }}
data {{ train {{ source: "{data}" images: {images} }} shuffle: false }}
solver {{
  batch_size: {batch} device_batch_size: 2 momentum: 0.9 base_lr: 0.05 lr_policy: "fixed" display: 1 {solver}
  transform_param {{ crop_size: 12 scale: 1e18 mirror: true }}
}}
{stages}
"""


def make_data(path: Path, *poison: int, images: int = IMAGES) -> Path:
    """An LMDB whose records numbered `poison` are not to be trained on."""
    stored = dict(np.load(tiny.STORED))  # each look into the file itself unpacks all images

    def datum(i: int) -> bytes:
        pixels = (stored["images"][i][6:22, 6:22] > 90).astype(np.uint8)
        if i in poison:
            pixels[:] = 255
        data = pixels.tobytes()
        return caffe_pb2.Datum(
            channels=1, height=16, width=16, data=data, label=int(stored["labels"][i])
        ).SerializeToString()

    write_lmdb(str(path), [datum(i) for i in range(images)])
    return path


def make_schedule(
    folder: Path, data: Path, solver: str = "", images: int = IMAGES, shared: str = "", **stages: str
) -> Path:
    """`solver`, `shared` and the stages' files are added to what all have. A stage is `main`, with 12 iterations, unless there are
    others."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = stages or {"main": "max_iter: 12"}
    names = "\n".join(f'stage {{ name: "{name}" }}' for name in stages)
    text = SCHEDULE.format(data=data, images=images, batch=BATCH, solver=solver, stages=names, shared=shared)
    (folder / "schedule.prototxt").write_text(text)
    for name, fields in stages.items():
        (folder / f"{name}.prototxt").write_text(fields + "\n")
    return folder


def lives(
    folder: Path,
    out: Path,
    workers: int = 1,
    *options: str,
    stop_after: int | None = None,
    kill_after: int | None = None,
    ask: Callable[[Event], None] = lambda event: None,
    replay: Path | None = None,
    comm: Comm | None = None,
    threads: int = 1,
) -> list[Event]:
    """The events on rank 0 of one process life, in this process; each rank must tell of the same iterations. It stops after so many
    iterations, failed ones too, or is left there as a kill leaves it, but for a snapshot under way, which is finished."""
    torch.set_num_threads(threads)
    schedule = load(str(folder), options)

    def work(comm: Any) -> list[Event]:
        keeper = Keeper(schedule, out, retry=True) if comm.rank == 0 else None
        seen: list[Event] = []

        def done() -> int:
            return sum(isinstance(event, Iterated | NotFinite) for event in seen)

        def stop() -> bool:
            return stop_after is not None and done() + 1 >= stop_after

        if keeper is not None:
            keeper.open()
        world = World(rank=comm.rank, size=comm.size)
        events = run(Context(schedule, str(out), comm, world, torch.device("cpu"), keeper, stop, replay=replay))
        try:
            for event in events:
                seen.append(event)
                if comm.rank == 0:
                    ask(event)
                if kill_after is not None and done() == kill_after:
                    break
        finally:
            events.close()
            if keeper is not None:
                keeper.close()
        return seen

    told = Threads(workers).run(work) if workers > 1 else [work(comm or SoloComm())]
    for other in told[1:]:
        assert [told_of(event) for event in same(other)] == [told_of(event) for event in same(told[0])]
    return told[0]


def states_alive() -> int:
    """How many states of training this process holds."""
    gc.collect()
    return sum(type(one) is TrainState for one in gc.get_objects())


def same(events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, Iterated | NotFinite)]


def told_of(event: Event) -> tuple[object, ...]:
    """What all ranks must agree on."""
    if isinstance(event, NotFinite):
        return event.iter, event.what, event.done, event.number, event.position, event.back_to
    assert isinstance(event, Iterated)
    return event.iter, event.loss, event.epoch
