"""A network from a file, killed and resumed, with two workers and with one: the bits of one that nothing happened to."""

import pytest
from nan_help import lives
from test_run_trees import ids

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


@pytest.mark.long
def test_killed_and_resumed_with_other_workers_it_ends_in_the_same_bits(base, tmp_path):
    schedule = base / "schedule" / "schedule.prototxt"
    lines = [MODEL if line.startswith("model {") else line for line in schedule.read_text().splitlines()]
    schedule.write_text("\n".join(["determinism: ELASTIC", *lines]))
    (base / "schedule" / "mynet.py").write_text(MYNET)
    lives(base / "schedule", tmp_path / "whole")
    lives(base / "schedule", tmp_path / "out", 2, kill_after=7)
    lives(base / "schedule", tmp_path / "out")
    whole, again = ids(tmp_path / "whole"), ids(tmp_path / "out")
    assert [again[end] for end in ("cyc1@5", "early@3")] == [whole[end] for end in ("cyc1@5", "early@3")]
