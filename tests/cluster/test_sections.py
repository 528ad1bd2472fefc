"""What befalls a host while it copies, evaluates or saves; a host that is slow; one that hangs, seen from another."""

import json
import os
import re
import signal
import time

import processes
import pytest

from cluster import jobs
from cluster.hosts import Cluster
from cluster.test_links import TIME_OUT_S, start, told_in_time

pytestmark = pytest.mark.cluster
TIME_OUTS = [
    word for name in ("copy", "iteration", "evaluation", "save") for word in ("--timeout", f"{name}={TIME_OUT_S:.0f}s")
]


def on_scratch(hosts: Cluster, name: str) -> list[str]:
    """Options for copies in a new folder of each host's own /tmp."""
    for host in hosts.hosts:
        host.run("mkdir", f"/tmp/{name}", check=True)
    return ["--set", f"data.scratch=/tmp/{name}"]


@pytest.mark.parametrize("name", ["node1", "node2"])
@pytest.mark.parametrize("section", ["copy", "evaluation", "save"])
def test_a_cut_is_told_in_time(section, name, hosts, schedule, reference, tmp_path):
    """Rank 0, on node1, saves. The same command then goes on to the same bits."""
    out, mark, rank = tmp_path / "out", tmp_path / "mark", int(name[-1]) - 1
    scratch = on_scratch(hosts, f"{section}-{name}")
    run = start(hosts, schedule, out, *TIME_OUTS, *scratch, hook={rank: {"HELD_IN": f"{section}={mark}"}})
    until = time.monotonic() + 200
    while not mark.exists():
        assert time.monotonic() < until and run[rank].run.process.poll() is None, run[rank].text
        time.sleep(0.01)
    hosts[name].cut()
    cut = time.monotonic()
    told = told_in_time(hosts, run, name, cut)
    hosts[name].heal()
    again = start(hosts, schedule, out, *scratch)
    assert [one.ended(400) for one in again] == [0, 0, 0], again[0].text
    assert processes.ends(out) == reference
    print(f"\n{name} cut off in {section}, time-out {TIME_OUT_S:.0f} s: {told}; then the same bits")


def test_a_slow_host_is_named(hosts, schedule, tmp_path):
    # A device batch takes some 20 to 50 ms here.
    long = {"max_iter": 4000, "lr_iter": 8000}
    run = start(hosts, schedule, tmp_path / "out", hook={2: {"DAWDLES": "200"}}, **long)
    until = time.monotonic() + 300
    while (
        found := re.search(r"rank 2 on (\S+) is slow: a device batch takes it \S+ s, (\S+) x the median", run[0].text)
    ) is None:
        assert time.monotonic() < until and run[0].run.process.poll() is None, run[0].text
        time.sleep(0.1)
    assert found[1] == "node3" and float(found[2]) > 1.5
    for one in run:
        one.run.signal(signal.SIGTERM)
    assert [one.ended(60) for one in run] == [75, 75, 75]
    named = re.findall(r"(\S+) is slow", run[0].text)
    assert set(named) == {"node3"}, run[0].text
    print(f"\n{found[0]}")


def test_a_rank_that_hangs_seen_from_another_host(hosts, schedule, tmp_path):
    out = tmp_path / "out"
    run = start(hosts, schedule, out, "--timeout", "iteration=40s")
    jobs.wait_for(out, "cyc1", 3, run[0].run)
    os.kill(run[1].run.pid, signal.SIGSTOP)
    time.sleep(3)
    status = [*jobs.STAGERUN, "status", str(out)]
    first = hosts["node3"].run(*status, "--json", check=True)
    seen = json.loads(first.stdout)
    assert seen["state"] == "running", first.stdout
    print("\n" + hosts["node3"].run(*status, check=True).stdout)
    assert [run[0].ended(120), run[2].ended(120)] == [69, 69]
    assert not jobs.nothing_left(hosts), "its own monitor ends it"
    os.kill(run[1].run.process.pid, signal.SIGCONT)  # nsenter stops with what it has started
    run[1].ended(10)
    then = hosts["node3"].run(*status, check=True).stdout
    assert "rank 1 on node2" in then, then
    assert json.loads(hosts["node3"].run(*status, "--json", check=True).stdout)["state"] == "failed"
    print(then)
