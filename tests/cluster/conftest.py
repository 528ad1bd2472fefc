"""Hosts for tests: three, made once, and put in order before each test. They end with this process, however that one ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import needed
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


def _made(factory: pytest.TempPathFactory, count: int, **options: str) -> Iterator[Cluster]:
    require({})
    with cluster(count, shared=shared_folders(factory), **options) as made:
        yield made


def _in_order(made: Cluster) -> Iterator[Cluster]:
    made.quiet()
    yield made
    made.quiet()


@pytest.fixture(scope="session")
def _three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from _made(tmp_path_factory, 3)


@pytest.fixture
def hosts(_three: Cluster) -> Iterator[Cluster]:
    """node1, node2 and node3, on a bridge. They see `tmp_path`, and each has a /tmp of its own beside it."""
    yield from _in_order(_three)


@pytest.fixture(scope="session")
def _three_shaped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from _made(tmp_path_factory, 3, switch="user")


@pytest.fixture
def shaped(_three_shaped: Cluster) -> Iterator[Cluster]:
    """As `hosts`, on the switch that knows delay and loss."""
    yield from _in_order(_three_shaped)


@pytest.fixture(scope="session")
def _four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from _made(tmp_path_factory, 4)


@pytest.fixture
def four(_four: Cluster) -> Iterator[Cluster]:
    """As `hosts`, and node4, where a launcher may be that outlives each of the others."""
    yield from _in_order(_four)


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
