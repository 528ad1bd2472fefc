"""What the trainers' scripts share: the settings of a trial, its images, its trace and its last weights."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import net
import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

TORCH_SEED = 1
CFG = SimpleNamespace(**json.loads(os.environ.get("TRIAL", "{}")))
STORED = Path(__file__).resolve().parents[1] / "golden" / "fashion_9664.npz"
VAL = 101  # uneven for batches of 20, and for two processes


def arrays(part, images=200, wrong_labels=False):
    """Images of 28 pixels and labels. Training on wrong labels makes the validation loss grow."""
    stored = np.load(STORED)
    first, last = (0, images) if part == "train" else (800, 800 + VAL)
    labels = stored["labels"][first:last].astype(np.int64)
    return stored["images"][first:last], (labels + 1) % 10 if wrong_labels and part == "train" else labels


class Images(torch.utils.data.Dataset):
    """Each image as a tensor, in training cropped and mirrored at random where the trial says so."""

    def __init__(self, part):
        images, self.labels = arrays(part, CFG.images, CFG.wrong_labels)
        self.images = (torch.from_numpy(images).float()[:, None] - 73) / 90
        self.augment = CFG.augment and part == "train"

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        x = self.images[i]
        if self.augment:
            top, left, mirror = (int(torch.randint(n, ())) for n in (5, 5, 2))
            x = torch.nn.functional.pad(x, (2, 2, 2, 2))[:, top : top + 28, left : left + 28].flip([2] * mirror)
        return x, int(self.labels[i])


def build():
    torch.set_num_threads(1)
    return net.build(width=CFG.width, dropout=CFG.dropout, norm=CFG.norm)


def updates():
    return CFG.epochs * CFG.images // CFG.batch // CFG.accumulate


def trace_updates():
    """Trace the learning rate of every update of torch's optimizers."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        register_optimizer_step_pre_hook(lambda o, *_: net.say(lr=float(o.param_groups[0]["lr"])))


def save_final(state, **more):
    """Write the last weights for the runner, and what else it compares."""
    if int(os.environ.get("RANK", 0)) == 0 and int(os.environ.get("LOCAL_RANK", 0)) == 0:
        np.savez(Path(CFG.out).with_suffix(".npz"), **{k: np.asarray(v) for k, v in state.items()})
        Path(CFG.out).with_suffix(".json").write_text(json.dumps(more))


def start_processes(script, *arguments):
    """Become torchrun where the trial wants several processes and this is none of them."""
    if CFG.processes > 1 and "RANK" not in os.environ:
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            str(CFG.processes),
            "--master_port",
            os.environ["MASTER_PORT"],
        ]
        os.execv(sys.executable, [sys.executable, *torchrun, script, *arguments])
