"""How many collectives a job of many workers makes: rank 0's calls of torch.distributed, counted in one process without the others."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nan_help
import pytest
import torch
import torch.distributed as dist
from engine_help import CPU
from facade import World

from stagerun.comm import TorchComm, gather_json


class Done(dist.Work):
    def wait(self, timeout: object = None) -> bool:
        return True


class Counted(dist.ProcessGroup):
    """A group whose other ranks hold what rank 0 does. `calls` counts them."""

    def __init__(self, store: object, rank: int, size: int, timeout: object) -> None:
        super().__init__(rank, size)
        self.many, self.calls = size, Counter[str]()

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> Done:
        self.calls["all_reduce"] += 1
        for tensor in tensors:
            if tensor.dtype == torch.int64:  # the digest of each rank in its place
                tensor[:-1] = tensor[0]
        return Done()

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: object) -> Done:
        self.calls["all_gather"] += 1
        torch._foreach_copy_(outputs[0], inputs * self.many)
        return Done()

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Done:
        self.calls["broadcast"] += 1
        return Done()

    def alltoall_base(self, received: torch.Tensor, sent: torch.Tensor, *more: object) -> Done:
        self.calls["all_to_all"] += 1
        received.copy_(sent)
        return Done()


@contextmanager
def job(workers: int, folder: Path) -> Iterator[tuple[TorchComm, Counter[str]]]:
    """A job of so many workers, all of one machine, which meet in `folder`; and what it calls."""
    if not hasattr(dist.Backend, "COUNTED"):
        dist.Backend.register_backend("counted", Counted, devices=["cpu"])
    (folder / "store").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGERUN_REPORT_DIR", str(folder))
        comm = TorchComm(World(size=workers, local_size=workers), CPU, backend="counted")
        yield comm, dist.group.WORLD.calls
        comm.close()


@pytest.mark.long
def test_a_run_makes_as_many_collectives_with_900_workers_as_with_two(tmp_path):
    """At the start, in an iteration, at a snapshot and at the end."""
    data, found = nan_help.make_data(tmp_path / "data"), []
    for workers in (2, 900):
        of = nan_help.make_schedule(tmp_path / f"{workers}", data, "snapshot: 1", main="max_iter: 2")
        with job(workers, of) as (comm, calls):
            sizes = (f"solver.batch_size={workers}", "solver.device_batch_size=1")
            events = nan_help.lives(of, tmp_path / f"out-{workers}", 1, *sizes, comm=comm)
        assert sum(type(event).__name__ == "SnapshotWritten" for event in events) == 2
        found.append(calls)
    assert found[0] == found[1]


def test_every_worker_hears_of_all_others_in_two_collectives(tmp_path):
    with job(900, tmp_path) as (comm, calls):
        assert gather_json(comm, {"host": "ä"}) == [{"host": "ä"}] * 900
    assert calls == {"all_gather": 2}


def test_the_pieces_of_many_workers_are_completed_in_one_collective(tmp_path):
    with job(900, tmp_path) as (comm, calls):
        pieces = [torch.full((3,), float(rank == 0)) for rank in range(900)]
        comm.complete(pieces)()
    assert calls == {"all_to_all": 1} and torch.stack(pieces).eq(1).all() and comm.traffic.sent == 899 * 12
