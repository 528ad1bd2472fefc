"""Tries in child processes, for `records` and `solvers`: what dies, hangs or takes too much memory is named by its number."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
PATH = os.pathsep.join(map(str, (TESTS, TESTS / "help", TESTS.parent)))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}
# What a child may take beyond what it has when it starts, in bytes, and how long a try, in seconds.
ROOM, SECONDS = 2 << 30, 20


def numbers() -> Iterator[int]:
    """In a child: each number, printed before its try starts."""
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (ROOM + before,) * 2)
    for number in range(*map(int, sys.argv[2:4])):
        print(number, flush=True)
        signal.alarm(SECONDS)  # its default is to end the process, in the midst of a library too
        yield number
    signal.alarm(0)


def tell(counts: Counter[str]) -> None:
    """In a child, at its end."""
    print(json.dumps(counts), flush=True)


def tried(module: str, seed: int, count: int) -> tuple[Counter[str], list[str]]:
    """What `python -m MODULE SEED FIRST LAST` counted, and its failures, each with what does it again. After one another child goes on
    with the next number; what the failed one had counted is lost."""
    counts: Counter[str] = Counter()
    failures, at = [], 0
    while at < count:
        command = [sys.executable, "-m", module, str(seed), str(at), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        lines = done.stdout.splitlines()
        if done.returncode == 0:
            return counts + Counter(json.loads(lines[-1])), failures
        how = done.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
        if done.returncode < 0:
            how = [f"ended by {signal.Signals(-done.returncode).name}"]
        number = int(lines[-1]) if lines else at
        failures.append(f"python -m {module} {seed} {number} {number + 1}: {how[0]}")
        at = number + 1
    return counts, failures
