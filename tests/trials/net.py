"""The network of all trials in PyTorch, and what a trial does to a process when it gets a batch."""

import json
import os
import resource
import signal
import time
import zlib

import torch
from torch import nn

HOOKS = json.loads(os.environ.get("TRIAL_HOOKS", "{}"))
KIND = signal.SIGKILL
seen = 0  # images that this process has trained on


def say(**fields):
    """Append a line to the trial's trace."""
    if "trace" in HOOKS:
        line = json.dumps({"life": HOOKS["life"], "pid": os.getpid(), "at": time.time(), **fields}) + "\n"
        file = os.open(HOOKS["trace"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)


def at_batch(images):
    """Trace a batch, or kill this process, limit the size of its files, or return NaN, as the trial's hooks say."""
    global seen
    if seen >= HOOKS.get("kill_at", 1e9):
        os.kill(os.getpid(), KIND)
    if seen >= HOOKS.get("limit_at", 1e9):
        # A write past this size fails as on a full disk (EFBIG), or where the signal has its default action, it kills.
        if HOOKS["limit_kills"]:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (HOOKS["limit"], resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    time.sleep(HOOKS.get("slow", 0))
    say(ids=[zlib.crc32(image.numpy().tobytes()) for image in images.detach()])
    seen += len(images)
    return float("nan") if seen - len(images) == HOOKS.get("nan_at") else 1.0


class Net(nn.Module):
    def __init__(self, num_classes, channels, width, dropout, norm):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 2, 1, bias=not norm)
        self.bn1 = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(width, 2 * width, 3, 2, 1, bias=not norm)
        self.bn2 = nn.BatchNorm2d(2 * width) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, x):
        factor = at_batch(x) if self.training and len(x) > 2 else 1.0  # stagerun first tries a network on two images
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.fc(self.dropout(x.mean((2, 3)))) * factor


def build(num_classes=10, channels=1, width=8, dropout=0.0, norm=True):
    return Net(num_classes, channels, width, dropout, norm)
