"""timm's `train.py`, as its documentation says: `--resume last.pth.tar`, `--model-ema`. It always shuffles: in rows that aren't about
the order or the evaluation of images, the training images are copies of one."""

import csv
import os
import runpy
import sys
from pathlib import Path

import common
import net
from common import CFG

OUT = Path(CFG.out)
SCHEDULES = {
    "fixed": "--sched step --decay-epochs 1000",
    "cosine": "--sched cosine --sched-on-updates",
    "plateau": "--sched plateau --patience-epochs 2",
}


def trial_net(pretrained=False, **kwargs):
    return net.build(width=CFG.width, dropout=CFG.dropout, norm=CFG.norm)


def write(data):
    from PIL import Image

    for part in ("train", "val"):
        images, labels = common.arrays(part, CFG.images, CFG.wrong_labels)
        for i in range(len(images)):
            chosen = i if part == "val" or CFG.shuffle else 0
            folder = data / part / str(labels[chosen])
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[chosen]).save(folder / f"{i:03}.png")
    (data / "classes.txt").write_text("".join(f"{c}\n" for c in range(10)))


def command():
    last, data = OUT / "run" / "last.pth.tar", OUT.with_suffix(".data")
    if not data.exists():
        write(data)
    words = f"""--data-dir {data} --train-split train --val-split val --class-map {data}/classes.txt --model trial_net
        --num-classes 10 --in-chans 1 --input-img-mode L --input-size 1 28 28 --mean 0.286 --std 0.353 --crop-pct 1 --device cpu
        --batch-size {CFG.batch // CFG.processes} --validation-batch-size 20 --epochs {CFG.epochs} --lr {CFG.lr} --weight-decay 0
        --warmup-epochs 0 --min-lr 0 {SCHEDULES[CFG.schedule]} --smoothing 0 --workers 1 --seed {common.TORCH_SEED}
        --output {OUT} --experiment run --checkpoint-hist {CFG.keep} --eval-metric loss
        --grad-accum-steps {CFG.accumulate}""".split()
    words += ["--scale", "0.8", "1", "--color-jitter", "0"] if CFG.augment else ["--no-aug"]
    words += ["--clip-grad", str(CFG.clip)] if CFG.clip else []
    words += ["--model-ema", "--model-ema-decay", "0.9"] if CFG.ema else []
    return words + (["--resume", str(last)] if last.exists() else [])


def final():
    import torch

    state = torch.load(OUT / "run" / "last.pth.tar", weights_only=False)
    weights = dict(state["state_dict"])
    if CFG.ema:
        weights |= {f"ema.{k}": v for k, v in state["state_dict_ema"].items()}
    best = torch.load(OUT / "run" / "model_best.pth.tar", weights_only=False)["epoch"]
    with (OUT / "run" / "summary.csv").open() as rows:
        loss = float(list(csv.DictReader(rows))[-1]["eval_loss"])
    common.save_final(weights, loss=loss, best=str(best))


if __name__ == "__main__":
    if "final" in sys.argv:
        final()
    else:
        common.start_processes(sys.argv[0])
        import torch

        for name in ("nms", "qnms"):  # the wheel's extension doesn't load beside a CPU build of torch
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from timm.models import register_model

        torch.set_num_threads(1)
        register_model(trial_net)
        common.trace_updates()
        sys.argv = ["train.py", *command()]
        runpy.run_path(os.environ.get("TIMM_TRAIN", f"{sys.prefix}/train.py"), run_name="__main__")
