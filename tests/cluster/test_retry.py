"""`stagerun retry` round a launcher that ends all ranks when one dies, and what is left of ranks when their launcher is killed."""

import os
import signal

import processes
import pytest

from cluster import jobs, pids
from cluster.hosts import Cluster
from cluster.test_launchers import hydra_4, open_mpi_4

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("typed", [open_mpi_4, hydra_4], ids=lambda typed: typed.__name__)
def test_a_rank_that_is_killed(typed, hosts, schedule, reference, tmp_path):
    out = tmp_path / "out"
    # `retry` reads the words after `stagerun run`.
    stagerun = tmp_path / "stagerun"
    stagerun.write_text(f'#!/bin/sh\nexec {" ".join(jobs.STAGERUN)} "$@"\n')
    stagerun.chmod(0o755)
    run = [stagerun, *jobs.words(schedule, out)]
    started = hosts["node1"].start(*jobs.STAGERUN, "retry", "--", *typed(hosts), *run)
    jobs.wait_for(out, "cyc1", 4, started)
    for pid in workers(hosts, "node3"):
        os.kill(pid, signal.SIGKILL)
    code, said = started.wait(500)
    assert code == 0 and "restart 1 in" in said, said
    assert processes.ends(out) == reference
    assert not jobs.nothing_left(hosts)


@pytest.mark.parametrize("typed", [open_mpi_4, hydra_4], ids=lambda typed: typed.__name__)
def test_a_launcher_that_is_killed_leaves_no_rank(typed, hosts, schedule, tmp_path):
    out = tmp_path / "out"
    started = hosts["node1"].start(*typed(hosts), *jobs.STAGERUN, *jobs.words(schedule, out))
    jobs.wait_for(out, "init", 4, started)
    started.signal(signal.SIGKILL)
    assert not jobs.nothing_left(hosts), "workers outlive their launcher"
    started.wait(10)


def workers(hosts: Cluster, name: str) -> list[int]:
    """The Python processes that train there, not what watches them or started them."""
    found = hosts[name].processes("stagerun run")
    return [pid for pid in found if "python" in pids.command_line(pid).split()[0] and "monitor" not in found[pid]]
