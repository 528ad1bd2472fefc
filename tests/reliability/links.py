"""Each trial trains on two workers in network namespaces and on host names of their own, each watched on its own standard error, and
takes the link between them down at a random moment of training. Wrong: a rank that does not say, within its time-out and a second,
that the other one can't be reached and where that is; another exit code than 69; a process that is left.
"""

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from reliability import hangs
from reliability.trial import Scenario, Trial


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    schedule, out = hangs.prepared(folder), folder / "out"
    while True:
        shutil.rmtree(out, ignore_errors=True)
        yield trial(rng, schedule, out)


def trial(rng: random.Random, schedule: Path, out: Path) -> Trial:
    wait, side = rng.uniform(0.0, 2.0), rng.randrange(2)
    with hangs.namespaces() as net, hangs.two_hosts(net, schedule, out) as started:
        hangs.wait_for_training(out, started)
        time.sleep(wait)
        at = time.monotonic()
        net.cut(side)
        names = {0: f"rank 1 on {net.hosts[1]} can't be reached", 1: f"rank 0 on {net.hosts[0]} can't be reached"}
        seen = hangs.missed(dict(enumerate(started)), at, names)
        if not seen.wrong and not all(one.run.gone(within=5.0) for one in started):
            seen.wrong = "processes are left"
    return seen.trial("links cut", f"link down at host {side} {wait:.2f} s after the last stage began")


SCENARIO = Scenario(
    name="links",
    fault="a link down between two network namespaces",
    aim="raised within time-out + 1 s, right rank named, 100 %",
    wanted=25,
    trials=trials,
    needs=hangs.no_namespaces,
)
