"""A link that is taken down between two hosts. What is counted: RESULTS.md."""

import random
from functools import partial
from pathlib import Path

from reliability import hangs
from reliability.trial import Trial


def trial(rng: random.Random, schedule: Path, out: Path) -> Trial:
    wait, side = rng.uniform(0.0, 2.0), rng.randrange(2)
    a, b = hangs.HOSTS
    with hangs.two_hosts(schedule, out) as started:
        hangs.wait_for_training(out, started, wait)
        cut = partial(hangs.ip, "-n", hangs.SPACES[side], "link", "set", hangs.DEVICES[side], "down")
        names = {0: f"rank 1 on {b} can't be reached", 1: f"rank 0 on {a} can't be reached"}
        done = hangs.harmed(started, cut, names)
    return hangs.named(done, "links cut", f"link down at host {side} {wait:.2f} s after the last stage began")
