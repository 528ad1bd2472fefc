"""Where workers meet when no one says where: what ranks agree on through their launcher, and what is computed."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from facade import PeerError, World

from stagerun.launch import ancestors, meeting
from stagerun.launch.addresses import Interface, by_default
from stagerun.launch.meeting import job_number, meet, port_of
from stagerun.system.process import Process


def test_a_port_that_all_compute_alike() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert (
        job_number(step)
        != job_number({**step, "SLURM_STEP_ID": "1"})
        != job_number({**step, "SLURM_RESTART_COUNT": "1"})
    )
    assert 20000 <= port_of(job_number(step)) < 30000
    assert job_number({"PATH": "/bin"}) == ""


def said(rank: int, size: int, local_size: int, launcher: str, environment: dict[str, str]) -> Callable[[], object]:
    world = World(rank=rank, size=size, local_rank=0, local_size=local_size, launcher=launcher)
    return lambda: meet(world, environment, patience=5.0)


def test_one_node_needs_no_more_than_the_jobs_number() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "far"}
    first, second = (said(rank, 2, 2, "srun", step)() for rank in range(2))
    assert first == second == meeting.Meeting("127.0.0.1", port_of(job_number(step)), "lo")


def test_what_is_given_counts() -> None:
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert said(0, 2, 2, "mpiexec.hydra", given)() == meeting.Meeting("127.0.0.1", 29500)


ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
wlan0\t00000000\t0100A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\t0100010A\t0003\t0\t0\t100\t00000000\t0\t0\t0
"""
DOCKER, ETH = Interface("docker0", "172.17.0.1"), Interface("eth0", "10.1.0.1")


@pytest.fixture
def misleading(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host with these two, whose own name leads to its loopback device."""
    here = {"interfaces": lambda: [DOCKER, ETH], "by_default": lambda here: by_default(here, ROUTES)}
    for name, found in {**here, "own_name_misleads": lambda: True, "resolve": lambda name: "10.9.0.9"}.items():
        monkeypatch.setattr(meeting, name, found)
    return monkeypatch


def test_rank_0_at_its_own_name_takes_the_interface_of_the_default_route(misleading: object) -> None:
    assert by_default([DOCKER, ETH], ROUTES) == ETH
    assert by_default([DOCKER], ROUTES) == by_default([DOCKER], "") == DOCKER
    assert by_default([DOCKER, ETH], "") is None
    given = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert said(0, 2, 1, "srun", given)() == meeting.Meeting("localhost", 29500, "eth0")


def test_a_share_of_what_the_job_has_of_a_shared_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun's daemon may use all of it."""
    monkeypatch.setattr(ancestors, "launcher", lambda: Process(7, "slurmstepd", "S", 1, 0))
    monkeypatch.setattr(ancestors.os, "sched_getaffinity", lambda pid: set(range(64 if pid else 2)))
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    assert "2 of the 32 processors" in ancestors.bound_note(2, "srun")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    assert ancestors.bound_note(2, "srun") == "" and "32" in ancestors.bound_note(2, "Open MPI's mpirun")


@pytest.mark.parametrize(
    "launcher, environment, text",
    [
        ("Open MPI's mpirun", {}, "Open MPI's mpirun has started 2 workers, but doesn't say where they meet"),
        ("mpiexec.hydra", {}, "mpiexec.hydra has started 2 workers, but doesn't say where they meet"),
        ("srun", {"SLURM_STEP_NODELIST": "n[1-"}, "the node list of this step can't be read"),
        ("srun", {"SLURM_STEP_NODELIST": "no.such.host.invalid,b"}, "`no.such.host.invalid`, where rank 0 is"),
        ("the environment", {"RANK": "0", "WORLD_SIZE": "2"}, "not MASTER_ADDR and MASTER_PORT"),
        ("the environment", {"MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT must be a port number"),
    ],
)
def test_no_place_to_meet_is_reported(
    launcher: str, environment: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # it can't be imported
    with pytest.raises(PeerError, match=text):
        said(0, 2, 1, launcher, environment)()


class OfFour:
    """What `mpi4py.MPI` is to four ranks."""

    size = 4

    def Bcast(self, data: bytearray) -> None:
        if data.strip():
            self.said = bytes(data)
        data[:] = self.said


@pytest.mark.parametrize(
    "wanted, misleads, address, interface",
    [("docker0", False, "172.17.0.1", "docker0"), ("", True, "10.1.0.1", "eth0"), ("", False, "10.9.0.9", "")],
)
def test_under_mpi_rank_0_says_by_mpi4py_where_it_is(
    wanted: str, misleads: bool, address: str, interface: str, misleading: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(COMM_WORLD=OfFour(), Init=lambda: None, Finalize=lambda: None)
    mpi4py = ModuleType("mpi4py")
    mpi4py.rc, mpi4py.MPI, mpi4py.__spec__ = SimpleNamespace(), fake, ModuleSpec("mpi4py", None)  # type: ignore[attr-defined]
    misleading.setitem(sys.modules, "mpi4py", mpi4py)
    misleading.setattr(meeting, "own_name_misleads", lambda: misleads)
    environment = {"GLOO_SOCKET_IFNAME": wanted} if wanted else {}
    first, other = (said(rank, 4, 2, "Open MPI's mpirun", environment)() for rank in (0, 3))
    assert isinstance(first, meeting.Meeting) and first == other
    assert (first.address, first.interface) == (address, interface) and first.port > 0
    with pytest.raises(PeerError, match="it sees 4 of 6 ranks") as caught:
        said(0, 6, 2, "Open MPI's mpirun", {})()
    assert "-x MASTER_ADDR=HOST" in caught.value.hint
