"""What workers compare when they have met, on threads: which of them is odd, and that nobody is left waiting."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from engine_help import ThreadComm, Threads
from facade import StagerunError, World

from stagerun.launch.compare import Images, Reads
from stagerun.system.lmdb_file import Glance
from stagerun.train import agreement
from stagerun.train.agreement import ToldByAnother, require_same_code, require_same_schedule

SEEN = Glance(records=9, size=4096, fingerprint="f" * 64, ends="e" * 32)
READS = Reads(settings="s", files={}, images=(Images(role="train", path="/x", seen=SEEN),))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """What the host of a thread is and has."""
    local = threading.local()
    monkeypatch.setattr(agreement, "host_name", lambda: local.host)
    monkeypatch.setattr(agreement, "version", lambda name: local.torch)
    monkeypatch.setattr(
        agreement, "what_is_read", lambda *_, images: local.reads if images else replace(local.reads, images=())
    )
    return local


def ended(size: int, do: Callable[[ThreadComm], None]) -> list[StagerunError | None]:
    """What each rank raises."""

    def one(comm: ThreadComm) -> StagerunError | None:
        try:
            do(comm)
        except StagerunError as error:
            return error
        return None

    return Threads(size).run(one)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_odd_host_is_named_by_rank_0_alone(here: threading.local, odd: int) -> None:
    def do(comm: ThreadComm) -> None:
        here.host, here.torch = f"node{comm.rank}", "1.0.0" if comm.rank == odd else "2.13.0+cpu"
        require_same_code(comm)

    found = ended(3, do)
    assert [error.exit_code for error in found if error] == [64] * 3
    assert found[0] is not None and f"node{odd}: torch: 1.0.0; 2.13.0 on" in found[0].render()
    assert isinstance(found[1], ToldByAnother) and isinstance(found[2], ToldByAnother)


def test_another_build_of_torch_is_passed_over(here: threading.local) -> None:
    """It is a matter of bits, which is told elsewhere."""

    def do(comm: ThreadComm) -> None:
        here.host, here.torch = f"node{comm.rank}", f"2.13.0+{comm.rank}"
        require_same_code(comm)

    assert ended(2, do) == [None] * 2


@pytest.mark.parametrize("fingerprints, said", [("ff", ""), ("f0", "train images (/x): ")])
def test_images_that_one_worker_of_a_host_has_looked_at_are_the_hosts(
    here: threading.local, fingerprints: str, said: str
) -> None:
    def do(comm: ThreadComm) -> None:
        node, local = divmod(comm.rank, 2)
        here.host = f"node{node}"
        seen = replace(SEEN, fingerprint=fingerprints[node] * 64)
        here.reads = replace(READS, images=(replace(READS.images[0], seen=seen),))
        require_same_schedule(comm, World(rank=comm.rank, size=4, local_rank=local, local_size=2), None)  # type: ignore[arg-type]

    found = ended(4, do)
    if not said:
        assert found == [None] * 4
        return
    assert [error.exit_code for error in found if error] == [65] * 4
    text = found[0].render() if found[0] else ""
    assert said in text and "on node0" in text and "on node1" in text and "rank" not in text
