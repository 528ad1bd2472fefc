"""The hosts themselves: what the other tests here take for granted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import pids
from cluster.hosts import Cluster
from cluster.slurm import Slurm

pytestmark = pytest.mark.cluster


def test_each_host_has_a_name_processes_and_a_tmp_of_its_own_and_ssh_to_all(hosts: Cluster, tmp_path: Path) -> None:
    node1 = hosts["node1"]
    assert node1.run("hostname").stdout == "node1\n"
    node1.run("touch", "/tmp/mine", tmp_path / "ours", check=True)
    said = node1.run("ssh", "node3", f"hostname; cat /proc/1/comm; ls /tmp/mine {tmp_path}")
    assert said.stdout.split() == ["node3", "sshd", f"{tmp_path}:", "ours"] and "No such file" in said.stderr
    assert not Path("/tmp/mine").exists()


def test_a_cut_is_silent_and_heals(hosts: Cluster) -> None:
    probe = ("timeout", "2", "bash", "-c", "exec 3<>/dev/tcp/node2/22 && head -c 3 <&3")
    assert hosts["node1"].run(*probe).stdout == "SSH"
    hosts["node2"].cut()
    assert hosts["node1"].run(*probe).returncode == 124, "time-out: nobody said no"
    assert "state UP" in hosts["node2"].run("ip", "link", "show", "eth0").stdout
    hosts["node2"].heal()
    assert hosts["node1"].run(*probe).stdout == "SSH"


def test_power_off_ends_everything_in_a_host_and_tells_nobody(hosts: Cluster) -> None:
    sleeper = hosts["node2"].start("sleep", "1000")
    held = hosts["node1"].start("ssh", "-o", "ServerAliveInterval=1", "node2", "sleep 1001")
    while not hosts["node2"].processes("sleep 1001"):
        time.sleep(0.02)
    hosts["node2"].power_off()
    assert sleeper.wait(5)[0] != 0
    assert held.process.poll() is None, "the connection was not closed"
    code, said = held.wait(15)
    assert code == 255 and "not responding" in said
    hosts["node2"].power_on()
    hosts["node2"].wait_up()
    assert hosts["node1"].run("ssh", "node2", "hostname").stdout == "node2\n"


@pytest.mark.parametrize("kind", ["hosts", "shaped"])
def test_rates_hold(kind: str, request: pytest.FixtureRequest) -> None:
    cluster: Cluster = request.getfixturevalue(kind)
    cluster["node2"].shape(rate_mbit=20)
    began = time.monotonic()
    # Through ssh: 5 MB are 2 s at 20 Mbit/s.
    cluster["node1"].run("bash", "-c", "head -c 5000000 /dev/urandom | ssh node2 'cat >/dev/null'", check=True)
    assert 1.8 < time.monotonic() - began < 6


def test_delays_hold(shaped: Cluster) -> None:
    shaped["node2"].shape(delay_ms=50)
    code = "import socket, time; a = time.monotonic(); socket.create_connection(('node2', 22)); print(time.monotonic() - a)"
    times = [float(shaped["node1"].run(sys.executable, "-c", code).stdout) for _ in range(3)]
    assert 0.1 <= min(times) < 0.15, "there and back"


@pytest.mark.parametrize("switch", ["bridge", "user"])
def test_nothing_is_left_of_hosts_whose_maker_was_killed(switch: str) -> None:
    make = (
        f"from cluster.hosts import make; c = make(2, {switch!r}); print(c.folder, c.switch.pid, flush=True); input()"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", make], cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert maker.stdout is not None and maker.stdin is not None
    folder, switch_pid = maker.stdout.readline().split()
    of_it = [
        int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit() and folder in pids.command_line(int(e.name))
    ]
    assert len(of_it) >= 2
    os.kill(maker.pid, signal.SIGKILL)
    maker.wait()
    maker.stdout.close()
    maker.stdin.close()
    until = time.monotonic() + 5
    while any(pids.started(pid) for pid in [*of_it, int(switch_pid)]):
        assert time.monotonic() < until
        time.sleep(0.02)
    with_new = "from cluster.hosts import cluster\nwith cluster(1): pass"
    subprocess.run([sys.executable, "-c", with_new], cwd=Path(__file__).parents[1], check=True)
    assert not Path(folder).exists(), "the next hosts sweep up"


def test_slurm_runs_on_all_nodes_and_requeues_a_job_whose_node_is_lost(slurm: Slurm, tmp_path: Path) -> None:
    assert sorted(slurm.run("srun", "-N3", "-n3", "hostname").split()) == ["node1", "node2", "node3"]
    script = tmp_path / "job"
    script.write_text(
        "#!/bin/bash\necho life $SLURM_RESTART_COUNT >> said\n[ $SLURM_RESTART_COUNT ] || srun sleep 100\n"
    )
    number = slurm.submit("-N2", "-w", "node1,node2", "--requeue", script, cwd=tmp_path)
    slurm.wait(number, ["RUNNING"], 30)
    while not slurm.cluster["node2"].processes("sleep 100"):
        time.sleep(0.05)
    slurm.cluster["node2"].power_off()
    slurm.wait(number, ["PENDING"], 60)
    slurm.cluster["node2"].power_on()
    slurm.cluster["node2"].wait_up()
    slurm.add_node(slurm.cluster["node2"])
    job = slurm.wait(number, ["COMPLETED", "FAILED"], 120)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
    assert (tmp_path / "said").read_text() == "life\nlife 1\n"
