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
import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is allowed: nothing can be told apart"),
]
FIRST, SECOND = sorted(os.sched_getaffinity(0))[:2]


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bound")
    tiny.make_data(folder)
    return small.make_schedule(folder / "schedule", folder)


@pytest.fixture(scope="module")
def unbound(schedule: Path) -> dict[str, str]:
    """Digests of what two workers train where no one is bound."""
    out = schedule.parent / "unbound"
    assert small.run(schedule, out, nproc=2).returncode == 0
    assert notes(out) == []
    return processes.content(out)


def notes(out: Path) -> list[str]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert lines[0]["event"] == "RunStarted"
    return [line["text"] for line in lines if line["event"] == "Note" and "bound to cores" in line["text"]]


def start(schedule: Path, out: Path, *words: str, environment: dict[str, str] | None = None) -> processes.Run:
    """With two workers, on the first two CPUs."""
    command = ["run", str(schedule), "--out", str(out), "--nproc", "2", "--threads", "1", *words]
    only_two = [
        sys.executable,
        "-c",
        f"import os, sys; os.sched_setaffinity(0, {{{FIRST}, {SECOND}}}); os.execv(sys.argv[1], sys.argv[1:])",
    ]
    return processes.Run(command, environment or {}).start(within=only_two)


def seen(run: processes.Run, watch: bool) -> dict[int, dict[str, set[str]]]:
    """Until the run ends: by rank, the names of its workers' (or monitors') threads and the CPUs that each was allowed at last."""
    found: dict[int, dict[tuple[int, str], str]] = {}
    while run.process.poll() is None:
        for rank, pid in run.ranks().items():
            children = [p for p in run.pids() if processes.is_monitor(p) and parent(p) == pid] if watch else [pid]
            for process in children:
                for tid, (name, cpus) in threads(process).items():
                    found.setdefault(rank, {})[tid, name] = cpus
        time.sleep(0.05)
    by_name: dict[int, dict[str, set[str]]] = {}
    for rank, each in found.items():
        for (_, name), cpus in each.items():
            by_name.setdefault(rank, {}).setdefault(name, set()).add(cpus)
    return by_name


def parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def threads(pid: int) -> dict[int, tuple[str, str]]:
    """Those of a worker that has started: name, allowed CPUs."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            told = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
            main = folder.name == str(pid)
            found[int(folder.name)] = ("main" if main else told["Name"], told["Cpus_allowed_list"])
    return found


def test_threads_are_where_the_plan_says(schedule: Path, unbound: dict[str, str], tmp_path: Path) -> None:
    """One core for each worker: its main thread and gloo's are on it, and on no other's."""
    run = start(schedule, tmp_path / "out", "--bind", "numa")
    found = seen(run, watch=False)
    assert run.wait()[0] == 0
    for rank, cpu in ((0, FIRST), (1, SECOND)):
        for name in ("main", "gloo_tcp_loop", "pt_gloo_runloop"):
            assert found[rank][name] == {str(cpu)}, (rank, name)
    [note] = notes(tmp_path / "out")
    assert note == "bound to cores: rank 0 to 1 CPU of NUMA node 0; rank 1 to 1 CPU of NUMA node 0"
    assert processes.content(tmp_path / "out") == unbound


def test_what_cannot_be_had_is_said_before_training(schedule: Path, tmp_path: Path) -> None:
    one = [
        sys.executable,
        "-c",
        f"import os, sys; os.sched_setaffinity(0, {{{FIRST}}}); os.execv(sys.argv[1], sys.argv[1:])",
    ]
    command = ["run", str(schedule), "--out", str(tmp_path / "out"), "--nproc", "2", "--bind", "numa"]
    code, text = processes.Run(command).start(within=one).wait()
    assert code == 64 and "--bind numa: 2 workers for the 1 core" in text
    assert "hint: take fewer workers, or --bind none" in text
