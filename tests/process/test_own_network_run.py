"""A network from a file in five stages, killed and resumed, with two workers and with one: the bits of one that nothing happened to."""

import random
from pathlib import Path

import processes
import pytest
import small
import tiny

from stagerun import store

# Dropout, a BatchNorm with a forward pass of its own, and one weight that is used twice.
MYNET = """
import torch.nn.functional as F
from torch import nn

class Act(nn.BatchNorm2d):
    def forward(self, x):
        return F.relu(super().forward(x))

class Net(nn.Module):
    def __init__(self, channels, num_classes, width, dropout):
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, 2, 1, bias=False)
        self.norm1 = Act(width)
        self.conv = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width, momentum=0.2)
        self.norm3 = Act(width, momentum=0.2)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        x = self.norm1(self.first(x))
        x = x + self.norm2(self.conv(x))
        x = self.norm3(F.max_pool2d(self.conv(x), 2))
        return self.fc(self.dropout(x.mean((2, 3))))

def build(num_classes, channels, width, dropout):
    return Net(channels, num_classes, width, dropout)
"""
MODEL = 'model { name: "mynet.py:build" num_classes: 10 channels: 1 args { width: 16 dropout: 0.3 } }'
ALL = ["init", "cyc1", "cyc2", "cyc3", "collapse"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/, schedule/, and its output whole/, of one worker that nothing happened to."""
    base = tmp_path_factory.mktemp("own")
    tiny.make_data(base / "data")
    schedule = tiny.make_schedule(base / "schedule", base / "data") / "schedule.prototxt"
    lines = ["determinism: ELASTIC"]
    lines += [MODEL if line.startswith("model {") else line for line in schedule.read_text().splitlines()]
    schedule.write_text("\n".join(lines))
    (base / "schedule" / "mynet.py").write_text(MYNET)
    done = small.run(base / "schedule", base / "whole")
    assert done.returncode == 0, done.stderr
    return base


def ends(out: Path) -> dict[str, str]:
    """The ids of the last snapshots."""
    found = {ref.stage: ref for ref in sorted(store.inventory(store.LocalDisk(), out).snapshots, key=lambda r: r.iter)}
    return {stage: found[stage].id for stage in ALL}


@pytest.mark.long
def test_killed_and_resumed_with_other_workers_it_ends_in_the_same_bits(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = small.start(base / "schedule", out, nproc=2)
    small.wait_for(out / "snapshots" / "init-00000006-a0001" / "MANIFEST.json", run)
    processes.kill(run, "all", random.Random(1))
    run.wait()
    done = small.run(base / "schedule", out, nproc=1)
    assert done.returncode == 0, done.stderr
    assert "BIT-EXACT" in done.stdout
    assert ends(out) == ends(base / "whole")
