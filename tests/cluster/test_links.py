"""A host that nothing gets to or from any more: for some seconds nothing happens, for good it is named, within its time-out and a second."""

import time
from collections.abc import Mapping
from pathlib import Path

import processes
import pytest
from facade import Log
from processes import Spoken

from cluster import jobs
from cluster.hosts import Cluster

pytestmark = pytest.mark.cluster
TIME_OUT_S = 5.0
HOOK = str(Path(__file__).parent / "hook")


def start(
    hosts: Cluster,
    schedule: Path,
    out: Path,
    *more: str,
    hook: Mapping[int, Mapping[str, str]] | None = None,
    **init: int,
) -> list[Spoken]:
    """A worker on each host, brought together by the environment alone. `hook`: by rank, what is in its environment for cluster/hook."""
    words = [*jobs.STAGERUN, *jobs.words(schedule, out, *more, **init)]
    world = {
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29400",
    }
    each = [world | {"RANK": str(rank)} for rank in range(3)]
    for rank, given in (hook or {}).items():
        each[rank] |= {"PYTHONPATH": HOOK, **given}
    return [Spoken(host.start(*words, env=env)) for host, env in zip(hosts.hosts, each, strict=True)]


def test_a_cut_of_5_s_heals(hosts, schedule, reference, tmp_path):
    out = tmp_path / "out"
    run = start(hosts, schedule, out, "--timeout", "iteration=30s")
    jobs.wait_for(out, "cyc1", 3, run[0].run)
    hosts["node2"].cut()
    tail = Log(out / "log.jsonl")
    time.sleep(0.5)
    jobs.seen(tail)
    time.sleep(4.5)
    assert not jobs.seen(tail), "nothing goes on meanwhile"
    hosts["node2"].heal()
    healed = time.monotonic()
    while not jobs.seen(tail):
        assert time.monotonic() < healed + 30, run[0].text
        time.sleep(0.02)
    again = time.monotonic() - healed
    assert [one.ended(300) for one in run] == [0, 0, 0], run[0].text
    assert processes.ends(out) == reference
    print(f"\ncut for 5 s: training goes on {again:.1f} s after the link is back, same bits")


@pytest.mark.parametrize("name", ["node1", "node2", "node3"])
def test_a_cut_for_good_is_told_in_time(name, hosts, schedule, tmp_path):
    out = tmp_path / "out"
    run = start(hosts, schedule, out, "--timeout", f"iteration={TIME_OUT_S:.0f}s")
    jobs.wait_for(out, "cyc1", 3, run[0].run)
    hosts[name].cut()
    cut = time.monotonic()
    print(f"\n{name} cut off for good, time-out {TIME_OUT_S:.0f} s: {told_in_time(hosts, run, name, cut)}")


def told_in_time(hosts: Cluster, run: list[Spoken], name: str, cut: float) -> str:
    """The ranks elsewhere end with 69, having named the host that was cut off at `cut`, and leave nothing; when each did so, in words."""
    codes = [one.ended(60) for one in run]
    rank = int(name[-1]) - 1
    told = {}
    for other, one in enumerate(run):
        if other != rank:
            said = one.told(f"rank {rank} on {name} can't be reached")
            assert said is not None, f"rank {other}: {one.text[-1500:]}"
            told[other] = said[0] - cut
    assert all(codes[other] == 69 for other in told), codes
    assert max(told.values()) < TIME_OUT_S + 1, told
    assert not jobs.nothing_left(hosts)
    times = ", ".join(f"rank {other} after {s:.1f} s" for other, s in told.items())
    return f"named by {times}; exit codes {codes}"


def test_power_off_where_the_launcher_and_rank_0_are(hosts, schedule, reference, tmp_path):
    """Nobody is left to go on: the workers of the others end, and the same command goes on when it is back."""
    out = tmp_path / "out"
    words = [*jobs.STAGERUN, *jobs.words(schedule, out, "--hosts", "node1,node2,node3", "--timeout", "iteration=10s")]
    run = hosts["node1"].start(*words)
    jobs.wait_for(out, "cyc2", 5, run)
    hosts["node1"].power_off()
    off = time.monotonic()
    run.wait(30)
    while jobs.nothing_left(hosts, 0.0):
        assert time.monotonic() < off + 120, jobs.nothing_left(hosts)
        time.sleep(0.1)
    ended = time.monotonic() - off
    hosts["node1"].power_on()
    hosts["node1"].wait_up()
    code, said = hosts["node1"].start(*words).wait(400)
    assert code == 0, said
    assert processes.ends(out) == reference
    print(
        f"\nnode1 with the launcher off: workers elsewhere ended after {ended:.1f} s; the same command: the same bits"
    )
