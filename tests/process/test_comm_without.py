"""A job that goes on without workers that were killed: real processes over gloo, by each way in which the store is served.

Run as a program, this file starts the workers: it imports torch once and forks them, a fresh set for each way.
"""

import json
import os
import signal
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import forked
import pytest
import torch
from engine_help import CPU, peer_error
from test_comm_gloo import collectives

from stagerun.comm import Comm, TorchComm, group
from stagerun.comm.line import line
from stagerun.comm.lossless import coded
from stagerun.comm.store import serve
from stagerun.system.world import World

SIZE = 6
KILLED = {2, 3, 4, 5}
WAYS = ("launcher", "rank 0", "torch")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def worker(rank: int, way: str, out: Path) -> None:
    torch.set_num_threads(1)
    group.MEETING = timedelta(seconds=1.5)  # as long as those that live may take, on a busy machine
    comm = TorchComm(World(rank=rank, size=SIZE, local_rank=rank, local_size=SIZE if way != "torch" else 1), CPU)
    twin, both = comm.twin(), comm.first(2)
    if both is not None:
        both.twin()  # so that the ranks have been in different numbers of groups
    lossless = coded(comm)
    seen: dict[str, object] = {}

    comm.barrier()
    if rank == 2:
        die()
    seen["missed"] = peer_error(comm.barrier)
    comm.without({2})
    assert (comm.rank, comm.size) == ([0, 1, -1, 2, 3, 4][rank], 5)
    everything(comm, twin)
    part = comm.part([0, 2, 4])  # workers 0, 3 and 5
    if part is not None:
        collectives(part)
        everything(part, part.twin())

    # Two more, of which the others know one.
    if rank in (3, 5):
        die()
    seen["alone"] = peer_error(lambda: comm.without({comm.workers.index(3)}))
    comm.without({comm.workers.index(3), comm.workers.index(5)})
    everything(comm, twin)
    seen["workers"] = list(comm.workers)

    # Coded sums follow, and lines are made as ever.
    lossless.without(())
    assert (lossless.rank, lossless.size) == (comm.rank, comm.size)
    total = torch.full((100_000,), comm.rank + 1.0)
    lossless.all_reduce(total)()
    assert torch.equal(total, torch.full_like(total, 6.0))
    lossless.barrier()
    if comm.rank < 2:
        to = line(comm, 1 - comm.rank, "x")
        got = torch.zeros(1)
        if comm.rank:
            to.send(got + 7)
        else:
            to.recv(got)
            assert got.item() == 7
        to.close()
    comm.barrier()

    if rank == 4:
        die()
    comm.without({2})
    everything(comm, twin)
    if rank == 0:
        (out / f"seen {way}").write_text(json.dumps(seen))
    if rank == 1:
        comm.close()
        return
    comm.without({1})  # rank 0 alone
    everything(comm, twin)
    comm.close()


def everything(comm: Comm, twin: Comm) -> None:
    collectives(comm)
    assert (twin.rank, twin.size) == (comm.rank, comm.size)
    collectives(twin)


def main(out: Path) -> int:
    failed = 0
    for way in WAYS:
        # A name may be that of another address elsewhere, so with it rank 0 of two hosts leaves the store to torch.
        port = forked.meet("localhost" if way == "torch" else "127.0.0.1")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(way == "launcher")
        served = serve("127.0.0.1", port) if way == "launcher" else None
        codes = forked.together(SIZE, partial(worker, way=way, out=out), patience=50)
        del served
        if codes != [-signal.SIGKILL if rank in KILLED else 0 for rank in range(SIZE)]:
            print(f"{way}: exit codes {codes}", file=sys.stderr)
            failed += 1
    return failed


# -- what is asserted of it


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without")
    said = forked.run_program(__file__, folder, timeout=120, GLOO_SOCKET_IFNAME="lo")
    assert said == "", "the end says nothing"
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_those_that_are_left_go_on_as_a_job_of_fewer(out: Path, way: str) -> None:
    seen = json.loads((out / f"seen {way}").read_text())
    assert seen["workers"] == [0, 1, 4]
    assert "lost the other workers" in seen["missed"]
    assert seen["alone"] == "worker 5 did not come within 2 s"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
