"""The network of all trials in PyTorch, and what a trial does to a process when it gets a batch."""

import json
import os
import resource
import signal
import time
import zlib

from torch import nn

HOOKS = json.loads(os.environ.get("TRIAL_HOOKS", "{}"))
seen = 0  # images that this process has trained on


def say(**fields):
    """Append a line to the trial's trace."""
    if "trace" in HOOKS:
        file = os.open(HOOKS["trace"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, (json.dumps({"life": HOOKS["life"], **fields}) + "\n").encode())
        os.close(file)


def at_batch(images):
    """Trace a batch, or kill this process, limit the size of its files, or return NaN, as the trial's hooks say."""
    global seen
    if seen >= HOOKS.get("kill_at", 1e18):
        os.kill(os.getpid(), signal.SIGKILL)
    if seen >= HOOKS.get("limit_at", 1e18):
        # A write past this size fails as on a full disk (EFBIG), or where the signal has its default action, it kills.
        if HOOKS["limit_kills"]:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (HOOKS["limit"], resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    time.sleep(HOOKS.get("slow", 0))
    say(ids=[zlib.crc32(image.numpy().tobytes()) for image in images.detach()])
    seen += len(images)
    return float("nan") if seen - len(images) == HOOKS.get("nan_at") else 1.0


class Net(nn.Sequential):
    def forward(self, x):
        factor = at_batch(x) if self.training and len(x) > 2 else 1.0  # stagerun first tries a network on two images
        return super().forward(x) * factor


def build(num_classes=10, channels=1, width=8, dropout=0.0, norm=True):
    layers = []
    for inputs, outputs in ((channels, width), (width, 2 * width)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs) if norm else nn.Identity(), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * width, num_classes)]
    return Net(*layers, *head)
