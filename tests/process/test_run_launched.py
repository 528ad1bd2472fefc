"""Workers that something else starts: TorchX, RANK and its like set by hand, our launcher."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import processes
import pytest
import small

COMPONENT = Path(__file__).parents[2] / "stagerun" / "launch" / "torchx.py"


def request(*words: str) -> dict[str, Any]:
    """What `torchx run --dryrun` shows."""
    runners = pytest.importorskip("torchx.runner")
    with runners.get_runner() as runner:
        info = runner.dryrun_component(f"{COMPONENT}:run", list(words), "kubernetes", {"queue": "default"})
    found: dict[str, Any] = info.request.resource
    return found


@pytest.mark.filterwarnings("ignore")
def test_each_container_knows_its_place_and_the_meeting_point():
    words = shlex.split("--image mine:1 --nodes 3 --gpu 2 --workers_per_node 2 --mounts type=volume,src=claim,dst=/mnt")
    tasks = request(*words, "--", "/mnt/my solvers", "--out", "/mnt/out", "--set=name=$x")["spec"]["tasks"]
    assert len(tasks) == 3
    for number, task in enumerate(tasks):
        assert {"event": "PodFailed", "action": "RestartJob"} in task["policies"]
        container = task["template"].spec.containers[0]
        assert container.image == "mine:1" and container.resources.limits["nvidia.com/gpu"] == "2"
        assert container.volume_mounts[-1].mount_path == "/mnt"
        shell, _, line = container.command
        assert shell == "bash"
        host = "TORCHX_RANK0_HOST" if number == 0 else "VC_WORKER_0_HOSTS"
        # As the container's bash reads it.
        said = subprocess.run(
            ["bash", "-c", line.replace("exec python", "printf '%s\\n'")],
            env={host: "rank0.svc"}, capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        assert said[said.index("--nnodes=3") :] == [
            "--nnodes=3", "--nproc-per-node=2", f"--node-rank={number}", "--max-restarts=0", "--master-addr=rank0.svc",
            "--master-port=29500", "-m", "stagerun", "run", "/mnt/my solvers", "--out", "/mnt/out", "--set=name=$x",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "which schedule?"),
        (["--nodes", "0", "--", "x"], "must be 1 or more"),
        (["--gpu", "1", "--workers_per_node", "2", "--", "x"], "one per GPU"),
    ],
)
def test_mistakes(words, part):
    with pytest.raises(ValueError, match=part):
        request("--image", "mine:1", *words)


# -- Workers that something else starts, with RANK, WORLD_SIZE and their like set by hand; and how our launcher starts them, and what it leaves


def start(schedules: list[Path], out: Path) -> list[processes.Run]:
    """One worker per schedule folder."""
    world = {"WORLD_SIZE": str(len(schedules)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port())}
    world["GLOO_SOCKET_IFNAME"] = "lo"
    words = [["run", str(schedule), "--out", str(out), "--threads", "1"] for schedule in schedules]
    return [processes.Run(one, {**world, "RANK": str(rank)}).start() for rank, one in enumerate(words)]


@pytest.mark.parametrize(
    ("early", "code", "said"),
    [
        (small.STAGES["early"].replace("0.02", "0.03"), 78, r"rank 1 on (.|\n)*early.prototxt"),
        ("base_lr: 0.1 lr_polcy: 3", 64, r"^rank 1 on (.|\n)*early.prototxt:1:14: .*`lr_polcy`"),
    ],
)
def test_another_solver_file_of_one_rank_or_a_mistake_there_ends_all_ranks_at_once(base, tmp_path, early, code, said):
    other = small.make_schedule(tmp_path / "other", base / "data", early=early)
    ended = [run.wait() for run in start([base / "schedule", other], tmp_path / "out")]
    assert [each for each, _ in ended] == [code, code]
    assert re.search(said, ended[0][1]) and ended[1][1] == ""
    assert not list((tmp_path / "out").glob("snapshots/*"))


def test_workers_on_one_host_listen_on_its_loopback_device_alone(base, tmp_path):
    runs = start([base / "schedule"] * 2, tmp_path / "out")
    found: set[tuple[str, int]] = set()
    while any(run.process.poll() is None for run in runs):
        found |= processes.listening([pid for run in runs for pid in run.pids()])
        time.sleep(0.02)
    ended = [run.wait() for run in runs]
    assert [code for code, _ in ended] == [0, 0]
    assert "2 workers on cpu" in ended[0][1] and ended[1][1] == "", "only rank 0 talks"
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
def test_another_user_cannot_reach_the_store_of_one_machines_workers(base, tmp_path):
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


# -- our launcher

# `PYTHON -m stagerun` becomes `PYTHON SCRIPT`.
SHIFTED = 'python=$1; shift 3; exec "$python" "$0" "$@"'


def test_it_executes_no_file_of_the_current_folder_listens_on_loopback_and_killed_leaves_nothing(base, tmp_path):
    """Nor do the threads of libraries, as there are where the environment doesn't limit them, take the launcher's signals."""
    for name in ("selectors", "json", "logging"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user was executed')\n")
    out = tmp_path / "out"
    words = ["run", base / "schedule", "--out", out, "--nproc", 2, "--threads", 1, *small.ENDLESS]
    # As the installed `stagerun` does, which doesn't search the current folder.
    script = tmp_path / "bin" / "stagerun"
    script.parent.mkdir()
    script.write_text("from stagerun.__main__ import main\nmain()\n")
    run = processes.Run([str(word) for word in words], {"OPENBLAS_NUM_THREADS": "4", "TMPDIR": str(tmp_path)})
    run.start(["env", "-u", "OMP_NUM_THREADS", "-C", str(tmp_path), "sh", "-c", SHIFTED, str(script)])
    try:
        small.wait_for(out / "snapshots" / "init-00000002-a0001", run)
        status = [(task / "status").read_text() for task in Path(f"/proc/{run.process.pid}/task").iterdir()]
        blocked = [int(re.findall(r"^SigBlk:\s*(\S+)", text, re.M)[0], 16) for text in status]
        assert len(blocked) > 1, "those of numpy's library, too"
        assert sum(not mask >> (signal.SIGTERM - 1) & 1 for mask in blocked) <= 1, "but the main one"
        assert {address for address, _ in processes.listening(run.pids())} == {"127.0.0.1"}
        assert list(tmp_path.glob("stagerun-run-*"))
    finally:
        run.process.kill()
    said = run.wait()[1]
    assert "was executed" not in said
    assert run.gone() and not list(tmp_path.glob("stagerun-run-*"))


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_temporary_files_where_no_inodes_are_left(base, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    run = f"{sys.executable} -m stagerun run {base}/schedule --out {tmp_path}/out --nproc 2"
    for inodes in (2, 3):
        mounted = f"mount -t tmpfs -o nr_inodes={inodes},size=10m none {there} && TMPDIR={there} exec {run}"
        done = subprocess.run(["unshare", "-m", "sh", "-c", mounted], capture_output=True, text=True, timeout=120)
        assert done.returncode == 74, done.stderr
        assert f"of {inodes} inodes are left" in done.stderr and "bug of stagerun" not in done.stderr, done.stderr
        assert "without a message" not in done.stderr, done.stderr
