"""Reads a log of Caffe's as the strictest script in use does: fields are counted from the left as awk does."""

import re
from dataclasses import dataclass, field
from datetime import datetime

PREFIX = re.compile(r"([IWEF])(\d{4}) (\d{2}:\d{2}:\d{2}\.\d{6}) +(\d+) ([\w.]+):(\d+)\] ")
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
ITERATION = re.compile(r"Iteration (\d+)")
LOSS = re.compile(rf"Iteration (\d+), loss = ({NUMBER})$")
RATE = re.compile(rf"Iteration (\d+), lr = ({NUMBER})$")
TESTING = re.compile(r"Iteration (\d+), Testing net \(#(\d+)\)$")
OUTPUT = re.compile(
    rf"    (Train|Test) net output #(\d+): (\S+) = ({NUMBER})(?: \(\* ({NUMBER}) = ({NUMBER}) loss\))?$"
)
LOOKS_LIKE = re.compile(r"net output #|Testing net|\b(?:lr|loss) = ")
SNAPSHOT = re.compile(r"Snapshotting to binary proto file (\S+)$")


@dataclass
class CaffeLog:
    """`train` and `test`: rows of iteration, seconds since `Solving`, learning rate, and outputs by name."""

    train: list[dict[str, float]] = field(default_factory=list)
    test: list[dict[str, float]] = field(default_factory=list)
    snapshots: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


def parse(text: str, year: int) -> CaffeLog:
    log = CaffeLog()
    begun: datetime | None = None
    iteration, rate = -1, float("nan")
    for line in text.splitlines():
        prefix = PREFIX.match(line)
        assert prefix, f"not a line of glog's: {line!r}"
        moment = datetime.strptime(f"{year}{prefix[2]} {prefix[3]}", "%Y%m%d %H:%M:%S.%f")
        said = line[prefix.end() :]
        if said.startswith("Solving "):
            begun = begun or moment
        elif said in ("Optimization Done.", "Optimization stopped early."):
            log.ends.append(said)
        elif match := SNAPSHOT.match(said):
            log.snapshots.append(match[1])
        if found := ITERATION.search(said):
            iteration = int(found[1])
            assert begun, f"before any `Solving`: {line!r}"
        if match := RATE.match(said):
            rate = float(match[2])
            assert line.split()[8] == match[2], "awk takes field 9"
        elif match := LOSS.match(said):
            assert line.split()[8] == match[2], "awk takes field 9"
        elif match := OUTPUT.match(said):
            assert begun
            rows = log.train if match[1] == "Train" else log.test
            if match[2] == "0":
                rows.append({"NumIters": iteration, "Seconds": (moment - begun).total_seconds(), "LearningRate": rate})
            rows[-1][match[3]] = float(match[4])
            assert line.split()[10] == match[4], "awk takes field 11"
        elif not TESTING.match(said):
            assert not found and not LOOKS_LIKE.search(said), f"Caffe's scripts would misread {line!r}"
    return log
