"""What befalls a host while it copies, evaluates or saves; a host that is slow; one that hangs, seen from another."""

import json
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import processes
import pytest

from cluster import jobs
from cluster.hosts import Cluster
from cluster.test_links import TIME_OUT_S, environment, told_in_time

pytestmark = pytest.mark.cluster
TIME_OUTS = [
    word for name in ("copy", "iteration", "evaluation", "save") for word in ("--timeout", f"{name}={TIME_OUT_S:.0f}s")
]
HOOK = str(Path(__file__).parent / "hook")


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def reference(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return jobs.locally(schedule, tmp_path_factory.mktemp("reference") / "out", 3)


def start(
    hosts: Cluster,
    schedule: Path,
    out: Path,
    *more: str,
    odd: int = -1,
    init: Mapping[str, int] | None = None,
    **hook: str,
) -> list[jobs.Spoken]:
    """A worker on each host. `hook`: environment of rank `odd`. `init`: as of `jobs.words`."""
    words = [*jobs.STAGERUN, *jobs.words(schedule, out, *more, **(init or {}))]
    each: list[Mapping[str, str]] = [environment(rank) for rank in range(3)]
    if odd >= 0:
        each[odd] = {**each[odd], "PYTHONPATH": HOOK, **hook}
    started = [host.start(*words, env=env) for host, env in zip(hosts.hosts, each, strict=True)]
    return [jobs.Spoken(one) for one in started]


def on_scratch(hosts: Cluster, name: str) -> list[str]:
    """Options for copies in a new folder of each host's own /tmp."""
    for host in hosts.hosts:
        host.run("mkdir", f"/tmp/{name}", check=True)
    return ["--set", f"data.scratch=/tmp/{name}"]


@pytest.mark.parametrize("name", ["node1", "node2"])
@pytest.mark.parametrize("section", ["copy", "evaluation", "save"])
def test_a_cut_is_told_in_time(
    section: str, name: str, hosts: Cluster, schedule: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    """Rank 0, on node1, saves. The same command then goes on to the same bits."""
    out, mark, rank = tmp_path / "out", tmp_path / "mark", int(name[-1]) - 1
    scratch = on_scratch(hosts, f"{section}-{name}")
    run = start(hosts, schedule, out, *TIME_OUTS, *scratch, odd=rank, HELD_IN=f"{section}={mark}")
    until = time.monotonic() + 200
    while not mark.exists():
        assert time.monotonic() < until and run[rank].started.process.poll() is None, run[rank].text
        time.sleep(0.01)
    hosts[name].cut()
    cut = time.monotonic()
    told = told_in_time(hosts, run, name, cut)
    hosts[name].heal()
    again = start(hosts, schedule, out, *scratch)
    assert [one.wait(400) for one in again] == [0, 0, 0], again[0].text
    assert processes.ends(out) == reference
    print(f"\n{name} cut off in {section}, time-out {TIME_OUT_S:.0f} s: {told}; then the same bits")


def test_a_slow_host_is_named(hosts: Cluster, schedule: Path, tmp_path: Path) -> None:
    # A device batch takes some 20 to 50 ms here.
    run = start(hosts, schedule, tmp_path / "out", odd=2, init={"max_iter": 4000, "lr_iter": 8000}, DAWDLES="200")
    until = time.monotonic() + 300
    while (
        found := re.search(r"rank 2 on (\S+) is slow: a device batch takes it \S+ s, (\S+) x the median", run[0].text)
    ) is None:
        assert time.monotonic() < until and run[0].started.process.poll() is None, run[0].text
        time.sleep(0.1)
    assert found[1] == "node3" and float(found[2]) > 1.5
    for one in run:
        one.started.signal(signal.SIGTERM)
    assert [one.wait(60) for one in run] == [75, 75, 75]
    named = re.findall(r"(\S+) is slow", run[0].text)
    assert set(named) == {"node3"}, run[0].text
    print(f"\n{found[0]}")


def test_a_rank_that_hangs_seen_from_another_host(hosts: Cluster, schedule: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = start(hosts, schedule, out, "--timeout", "iteration=40s")
    jobs.wait_for(out, "cyc1", 3, run[0].started)
    os.kill(run[1].started.pid, signal.SIGSTOP)
    time.sleep(3)
    status = [*jobs.STAGERUN, "status", str(out)]
    first = hosts["node3"].run(*status, "--json", check=True)
    seen = json.loads(first.stdout)
    assert seen["state"] == "running", first.stdout
    print("\n" + hosts["node3"].run(*status, check=True).stdout)
    assert [run[0].wait(120), run[2].wait(120)] == [69, 69]
    assert not jobs.nothing_left(hosts), "its own monitor ends it"
    os.kill(run[1].started.process.pid, signal.SIGCONT)  # nsenter stops with what it has started
    run[1].wait(10)
    then = hosts["node3"].run(*status, check=True).stdout
    assert "rank 1 on node2" in then, then
    assert json.loads(hosts["node3"].run(*status, "--json", check=True).stdout)["state"] == "failed"
    print(then)
