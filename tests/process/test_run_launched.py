"""Workers that something else starts: RANK, WORLD_SIZE and their like set by hand."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
import small


def start(schedules: list[Path], out: Path, *arguments: str) -> list[processes.Run]:
    """One worker per schedule folder."""
    port = processes.free_port()
    workers = []
    for rank, schedule in enumerate(schedules):
        world = {"RANK": str(rank), "WORLD_SIZE": str(len(schedules)), "MASTER_ADDR": "127.0.0.1"}
        run = processes.Run(
            ["run", str(schedule), "--out", str(out), "--threads", "1", *arguments],
            {**world, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
        )
        workers.append(run.start())
    return workers


def launch(schedules: list[Path], out: Path, *arguments: str) -> list[tuple[int, str]]:
    """(exit code, all output) of one worker per schedule folder."""
    return [run.wait() for run in start(schedules, out, *arguments)]


def test_ranks_with_other_solver_files_are_named(base: Path, tmp_path: Path) -> None:
    other = small.make_schedule(tmp_path / "other", base / "data", early=small.STAGES["early"].replace("0.02", "0.03"))
    ended = launch([base / "schedule", other], tmp_path / "out")
    assert [code for code, _ in ended] == [78, 78]
    assert "rank 1 on " in ended[0][1] and "early.prototxt" in ended[0][1] and ended[1][1] == ""
    assert not list((tmp_path / "out" / "snapshots").glob("*"))


def test_a_mistake_in_one_ranks_files_ends_all_ranks_at_once(base: Path, tmp_path: Path) -> None:
    other = small.make_schedule(tmp_path / "other", base / "data", early="base_lr: 0.1 lr_polcy: 3")
    ended = launch([base / "schedule", other], tmp_path / "out")
    assert [code for code, _ in ended] == [64, 64]
    assert re.match(r"rank 1 on (.|\n)*early.prototxt:1:14: .*`lr_polcy`", ended[0][1]) and ended[1][1] == ""


@pytest.mark.parametrize("by", ["nproc", "environment"])
def test_a_run_on_one_host_listens_on_its_loopback_device_alone(base: Path, tmp_path: Path, by: str) -> None:
    if by == "environment":
        runs = start([base / "schedule"] * 2, tmp_path / "out")
    else:
        runs = [small.start(base / "schedule", tmp_path / "out", nproc=2)]
    found: set[tuple[str, int]] = set()
    while any(run.process.poll() is None for run in runs):
        found |= processes.listening([pid for run in runs for pid in run.pids()])
        time.sleep(0.02)
    ended = [run.wait() for run in runs]
    assert [code for code, _ in ended] == [0] * len(runs)
    assert "2 workers on cpu" in ended[0][1] and not any(said for _, said in ended[1:]), "only rank 0 talks"
    assert {address for address, _ in found} == {"127.0.0.1"}


STRANGER = """
import glob, os, signal, sys, tempfile, datetime, torch.distributed as dist
os.setuid(65534)
print("file " * bool(glob.glob(f"{tempfile.gettempdir()}/stagerun-run-*/*")), flush=True)
for port in map(int, sys.argv[1:]):
    if not os.fork():
        signal.alarm(4)  # whatever isn't a store leaves torch waiting
        store = dist.TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=3), wait_for_workers=False)
        print("store of", store.num_keys(), "keys", flush=True)
        os._exit(0)
for port in sys.argv[1:]:
    os.wait()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_cannot_reach_the_store_of_one_machines_workers(base: Path, tmp_path: Path) -> None:
    arguments = ["run", str(base / "schedule"), "--out", str(tmp_path / "out"), "--threads", "1", *small.ENDLESS]
    run = processes.Run([*map(str, arguments), "--hosts", "localhost:2"]).start()
    try:
        small.wait_for(tmp_path / "out/snapshots/init-00000006-a0001", run)
        found = processes.listening(run.pids())
        ports = [str(port) for _, port in found]
        assert {address for address, _ in found} == {"127.0.0.1"}, "gloo listens"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", STRANGER, *ports], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout
        assert run.process.poll() is None, "the run isn't disturbed"
    finally:
        run.process.terminate()
    assert run.wait()[0] == 75
