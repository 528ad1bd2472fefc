"""Each of three hosts loses its power, once in each of five stages, with nobody told of it: the run goes on by itself with the two that
are left, from the newest snapshot, and ends in the bits of a run that nothing happened to."""

import time
from pathlib import Path

import processes
import pytest

from cluster import jobs
from cluster.hosts import Cluster, Started

pytestmark = pytest.mark.cluster
HOSTS = ("node1", "node2", "node3")  # node1 has rank 0, and is where they meet
_SAID: list[list[object]] = []


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def reference(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """For any number of workers."""
    return jobs.locally(schedule, tmp_path_factory.mktemp("reference") / "out", 3, *jobs.ELASTIC)


def start(hosts: Cluster, launcher: str, schedule: Path, out: Path, *more: str) -> Started:
    words = jobs.words(schedule, out, *jobs.ELASTIC, "--hosts", ",".join(HOSTS), "--nproc", "1", *more)
    return hosts[launcher].start(*jobs.STAGERUN, *words)


@pytest.mark.parametrize("stage", jobs.LENGTHS)
@pytest.mark.parametrize("name", HOSTS)
def test_a_host_that_loses_power_is_named(
    name: str, stage: str, four: Cluster, schedule: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    """The others end, and the same command goes on when it is back."""
    out = tmp_path / "out"
    run = jobs.Spoken(start(four, "node4", schedule, out, "--timeout", "iteration=10s"))
    jobs.wait_for(out, stage, 5, run.started)
    four[name].power_off()
    off = time.monotonic()
    code = run.wait(400)
    ended = time.monotonic() - off
    assert code == 69, run.text
    named = run.when(f"{name} ", since=off)
    assert named is not None, run.text
    assert not jobs.nothing_left(four, 30)
    four[name].power_on()
    four[name].wait_up()
    code, said = start(four, "node4", schedule, out).wait(400)
    assert code == 0, said
    assert processes.ends(out) == reference
    _SAID.append([name, stage, f"{named - off:.1f}", f"{ended:.1f}", "69; goes on, same bits"])
    print("\n" + jobs.table(("power off", "in stage", "named after s", "ended after s", "end"), _SAID))


def test_the_launchers_own_host(hosts: Cluster, schedule: Path, reference: dict[str, str], tmp_path: Path) -> None:
    """Nobody is left to go on: the workers of the others end, and the same command goes on when it is back."""
    out = tmp_path / "out"
    run = start(hosts, "node1", schedule, out, "--timeout", "iteration=10s")
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
    code, said = start(hosts, "node1", schedule, out).wait(400)
    assert code == 0, said
    assert processes.ends(out) == reference
    print(
        f"\nnode1 with the launcher off: workers elsewhere ended after {ended:.1f} s; the same command: the same bits"
    )
