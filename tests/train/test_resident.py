"""Images that stay on the device: batches made there are those of the loader, byte for byte."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import processes
import pytest
import small
import torch
from engine_help import CPU, SOLVER

from stagerun.base import order
from stagerun.base.errors import DataError, UsageError
from stagerun.base.events import Note
from stagerun.base.order import EveryRecord, Sampled
from stagerun.base.recipe import (
    Cache,
    PadMode,
    Transform,
)
from stagerun.base.shares import shares
from stagerun.comm import SoloComm
from stagerun.data.loader import Batch, Loader
from stagerun.data.records import ListRecords
from stagerun.data.transform import draw_places
from stagerun.data.write import write_lmdb
from stagerun.engine.feed import Resident, read_all
from stagerun.language.proto import caffe_pb2
from stagerun.train import resident as runner

RECORDS, HEIGHT, WIDTH = 37, 14, 18


def datum(image: np.ndarray, label: int) -> bytes:
    channels = image.shape[2]
    data = np.ascontiguousarray(image.transpose(2, 0, 1)).tobytes()
    return caffe_pb2.Datum(
        channels=channels, height=image.shape[0], width=image.shape[1], data=data, label=label
    ).SerializeToString()


def pictures(channels: int = 3, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, (RECORDS, height, width, channels), dtype=np.uint8)


def records(channels: int = 3) -> ListRecords:
    return ListRecords([datum(image, i % 10) for i, image in enumerate(pictures(channels))])


def loader(param: Transform, channels: int = 3, train: bool = True, shuffle: bool = True, **more: object) -> Loader:
    return Loader(
        more.pop("records", None) or records(channels), param, train=train, channels=channels, num_classes=10,
        seed=SOLVER.random_seed, images=RECORDS, shuffle=shuffle, **more,
    )  # type: ignore[arg-type]  # fmt: skip


def whole(batches: Loader) -> Iterator[Batch]:
    for first in range(0, RECORDS, 8):
        yield batches.batch(first, min(8, RECORDS - first))


def filled(channels: int = 3) -> Resident:
    found = read_all(whole(loader(Transform(), channels, False, False)), RECORDS, CPU, lambda n: True, lambda: False)
    assert found is not None
    return found


CASES = {
    "as they are": Transform(),
    "mirror": Transform(mirror=True),
    "crop": Transform(crop_size=11, mirror=True),
    "cifar": Transform(pad=4, crop_size=14, mirror=True),
    "reflected": Transform(pad=4, pad_mode=PadMode.REFLECT, crop_size=14, mirror=True),
    "as far as it goes": Transform(pad=13, pad_mode=PadMode.REFLECT, crop_size=30),
    "wide": Transform(pad=20, crop_size=16, mirror=True),
    "not cropped": Transform(pad=2, mirror=True),
    "not cropped, reflected": Transform(pad=3, pad_mode=PadMode.REFLECT),
    "all": Transform(pad=2, crop_size=13, mirror=True, cutout_size=5, lighting_std=0.1),
    "cutout of all": Transform(cutout_size=9, mirror=True),
}


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_batches_are_the_loaders(case: str, shuffle: bool) -> None:
    """Over the end of an epoch, a batch of one among them."""
    param = CASES[case]
    source, resident = loader(param, shuffle=shuffle), filled()
    asked = [(0, 8), (8, 1), (30, 12), (5 * RECORDS - 3, 9), (10**9, 4)]
    solver = replace(SOLVER, transform=param)
    made = resident.batches(
        runner.cuts(solver, EveryRecord(solver.random_seed, len(resident.labels), shuffle), resident, asked),
        param.pad,
        param.pad_mode is PadMode.REFLECT,
    )
    for (position, count), batch in zip(asked, made, strict=True):
        expected = source.batch(position, count)
        assert batch.images.dtype == torch.uint8 and batch.images.is_contiguous()
        np.testing.assert_array_equal(batch.images.numpy(), expected.images)
        np.testing.assert_array_equal(batch.labels.numpy(), expected.labels)
        np.testing.assert_array_equal(batch.positions, expected.positions)
        for name in ("lighting", "cutout"):
            mine, theirs = getattr(batch, name), getattr(expected, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.dtype == theirs.dtype
                np.testing.assert_array_equal(mine, theirs)


def test_classes_in_shares_are_the_loaders_too() -> None:
    param, resident = CASES["cifar"], filled()
    sampled = Sampled(SOLVER.random_seed, resident.labels.numpy(), shares([Fraction(1)] * 10, RECORDS))
    made = resident.batches(
        runner.cuts(replace(SOLVER, transform=param), sampled, resident, [(3, 20)]), param.pad, False
    )
    expected = loader(param, shuffle=True, sampling=sampled).batch(3, 20)
    np.testing.assert_array_equal(next(made).images.numpy(), expected.images)


def test_an_image_too_small_is_told_as_the_loader_does() -> None:
    numbers = order.draws(1, np.arange(3), 4)
    with pytest.raises(DataError, match="too small for crop_size: 40"):
        draw_places(Transform(crop_size=40), numbers, HEIGHT, WIDTH)
    with pytest.raises(DataError, match="too small for pad: 14"):
        draw_places(Transform(pad=14, pad_mode=PadMode.REFLECT), numbers, HEIGHT, WIDTH)


# ---- filling


def test_images_of_other_sizes_are_refused() -> None:
    values = [datum(p, 0) for p in pictures()]
    values[9] = datum(pictures(height=15)[0], 0)
    source = loader(Transform(), train=False, shuffle=False, records=ListRecords(values))
    with pytest.raises(DataError, match=r"not of one size|others are"):
        read_all(whole(source), RECORDS, CPU, lambda n: True, lambda: False)
    values[8:16] = [datum(p, 0) for p in pictures(height=15)[:8]]  # a whole batch of them
    source = loader(Transform(), train=False, shuffle=False, records=ListRecords(values))
    with pytest.raises(DataError, match="not of one size"):
        read_all(whole(source), RECORDS, CPU, lambda n: True, lambda: False)


def test_nothing_is_kept_where_there_is_no_room_or_the_run_is_to_stop() -> None:
    asked: list[int] = []
    source = loader(Transform(), train=False, shuffle=False)
    assert read_all(whole(source), RECORDS, CPU, lambda n: bool(asked.append(n)), lambda: False) is None
    assert asked == [RECORDS * HEIGHT * WIDTH * 3]
    assert read_all(whole(source), RECORDS, CPU, lambda n: True, lambda: True) is None


def test_how_much_room_is_taken() -> None:
    assert runner.room(Cache.AUTO, 100, 800) and not runner.room(Cache.AUTO, 101, 800)
    assert runner.room(Cache.DEVICE, 800, 800)
    with pytest.raises(UsageError, match=r"take 900 B on each GPU, and 800 B are free"):
        runner.room(Cache.DEVICE, 900, 800)


def a_run(device: str, cache: Cache, param: Transform, values: list[bytes] | None = None) -> SimpleNamespace:
    """As much of a StageRun as `keep` looks at. Its device says that it is a GPU and is none."""
    images = SimpleNamespace(resident=(None, None), made=0)

    def whole_images(stage: object) -> Loader:
        images.made += 1
        return loader(Transform(), train=False, shuffle=False, records=ListRecords(values) if values else None)

    images.whole_images = whole_images
    data = SimpleNamespace(cache=cache, shuffle=True, train=SimpleNamespace(path="d", labels=None))
    return SimpleNamespace(
        stage=SimpleNamespace(
            solver=replace(SOLVER, transform=param), data=data, model=SimpleNamespace(net=None, num_classes=10)
        ),
        worker=SimpleNamespace(
            images=images,
            device=SimpleNamespace(type=device),
            stop=lambda: False,
            comm=SoloComm(),
        ),
    )


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory on the CPU in place of a GPU's."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**6, 10**6))
    real = runner.read_all
    monkeypatch.setattr(runner, "read_all", lambda batches, n, device, *rest: real(batches, n, CPU, *rest))


def kept(run: SimpleNamespace) -> tuple[Resident | None, list[Note]]:
    notes, making = [], runner.keep(run)  # type: ignore[arg-type]
    while True:
        try:
            notes.append(next(making))
        except StopIteration as done:
            return done.value, notes


@pytest.mark.parametrize("cache", [Cache.AUTO, Cache.DEVICE])
def test_a_set_that_fits_is_kept_once_for_all_stages(pretended_gpu: None, cache: Cache) -> None:
    run = a_run("cuda", cache, CASES["cifar"])
    first, notes = kept(run)
    assert first is not None and [n.text for n in notes] == ["the training images are kept on the GPU: 28.0 kB"]
    np.testing.assert_array_equal(first.images.numpy(), pictures())
    assert kept(run) == (first, []) and run.worker.images.made == 1
    run.stage.solver = replace(SOLVER, transform=Transform(trivial_augment=True))
    assert kept(run) == (None, []), "this stage's images come from the loader"


def test_a_bad_record_leaves_the_images_to_the_loader(pretended_gpu: None) -> None:
    """The loader stops at its turn, or takes another record that depends on the position."""
    values = [datum(p, 0) for p in pictures()]
    values[20] = caffe_pb2.Datum(data=b"\xff\xd8\xff nothing", encoded=True, label=1).SerializeToString()
    found, (note,) = kept(a_run("cuda", Cache.DEVICE, CASES["cifar"], values))
    assert found is None and note.warning and "00000020" in note.text


def test_images_of_several_sizes_are_a_mistake_only_where_they_are_to_be_kept(pretended_gpu: None) -> None:
    values = [datum(p, 0) for p in pictures()]
    values[9] = datum(pictures(height=15)[0], 0)
    assert kept(a_run("cuda", Cache.AUTO, CASES["cifar"], values)) == (None, [])
    with pytest.raises(DataError):
        kept(a_run("cuda", Cache.DEVICE, CASES["cifar"], values))


# Makes a run take its CPU for a GPU where it decides about `cache`.
PRETENDING = """
import sys, torch
from types import SimpleNamespace
from stagerun.train import resident, stage
keep, read_all, cpu = resident.keep, resident.read_all, torch.device("cpu")
torch.cuda.mem_get_info = lambda device: (10**9, 10**9)
resident.read_all = lambda batches, n, device, *rest: read_all(batches, n, cpu, *rest)
def pretend(run):
    its = run.worker
    worker = SimpleNamespace(schedule=its.schedule, images=its.images, stop=its.stop, comm=its.comm)
    worker.device = SimpleNamespace(type="cuda")
    return keep(SimpleNamespace(stage=run.stage, worker=worker))
