"""Snapshots of networks that nobody trained, and small LMDBs, for tests of what is done with a snapshot afterwards."""

import json
from dataclasses import asdict
from pathlib import Path

import disks
import numpy as np
import torch
from click.testing import CliRunner, Result
from facade import AVERAGE, MOMENTUM, RECIPE, STATE, WEIGHTS, EnsembleTested, caffe_pb2, encode, recipe, write_lmdb
from torch import nn

from stagerun import store
from stagerun.cli import main
from stagerun.language import canonical, load
from stagerun.models import build

SCHEDULE = """name: "stored"
model {{ {model} }}
data {{
  train {{ source: "{data}" images: {images} }}
  {val}
}}
solver {{
  base_lr: 0.1 lr_policy: "fixed" max_iter: 3 batch_size: 4 device_batch_size: 2 test_batch_size: 5 {solver}
}}
stage {{ name: "only" }}
"""


def stagerun(*arguments: object) -> Result:
    """The command, in this process: importing torch takes longer than most of what is tested here."""
    result = CliRunner().invoke(main, [str(word) for word in arguments], prog_name="stagerun")
    assert result.exit_code != 70 and "Traceback" not in result.output, result.output
    return result


def make_lmdb(folder: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    """uint8 [N, height, width, channels] as raw Datum records."""

    def datum(image: np.ndarray, label: int) -> bytes:
        h, w, c = image.shape
        data = image.transpose(2, 0, 1).tobytes()
        return caffe_pb2.Datum(channels=c, height=h, width=w, data=data, label=int(label)).SerializeToString()

    write_lmdb(str(folder), [datum(i, n) for i, n in zip(images, labels, strict=True)])
    return folder


def pictures(n: int, height: int, width: int, channels: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.integers(0, 256, (n, height, width, channels), dtype=np.uint8), rng.integers(0, classes, n)


def make_schedule(folder: Path, model: str, solver: str, data: Path | None = None, images: int = 1) -> recipe.Schedule:
    """`data` is an LMDB of so many `images` for evaluations; None: the schedule has none."""
    folder.mkdir(parents=True, exist_ok=True)
    val = "" if data is None else f'val {{ source: "{data}" images: {images} }}'
    text = SCHEDULE.format(model=model, solver=solver, data=data or "/nowhere", images=images, val=val)
    (folder / "schedule.prototxt").write_text(text)
    (folder / "only.prototxt").write_text("")
    return load(folder)


def network(model: recipe.Model, seed: int) -> nn.Module:
    """Fresh weights, and BatchNorm statistics that are not those of a fresh network."""
    torch.manual_seed(seed)
    net = build(model)
    for name, buffer in net.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    return net.eval()


def make_snapshot(
    out: Path,
    schedule: recipe.Schedule,
    seed: int = 1,
    ema: int | None = None,
    iter: int = 3,
    number: int = 0,
    text: str = "",
) -> Path:
    """The directory of a snapshot of the only stage, or of that `number`, with the weights of `network(seed)`, and averaged ones of seed `ema`."""
    stage = schedule.stages[number]
    dtype = torch.float64 if stage.solver.precision is recipe.Precision.FP64 else torch.float32
    files = {
        WEIGHTS: encode(network(schedule.model, seed).to(dtype).state_dict()),
        MOMENTUM: encode({}),
        STATE: b'{"position": 12, "train_seconds": 1.0, "losses": []}',
        RECIPE: (text or canonical(schedule)).encode(),
    }
    if ema is not None:
        averaged = network(schedule.model, ema).to(dtype).state_dict()
        files[AVERAGE] = encode({k: t for k, t in averaged.items() if t.is_floating_point()})
    disk = store.LocalDisk()
    store.prepare(disk, out)
    about = {"identity": stage.identity, "environment": {"stagerun": "0.0.9"}}
    ref = disks.commit(disk, out, stage.name, iter, 1, files, content=[n for n in files if "." in n], **about)
    return out / "snapshots" / ref.name


def make_ensemble(out: Path, folder: Path, data: Path, images: int, rule: str, solver: str) -> list[Path]:
    """Snapshots of the stages `other` and `only`, and the result of `both` of them, evaluated on other images. The schedule is in `folder`."""
    make_schedule(folder, 'name: "resnet_small" num_classes: 10 channels: 1', solver, data, images)
    with open(folder / "schedule.prototxt", "a", encoding="utf-8") as file:
        file.write('stage { name: "other" from: "" solver: "only.prototxt" }')
        file.write(f'ensemble {{ name: "both" members: ["other", "only"] rule: {rule} }}')
    paths = [make_snapshot(out, load(folder), seed=5 + n, number=n) for n in (1, 0)]
    ids = {ref.stage: ref.id for ref in store.inventory(store.LocalDisk(), out).snapshots}
    tested = EnsembleTested(
        name="both", rule=rule, members=("other", "only"), images=23, top1=0.1, top5=0.5, loss=1.0, seconds=1.0, best="only",
        best_top1=0.1, mean_top1=0.1, snapshots=(ids["other"], ids["only"]), batch_norm_iter=0, tested_on="",
    )  # fmt: skip
    (out / "results" / "ensembles").mkdir(parents=True)
    (out / "results" / "ensembles" / "both.json").write_text(json.dumps(asdict(tested)))
    return paths
