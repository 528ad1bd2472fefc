"""`stagerun run --hosts`: hosts that are missing, lost, and come back; stops; folders that are copied."""

import re
import signal
import time
from pathlib import Path

import processes
import pytest

from cluster import jobs
from cluster.conftest import shared_folders
from cluster.hosts import Cluster, Started, cluster

pytestmark = pytest.mark.cluster
LIMIT_S = 400


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def elastic(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What any number of workers comes to."""
    return jobs.locally(schedule, tmp_path_factory.mktemp("reference") / "out", 2, *jobs.ELASTIC)


class Job:
    """A run on all hosts, started on one of them, whose words can be waited for."""

    def __init__(
        self, hosts: Cluster, schedule: Path, folder: Path, *more: object, on: str = "node1", out: str = "", **init: int
    ) -> None:
        self.out, self.log = Path(out or folder / "out"), folder / f"said-{time.monotonic_ns()}"
        words = [
            *jobs.STAGERUN,
            *jobs.words(schedule, self.out, *jobs.ELASTIC, **init),
            "--hosts",
            hosts.hostfile(),
            *more,
        ]
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


def test_every_host_that_is_missing_is_named(hosts: Cluster, schedule: Path, tmp_path: Path) -> None:
    hosts["node3"].power_off()
    file = tmp_path / "some"
    file.write_text("node1\nnode2\nnode3\nnode8\n")
    words = [*jobs.STAGERUN, *jobs.words(schedule, tmp_path / "out"), "--hosts", file]
    done = hosts["node1"].run(*words, timeout=60)
    assert done.returncode == 69, done.stderr
    assert re.search(r"^node3 can't be reached: .*(No route|timed out)", done.stderr, re.M), done.stderr
    assert re.search(r"^node8 can't be reached: .*resolve", done.stderr, re.M), done.stderr
    assert "node2" not in done.stderr and not (tmp_path / "out").exists()
    assert not jobs.nothing_left(hosts)


def test_a_folder_or_interpreter_that_is_not_there(hosts: Cluster, schedule: Path, tmp_path: Path) -> None:
    words = [*jobs.STAGERUN, *jobs.words(schedule, tmp_path / "out"), "--hosts", hosts.hostfile()]
    done = hosts["node1"].run(
        "sh", "-c", f"mkdir -p /tmp/mine; cd /tmp/mine; exec {' '.join(map(str, words))}", timeout=60
    )
    assert done.returncode == 69 and "node2 has no folder /tmp/mine" in done.stderr, done.stderr
    assert "node3 has no folder" in done.stderr and "--sync" in done.stderr
    done = hosts["node1"].run(*words, "--remote-python", "/opt/none/python", timeout=60)
    assert done.returncode == 69 and "node2 has no /opt/none/python" in done.stderr, done.stderr


@pytest.mark.parametrize("how", ["USR1", "TERM", "KILL"])
def test_the_launcher_is_told_to_stop_or_killed(
    how: str, hosts: Cluster, schedule: Path, elastic: dict[str, str], tmp_path: Path
) -> None:
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


def test_a_second_ctrl_c_ends_all_at_once(hosts: Cluster, schedule: Path, tmp_path: Path) -> None:
    job = Job(hosts, schedule, tmp_path)
    job.until(r"cyc1 +2/")
    began = time.monotonic()
    for _ in range(2):
        job.started.signal(signal.SIGINT)
        time.sleep(0.02)
    code, said = job.end()
    assert code in (130, 75), said  # it may have saved in between
    assert time.monotonic() - began < 10 and not jobs.nothing_left(hosts, 5)


def test_a_host_is_lost_and_taken_back(hosts: Cluster, schedule: Path, elastic: dict[str, str], tmp_path: Path) -> None:
    job = Job(hosts, schedule, tmp_path, "--min-nodes", 2)
    job.until(r"cyc1 +2/")
    hosts["node3"].power_off()
    began = time.monotonic()
    job.until(r"node3 was not heard of for \d+ s \(rank 2\)")
    told = time.monotonic() - began
    job.until(r"node3 is gone; going on with node1 and node2, restart 1 of at most 3")
    again = time.monotonic() - began
    hosts["node3"].power_on()  # before the next life begins, which asks for it at once
    code, said = job.end()
    print(jobs.table(["told after", "goes on after"], [[f"{told:.1f} s", f"{again:.1f} s"]]))
    assert code == 0, said
    assert "node3 answers again: going on with it" in said and said.count("3 workers on cpu") == 2, said
    assert processes.ends(job.out) == elastic
    assert told < 30


def test_a_host_that_is_needed_is_lost(hosts: Cluster, schedule: Path, tmp_path: Path) -> None:
    job = Job(hosts, schedule, tmp_path)
    job.until(r"init +4/")
    hosts["node2"].power_off()
    code, said = job.end()
    assert code == 69 and "node2 is gone: 2 hosts left of at least 3" in said and "--min-nodes" in said, said
    assert not jobs.nothing_left(hosts, 20)


def test_the_first_host_is_lost(hosts: Cluster, schedule: Path, elastic: dict[str, str], tmp_path: Path) -> None:
    """Its output folder is seen by the others, so rank 0 moves."""
    job = Job(hosts, schedule, tmp_path, "--min-nodes", 2, on="node2")
    job.until(r"cyc1 +2/")
    hosts["node1"].power_off()
    job.until(r"node1 is gone; going on with node2 and node3")
    code, said = job.end()
    assert code == 0 and processes.ends(job.out) == elastic, said


def test_the_first_host_is_lost_with_the_output_folder(hosts: Cluster, schedule: Path, tmp_path: Path) -> None:
    job = Job(hosts, schedule, tmp_path, "--min-nodes", 2, on="node2", out="/tmp/of-node1")
    job.until(r"init +4/")
    hosts["node1"].power_off()
    code, said = job.end()
    assert code == 69 and "node1 is gone: the output folder is there, and no other host sees it" in said, said


@pytest.mark.parametrize("name, rank", [("node1", 0), ("node3", 2)])
def test_only_the_connection_to_a_host_is_lost(
    name: str, rank: int, hosts: Cluster, schedule: Path, elastic: dict[str, str], tmp_path: Path
) -> None:
    """Its workers stop, which saves all, and it answers again; rank 0's may still hold the output folder then."""
    job = Job(hosts, schedule, tmp_path, on="node2")
    job.until(r"cyc1 +2/")
    for pid in hosts[name].processes("sshd: "):
        processes.kill_all([pid])
    job.until(rf"{name} is gone: its connection ended \(rank {rank}\)")
    code, said = job.end()
    assert code == 0 and processes.ends(job.out) == elastic, said


def test_an_agent_is_killed(hosts: Cluster, schedule: Path, elastic: dict[str, str], tmp_path: Path) -> None:
    """The hosts have different numbers of workers, which die with it."""
    job = Job(hosts, schedule, tmp_path, "--hosts", "node1:2,node2,node3")
    job.until(r"4 workers on cpu")
    job.until(r"cyc1 +2/")
    processes.kill_all(list(hosts["node2"].processes("stagerun agent")))
    job.until(r"node2 is gone: its connection ended \(rank 2\)")
    code, said = job.end()
    assert code == 0 and processes.ends(job.out) == elastic, said


def test_the_launcher_is_stopped_for_a_while(hosts: Cluster, schedule: Path, tmp_path: Path) -> None:
    """As by Ctrl-Z: the hosts take it for gone, save and end; that is no failure."""
    longer = {"max_iter": 250, "lr_iter": 500}  # they would do without it until the end, where that is near
    job = Job(hosts, schedule, tmp_path, "--max-restarts", 0, **longer)
    job.until(r"3 workers on cpu")
    job.started.signal(signal.SIGSTOP)
    time.sleep(20)
    job.started.signal(signal.SIGCONT)
    job.started.process.send_signal(signal.SIGCONT)  # nsenter stops with what it has started
    job.until(r"the launcher was stopped for \d+ s")
    code, said = job.end()
    assert code == 0, said
    assert processes.ends(job.out) == jobs.locally(schedule, tmp_path / "local", 2, *jobs.ELASTIC, **longer)


def test_schedule_and_package_are_copied(
    hosts: Cluster, schedule: Path, elastic: dict[str, str], tmp_path: Path
) -> None:
    job = Job(hosts, schedule, tmp_path, "--sync", "/tmp/copy", "--sync-code")
    code, said = job.end()
    assert code == 0 and processes.ends(job.out) == elastic, said
    for host in hosts.hosts:
        copied = host.run("sh", "-c", f"ls /tmp/copy/{schedule.name} /tmp/copy/.stagerun-code-*/stagerun/launch")
        assert "collapse.prototxt" in copied.stdout and "hosts.py" in copied.stdout, copied.stderr


def test_names_that_mislead(schedule: Path, elastic: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Debian has a host's own name mean 127.0.1.1 there."""
    with cluster(2, shared=shared_folders(tmp_path_factory), loopback_names=True) as two:
        job = Job(two, schedule, tmp_path_factory.mktemp("mislead"))
        code, said = job.end()
        assert code == 0 and processes.ends(job.out) == elastic, said
