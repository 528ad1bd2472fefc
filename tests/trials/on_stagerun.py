"""stagerun: writes a solver folder, and runs the command in it. With `final`: reads what the run left."""

import json
import os
import sys
from pathlib import Path

import common
from common import CFG

ROOT = Path(__file__).resolve().parents[2]
SCHEDULE = """
name: "trial"
seed: 1
determinism: ELASTIC
keep_snapshots: {keep}
model {{ name: "net.py:build" args {{ width: {width} dropout: {dropout} norm: {norm} }} num_classes: 10 channels: 1 }}
data {{ train {{ source: "{data}/train_lmdb" images: {images} }} val {{ source: "{data}/val_lmdb" images: {val} }} shuffle: {shuffle} }}
solver {{
  batch_size: {total} device_batch_size: {device} base_lr: {lr} momentum: 0.9
  transform_param {{ {augment} mean_value: 73 std_value: 90 }}  test_transform_param {{ mean_value: 73 std_value: 90 }}
  test_batch_size: 20  test_epoch: 1  display: 1  snapshot: {every} {more}
}}
stage {{ name: "main" solver_param {{ max_epoch: {epochs} {policy} }} }}
{stages}
"""
BEST = 'stage { name: "more" from: "main@best" solver_param { lr_policy: "fixed" max_epoch: 1 } }'
POLICY = {
    "fixed": 'lr_policy: "fixed"',
    "cosine": 'lr_policy: "cosine"',
    "plateau": 'lr_policy: "plateau" gamma: 0.1 plateau_winsize: [5, 5, 5, 5, 5, 5, 5, 5]',
}


def write(folder, data):
    sys.path.insert(0, str(ROOT / "tests" / "help"))
    from facade import caffe_pb2, write_lmdb

    data.mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        images, labels = common.arrays(part, CFG.images, CFG.wrong_labels)
        records = [
            caffe_pb2.Datum(channels=1, height=28, width=28, data=i.tobytes(), label=int(n)).SerializeToString()
            for i, n in zip(images, labels, strict=True)
        ]
        if not (data / f"{part}_lmdb").exists():
            write_lmdb(str(data / f"{part}_lmdb"), records)
    more = [f"clip_gradients: {CFG.clip}"] if CFG.clip else []
    more += ["ema_decay: 0.9"] if CFG.ema else []
    more += [f"early_stop {{ metric: LOSS patience_epoch: {CFG.patience} }}"] if CFG.patience else []
    fields = dict(vars(CFG), shuffle=str(CFG.shuffle).lower(), norm=str(CFG.norm).lower(), data=data, val=common.VAL)
    fields["every"] = CFG.every or CFG.images // CFG.batch // CFG.accumulate
    fields |= {"policy": POLICY[CFG.schedule], "augment": "pad: 2 mirror: true crop_size: 28" if CFG.augment else ""}
    fields["stages"] = BEST if CFG.best else ""
    # With 2 workers at some time: an update is made of device batches, which are part of the recipe.
    fields |= {"total": CFG.batch * CFG.accumulate, "device": CFG.batch // 2 if CFG.elastic else CFG.batch}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "net.py").write_bytes((Path(__file__).parent / "net.py").read_bytes())
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(**fields, more=" ".join(more)))


def final():
    from safetensors.numpy import load_file

    events = [json.loads(line) for line in (Path(CFG.out) / "log.jsonl").read_text().splitlines()]
    loss = [event["loss"] for event in events if event["event"] == "Tested" and not event["ema"]][-1]
    end = max(Path(CFG.out).glob("snapshots/*"), key=lambda p: p.stat().st_mtime)
    state = load_file(end / ("ema.safetensors" if CFG.ema else "model.safetensors"))
    starts = [event["start"] for event in events if event["event"] == "StageStarted" and event["stage"] == "more"]
    common.save_final(state, loss=loss, best=starts[0].split("-")[1] if starts else "")


if __name__ == "__main__":
    if "final" in sys.argv:
        final()
    else:
        folder = Path(CFG.out).with_suffix(".schedule")
        write(folder, Path(CFG.out).with_suffix(".data"))
        os.environ["PYTHONPATH"] = str(ROOT)
        command = [
            "-m",
            "stagerun",
            "run",
            str(folder),
            "--out",
            CFG.out,
            "--nproc",
            str(CFG.processes),
            "--threads",
            "1",
        ]
        os.execv(sys.executable, [sys.executable, *command])
