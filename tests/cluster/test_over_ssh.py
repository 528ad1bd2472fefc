"""`stagerun run --hosts`: hosts that are missing, lost, and come back; stops; folders that are copied."""

import re
import shutil
import signal
import time
from pathlib import Path

import processes
import pytest

from cluster import jobs
from cluster.conftest import shared_folders
from cluster.host import Started
from cluster.hosts import Cluster, cluster

pytestmark = pytest.mark.cluster
LIMIT_S = 400


@pytest.fixture(scope="module")
def elastic(schedule, tmp_path_factory):
    """What any number of workers comes to."""
    return jobs.locally(schedule, tmp_path_factory.mktemp("reference") / "out", 2, *jobs.ELASTIC)


class Job:
    """A run on all hosts, started on one of them, whose words can be waited for."""

    def __init__(self, hosts: Cluster, schedule: Path, folder: Path, *more: object, on: str = "node1") -> None:
        self.out, self.log = folder / "out", folder / f"said-{time.monotonic_ns()}"
        words = [*jobs.STAGERUN, *jobs.words(schedule, self.out, *jobs.ELASTIC), "--hosts", hosts.hostfile(), *more]
        text = " ".join(map(str, words))
        self.started: Started = hosts[on].start("sh", "-c", f"exec {text} > {self.log} 2>&1")
        self._seen = 0

    def until(self, pattern: str, limit: float = 120) -> None:
        last = time.monotonic() + limit
        while (found := re.search(pattern, self.text[self._seen :])) is None:
            assert self.started.process.poll() is None, f"ended before `{pattern}`:\n{self.text}"
            assert time.monotonic() < last, f"no `{pattern}`:\n{self.text}"
            time.sleep(0.05)
        self._seen += found.end()

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def end(self) -> tuple[int, str]:
        code, _ = self.started.wait(LIMIT_S)
        assert "Traceback" not in self.text and "bug of stagerun" not in self.text, self.text
        return code, self.text


@pytest.mark.parametrize("how", ["USR1", "TERM", "KILL"])
def test_the_launcher_is_told_to_stop_or_killed(how, hosts, schedule, elastic, tmp_path):
    job = Job(hosts, schedule, tmp_path)
    job.until(r"cyc1 +4/")
    job.started.signal(signal.Signals[f"SIG{how}"])
    code, said = job.started.wait(60)[0], job.text
    if how != "KILL":
        assert code == 75 and "everything is saved" in said, said
    assert not jobs.nothing_left(hosts, 30), "every worker saves and ends"
    names = [folder.name for folder in (job.out / "snapshots").iterdir()]
    assert any(re.match(r"cyc1-0000000[4-8]", name) for name in names), f"a stop is saved: {names}"
    again = Job(hosts, schedule, tmp_path)
    assert again.end()[0] == 0, again.text
    assert processes.ends(job.out) == elastic


def test_a_second_ctrl_c_ends_all_at_once(hosts, schedule, tmp_path):
    job = Job(hosts, schedule, tmp_path)
    job.until(r"cyc1 +2/")
    began = time.monotonic()
    for _ in range(2):
        job.started.signal(signal.SIGINT)
        time.sleep(0.02)
    code, said = job.end()
    assert code in (130, 75), said  # it may have saved in between
    assert time.monotonic() - began < 10 and not jobs.nothing_left(hosts, 5)


def test_a_host_that_is_needed_is_lost(hosts, schedule, tmp_path):
    job = Job(hosts, schedule, tmp_path)
    job.until(r"init +4/")
    hosts["node2"].power_off()
    code, said = job.end()
    assert code == 69 and "node2 is gone: its connection ended (rank 1)" in said, said
    assert not jobs.nothing_left(hosts, 20)


@pytest.mark.parametrize("name, rank", [("node1", 0), ("node3", 2)])
def test_only_the_connection_to_a_host_is_lost(name, rank, hosts, schedule, elastic, tmp_path):
    """Its workers stop, which saves all; the same command goes on."""
    job = Job(hosts, schedule, tmp_path, on="node2")
    job.until(r"cyc1 +2/")
    for pid in hosts[name].processes("sshd: "):
        processes.kill_all([pid])
    job.until(rf"{name} is gone: its connection ended \(rank {rank}\)")
    assert job.end()[0] == 69
    assert not jobs.nothing_left(hosts, 30)
    code, said = Job(hosts, schedule, tmp_path, on="node2").end()
    assert code == 0 and processes.ends(job.out) == elastic, said


def test_the_command_on_a_host_is_killed(hosts, schedule, elastic, tmp_path):
    """The hosts have different numbers of workers, which die with it."""
    job = Job(hosts, schedule, tmp_path, "--hosts", "node1:2,node2,node3")
    job.until(r"4 workers on cpu")
    job.until(r"cyc1 +2/")
    processes.kill_all(list(hosts["node2"].processes("stagerun.launch.on_host")))
    job.until(r"node2 is gone: its connection ended \(rank 2\)")
    assert job.end()[0] == 69
    code, said = Job(hosts, schedule, tmp_path).end()
    assert code == 0 and processes.ends(job.out) == elastic, said


def test_a_schedule_is_copied(hosts, schedule, elastic, tmp_path):
    if shutil.which("rsync") is None:
        pytest.skip("needs rsync")
    job = Job(hosts, schedule, tmp_path, "--sync", "/tmp/copy")
    code, said = job.end()
    assert code == 0 and processes.ends(job.out) == elastic, said
    for host in hosts.hosts:
        copied = host.run("sh", "-c", f"ls /tmp/copy/{schedule.name}")
        assert "collapse.prototxt" in copied.stdout, copied.stderr


def test_names_that_mislead(schedule, elastic, tmp_path_factory):
    """Debian has a host's own name mean 127.0.1.1 there."""
    with cluster(2, shared=shared_folders(tmp_path_factory), loopback_names=True) as two:
        job = Job(two, schedule, tmp_path_factory.mktemp("mislead"))
        code, said = job.end()
        assert code == 0 and processes.ends(job.out) == elastic, said
