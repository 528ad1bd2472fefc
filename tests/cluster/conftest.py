"""Hosts for tests: three, made once, and put in order before each test. They end with this process, however that one ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import jobs, needed
from cluster import slurm as slurm_of
from cluster.hosts import Cluster, cluster


def require(commands: dict[str, str]) -> None:
    """Skips where they, or hosts at all, can't be had."""
    if why := needed.missing({**needed.HOSTS, **commands}):
        pytest.skip(why)


def shared_folders(factory: pytest.TempPathFactory) -> list[Path]:
    """What is below /tmp and the hosts are to see all the same."""
    wheels = [needed.wheel(name) for name in ("openmpi5", "mpich5")]
    checkout = Path(__file__).resolve().parents[2]
    here = [checkout] if checkout.is_relative_to("/tmp") else []
    return [factory.getbasetemp(), *here, *(Path(folder).parent for folder in wheels if folder)]


@pytest.fixture(scope="session")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def reference(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The ends of three workers on this machine."""
    return jobs.locally(schedule, tmp_path_factory.mktemp("reference") / "out", 3)


@pytest.fixture(scope="session")
def _three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require({})
    with cluster(3, shared=shared_folders(tmp_path_factory)) as made:
        yield made


@pytest.fixture
def hosts(_three: Cluster) -> Iterator[Cluster]:
    """node1, node2 and node3, on a bridge. They see `tmp_path`, and each has a /tmp of its own beside it."""
    _three.quiet()
    yield _three
    _three.quiet()


@pytest.fixture(scope="session")
def _slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_of.Slurm]:
    require(needed.SLURM)
    with cluster(4, shared=shared_folders(tmp_path_factory)) as made:
        yield slurm_of.start(made, head=made.hosts[3], nodes=made.hosts[:3])


@pytest.fixture
def slurm(_slurm: slurm_of.Slurm) -> Iterator[slurm_of.Slurm]:
    """Slurm with three nodes, its head on a fourth host: each node may be lost."""
    _slurm.cluster.quiet()
    _slurm.quiet()
    yield _slurm
    _slurm.cluster.quiet()
    _slurm.quiet()
