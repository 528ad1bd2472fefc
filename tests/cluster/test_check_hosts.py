"""Faults of a host that `stagerun rehearse --hosts` must name before a run is paid for, and the first seconds of a run under another launcher."""

import json
import shutil
from typing import Any

import pytest

from cluster import jobs, needed
from cluster.conftest import require
from cluster.host import Host
from cluster.test_launchers import open_mpi_4

pytestmark = pytest.mark.cluster

NAMES = ["node1", "node2", "node3"]


@pytest.fixture(autouse=True)
def clean(hosts):
    """The hosts' own /tmp outlives a test."""
    for name in NAMES:
        hosts[name].run("rm", "-rf", "/tmp/packages", "/tmp/python", "/tmp/train_lmdb", "/tmp/scratch")


@pytest.fixture
def looked(hosts, schedule, tmp_path):
    """`stagerun rehearse --hosts` of three hosts, typed on node1."""

    def rehearse(*more: object) -> tuple[int, str]:
        words = ["rehearse", *jobs.words(schedule, tmp_path / "out")[1:], "--hosts", ",".join(NAMES), *more]
        done = hosts["node1"].run(*jobs.STAGERUN, *words, env=jobs.ENVIRONMENT, timeout=300, cwd=tmp_path)
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        assert not (tmp_path / "out").exists(), "nothing is left behind"
        return done.returncode, done.stdout + done.stderr

    return rehearse


def test_hosts_that_are_ready(looked):
    code, said = looked("--json")
    found, _ = json.JSONDecoder().raw_decode(said[said.index("{") :])  # torch warns behind it
    # All three share this machine's cores, so a step may be slow on any of them: it is for the facts and the links here.
    slow = [f for f in found["findings"] if "slow: a training step" in f["text"]]
    assert [f for f in found["findings"] if f["code"] and f not in slow] == []
    assert code == (69 if slow else 0)
    measured: list[dict[str, Any]] = found["measured"]
    assert list(found["hosts"]) == NAMES == [host["host"] for host in measured]
    assert all(host["link"] > 1e7 and host["workers"] == 1 for host in measured)


def test_a_host_that_is_missing(looked, hosts):
    hosts["node3"].power_off()
    code, said = looked()
    assert code == 69
    assert "node3 can't be reached" in said


def with_torch(host: Host) -> None:
    """Metadata of another torch in the host's own /tmp."""
    text = "Metadata-Version: 2.1\\nName: torch\\nVersion: 2.12.1+cpu\\n"
    folder = "/tmp/packages/torch-2.12.1.dist-info"
    host.run("sh", "-c", f"mkdir -p {folder} && printf '{text}' > {folder}/METADATA", check=True)


def test_other_images(looked, hosts, schedule, tmp_path):
    """Each host has its own copy, in the same place; on node2 it is the other LMDB of the schedule under the name of this one."""
    data = schedule.parent / "data"
    for name in NAMES:
        source = "val_lmdb" if name == "node2" else "train_lmdb"
        hosts[name].run("cp", "-r", data / source, "/tmp/train_lmdb", check=True)
    code, said = looked("--set", "data.train.source=/tmp/train_lmdb")
    assert code == 65
    assert "node2: " in said and "/tmp/train_lmdb" in said
    # As many records, of which one is another.
    other = shutil.copytree(data / "train_lmdb", tmp_path / "other")
    file = other / "data.mdb"
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)
    hosts["node2"].run("sh", "-c", f"rm -r /tmp/train_lmdb && cp -r {other} /tmp/train_lmdb", check=True)
    code, said = looked("--set", "data.train.source=/tmp/train_lmdb")
    assert code == 65 and "node2: train images (/tmp/train_lmdb): " in said


def test_slow_link(looked, hosts):
    """10 of 1000 Mbit/s."""
    for name in NAMES:
        hosts[name].shape(rate_mbit=10 if name == "node2" else 1000)
    code, said = looked()
    assert code == 69
    (line,) = [line for line in said.splitlines() if "slow link" in line]
    rate, unit = line.removeprefix("node2: slow link: ").split()[:2]
    assert (unit == "kB/s" and 300 < float(rate) < 1000) or (unit == "MB/s" and float(rate) < 2.5), line


def test_the_first_seconds_of_a_run(hosts, schedule, tmp_path):
    """Under a launcher that compares nothing."""
    require(needed.MPI)
    with_torch(hosts["node3"])
    typed = [*open_mpi_4(hosts), "-x", "PYTHONPATH", *jobs.STAGERUN, *jobs.words(schedule, tmp_path / "out")]
    code, said = hosts["node1"].start(*typed, env={**jobs.ENVIRONMENT, "PYTHONPATH": "/tmp/packages"}).wait(200)
    assert "node3: torch: 2.12.1; 2.13.0 on node1, node2" in said and "Traceback" not in said, said
    assert code == 64
    assert not (tmp_path / "out" / "snapshots").exists()
