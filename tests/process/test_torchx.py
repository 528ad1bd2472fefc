"""The TorchX component, as far as it goes without a cluster: what would be queued. Needs the extra `torchx`."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchx")

COMPONENT = Path(__file__).parents[2] / "stagerun" / "launch" / "torchx.py"


def request(*words: str) -> dict[str, Any]:
    """What `torchx run --dryrun` shows."""
    from torchx.runner import get_runner

    with get_runner() as runner:
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
