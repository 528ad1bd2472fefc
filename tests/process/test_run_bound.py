"""`run --bind`: real workers, their threads seen in /proc where the plan puts them, and the same bits as unbound."""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import processes
import pytest
import small


def threads(pid: int) -> dict[int, tuple[str, str]]:
    """Name and allowed CPUs of each of a process."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            told = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
            name = "main" if folder.name == str(pid) else told["Name"]
            found[int(folder.name)] = (name, told["Cpus_allowed_list"])
    return found


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is allowed: nothing can be told apart")
def test_threads_are_where_the_plan_says(base, tmp_path):
    """One core for each worker: its main thread and gloo's are on it, and on no other's."""
    two = sorted(os.sched_getaffinity(0))[:2]
    only_two = f"import os, sys; os.sched_setaffinity(0, {two}); os.execv(sys.argv[1], sys.argv[1:])"
    words = ["run", base / "schedule", "--out", tmp_path / "out", "--nproc", 2, "--threads", 1, "--bind", "numa"]
    run = processes.Run([str(word) for word in words]).start(within=[sys.executable, "-c", only_two])
    last: dict[tuple[int, int], tuple[str, str]] = {}  # by rank and thread
    while run.process.poll() is None:
        for rank, pid in run.ranks().items():
            last |= {(rank, thread): said for thread, said in threads(pid).items()}
        time.sleep(0.05)
    assert run.wait()[0] == 0
    for rank, cpu in enumerate(two):
        for wanted in ("main", "gloo_tcp_loop", "pt_gloo_runloop"):
            assert {cpus for (r, _), (name, cpus) in last.items() if (r, name) == (rank, wanted)} == {str(cpu)}, wanted
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    notes = [line["text"] for line in lines if line["event"] == "Note"]
    assert "bound to cores: rank 0 to 1 CPU of NUMA node 0; rank 1 to 1 CPU of NUMA node 0" in notes
    assert small.run(base / "schedule", tmp_path / "unbound", nproc=2).returncode == 0
    assert processes.content(tmp_path / "out") == processes.content(tmp_path / "unbound")
