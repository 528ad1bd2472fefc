"""Hosts for tests: three, made once, and put in order before each test. They end with this process, however that one ends."""

from pathlib import Path

import pytest

from cluster import jobs, needed
from cluster import slurm as slurm_of
from cluster.hosts import cluster


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
def schedule(tmp_path_factory):
    return jobs.prepare(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def reference(schedule, tmp_path_factory):
    """The ends of three workers on this machine."""
    return jobs.locally(schedule, tmp_path_factory.mktemp("reference") / "out", 3)


@pytest.fixture(scope="session")
def _three(tmp_path_factory):
    require({})
    with cluster(3, shared=shared_folders(tmp_path_factory)) as made:
        yield made


@pytest.fixture
def hosts(_three):
    """node1, node2 and node3, on a bridge. They see `tmp_path`, and each has a /tmp of its own beside it."""
    _three.quiet()
    yield _three
    _three.quiet()


@pytest.fixture(scope="session")
def _slurm(tmp_path_factory):
    require(needed.SLURM)
    with cluster(4, shared=shared_folders(tmp_path_factory)) as made:
        yield slurm_of.start(made, head=made.hosts[3], nodes=made.hosts[:3])


@pytest.fixture
def slurm(_slurm):
    """Slurm with three nodes, its head on a fourth host: each node may be lost."""
    _slurm.cluster.quiet()
    _slurm.quiet()
    yield _slurm
    _slurm.cluster.quiet()
    _slurm.quiet()