stage.keep = pretend
from stagerun.cli import main
main()
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_run_with_resident_images_trains_the_same_bits(tmp_path: Path) -> None:
    """Two stages, of which the second's transform is another one; with all that goes with a batch."""
    values = [datum(p, i % 4) for i, p in enumerate(pictures(3, 16, 16))]
    write_lmdb(str(tmp_path / "data"), values)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "schedule.prototxt").write_text(RUN.format(data=tmp_path / "data", images=RECORDS))
    (tmp_path / "s" / "a.prototxt").write_text("mixup_alpha: 0.3\n")
    (tmp_path / "s" / "b.prototxt").write_text("transform_param { mirror: true scale: 0.01 }\n")
    loaded = small.run(tmp_path / "s", tmp_path / "loaded")
    assert loaded.returncode == 0, loaded.stdout + loaded.stderr
    words = ["run", tmp_path / "s", "--out", tmp_path / "kept", "--nproc", 1, "--threads", 1]
    kept = subprocess.run(
        [sys.executable, "-c", PRETENDING, *map(str, words)], capture_output=True, text=True, timeout=120
    )
    assert kept.returncode == 0, kept.stdout + kept.stderr
    assert kept.stdout.count("the training images are kept on the GPU: 28.4 kB") == 1
    assert processes.ends(tmp_path / "kept") == processes.ends(tmp_path / "loaded")


RUN = """
name: "kept"
model {{ name: "resnet_small" num_classes: 4 }}
data {{ train {{ source: "{data}" images: {images} }} }}
solver {{
  batch_size: 8 device_batch_size: 4 momentum: 0.9 base_lr: 0.02 lr_policy: "fixed" max_iter: 6
  transform_param {{
    pad: 3 pad_mode: REFLECT crop_size: 16 mirror: true scale: 0.02 mean_value: 110 cutout_size: 6 lighting_std: 0.1
  }}
}}
stage {{ name: "a" }}
stage {{ name: "b" }}
"""
