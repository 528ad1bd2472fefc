"""Tries in child processes, for fuzz_records.py and fuzz_solvers.py: what dies, hangs or takes too much memory is named by its number."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

# What a child may take beyond what it has when it starts, in bytes, and how long a try, in seconds.
ROOM, SECONDS = 2 << 30, 20


def numbers(first: int, last: int) -> Iterator[int]:
    """In a child: each number, printed before its try starts."""
    resource.setrlimit(resource.RLIMIT_AS, (ROOM + _virtual_memory(),) * 2)
    for number in range(first, last):
        print(number, flush=True)
        signal.alarm(SECONDS)  # its default is to end the process, in the midst of a library too
        yield number
    signal.alarm(0)


def tell(counts: Counter[str]) -> None:
    """In a child, at its end."""
    print(json.dumps(counts), flush=True)


def try_all(script: str, noun: str, seed: int, first: int, count: int, chunk: int) -> tuple[Counter[str], int]:
    """What `script --child SEED FIRST LAST` counted, called for `chunk` numbers at a time, and how often it failed: each failure
    is printed with the number of its `noun`. After one another child goes on with the next number; what the failed one had
    counted is lost."""
    counts: Counter[str] = Counter()
    failures, at, end = 0, first, first + count
    while at < end:
        last = min(end, at + chunk)
        command = [sys.executable, script, "--child", str(seed), str(at), str(last)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        lines = done.stdout.splitlines()
        if done.returncode == 0:
            counts += Counter(json.loads(lines[-1]))
            at = last
            continue
        how = done.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
        if done.returncode < 0:
            how = [f"ended by {signal.Signals(-done.returncode).name}"]
        number = int(lines[-1]) if lines else at
        print(f"{noun} {number} of seed {seed}: {how[0]}", flush=True)
        failures, at = failures + 1, number + 1
    return counts, failures


def _virtual_memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
