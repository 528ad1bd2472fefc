"""Hostile snapshots, most of them with manifests that fit, loaded in every way that stagerun has, in processes with an audit hook:
nothing is unpickled, executed or started, no file outside is read or changed, no memory exhausted, and no command ends in a bug.

The snapshots are those of `reliability.forging`, the ways and the hook those of `reliability.loading`.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reliability.flips import Half
from reliability.trial import Scenario, Trial

TESTS = Path(__file__).parents[1]
PER_TRIAL = 12


def load(folder: Path, seed: int, count: int, attack: str = "") -> dict[str, Any]:
    """What `reliability.loading` found."""
    # No second thread may write where the hook looks, and none of the environment of a run may reach the commands.
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "help", TESTS.parent))),
        "TMPDIR": str(folder / "tmp"),
        # torch makes it where a network is compiled; and once it has looked for it, it names it in the environment of what it starts.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "tmp" / "torchinductor"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "reliability.loading", str(folder), str(seed), str(count), *[attack] * bool(attack)],
        capture_output=True, text=True, env=environment, timeout=1200,
    )  # fmt: skip
    if done.returncode != 0:
        return {
            "wrong": [f"the process ended with {done.returncode}: {done.stderr[-1500:]}"],
            "events": [],
            "memory": 0,
        }
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    Half(folder)
    while True:
        seed = rng.randrange(2**31)
        found = load(folder, seed, PER_TRIAL)
        again = f"python -m reliability.loading {folder} {seed} {PER_TRIAL}"
        wrong = "; ".join([*found["wrong"][:3], *found["events"][:3]])
        yield Trial(
            faults=PER_TRIAL,
            counts={
                "snapshots loaded, each in every way that there is for it": PER_TRIAL,
                "events of unpickling, executing, starting, or outside": len(found["events"]),
            },
            largest={"MB of memory more than before": round(found["memory"] / 1e6, 1)},
            wrong=f"{again}: {wrong}" if wrong else "",
        )


SCENARIO = Scenario(
    name="hostile",
    fault="audit hook while loading hostile snapshots",
    aim="0 unpickling, exec, subprocess events",
    wanted=1000,
    trials=trials,
)
