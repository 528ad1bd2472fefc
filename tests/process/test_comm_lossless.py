"""Coded gradients between real processes over gloo: the bits of the sums, and of training, are those without coding.

Run as a program, this file starts the workers: it imports torch once and forks them, a fresh set for each number.
"""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import forked
import pytest
import torch
from engine_help import CPU, SOLVER, ConvNet, dataset, tensors, updates

from stagerun.base.errors import PeerError
from stagerun.base.recipe import Determinism, Precision
from stagerun.comm import Comm, SoloComm, TorchComm, elastic, lossless, reduce
from stagerun.comm.lossless import coded
from stagerun.system.world import World

ELEMENTS = (1, 7, 1000, 1_000_003, 1 << 20)
SIZES = (1, 2, 3, 4, 5)
LOGICAL = 6
AT_ONCE_S = 60  # on a busy machine, where gloo would wait for half an hour


def vector(comm: Comm, n: int) -> torch.Tensor:
    """Values of sizes far apart, so that each order of adding has other bits."""
    values = torch.randn(n, generator=torch.Generator().manual_seed(comm.rank))
    return values * 10.0 ** (torch.arange(n) % 7 - 3 + comm.rank % 3)


def sums(comm: Comm) -> dict[str, bool]:
    ours = coded(comm)
    dense, found = [vector(comm, n) for n in ELEMENTS], [vector(comm, n) for n in ELEMENTS]
    for tensor in dense:
        comm.all_reduce(tensor)()
    waits = [ours.all_reduce(tensor) for tensor in found]  # all under way at a time
    for wait in waits:
        wait()
    ours.barrier()
    return {f"sum of {n}": torch.equal(a, b) for n, a, b in zip(ELEMENTS, dense, found, strict=True)}


def would_tell_another_order(comm: Comm) -> bool:
    """From three ranks on: the test above can fail."""
    n = ELEMENTS[-1]
    everyone = [torch.zeros(n) for _ in range(comm.size)]
    everyone[comm.rank] = vector(comm, n)
    comm.complete(everyone)()
    total = vector(comm, n)
    comm.all_reduce(total)()
    return not torch.equal(sum(everyone), total)


def trained(comm: Comm, determinism: Determinism) -> dict[str, torch.Tensor]:
    solver = replace(SOLVER, batch_size=LOGICAL * 2, device_batch_size=2, precision=Precision.FP32)
    batches = [dataset(solver.batch_size, seed=i) for i in range(5)]
    return tensors(updates(ConvNet(), solver, batches, comm, determinism)[0])


def checks(comm: Comm) -> dict[str, bool]:
    found = sums(comm)
    part = comm.first(2) if comm.size > 2 else None
    if part is not None:
        found |= {f"{name} on the first two": same for name, same in sums(part).items()}
    if comm.size > 2:
        found["would tell another order"] = would_tell_another_order(comm)
    for determinism in (Determinism.FIXED, Determinism.ELASTIC):
        dense, ours = trained(comm, determinism), trained(coded(comm), determinism)
        found[determinism.name] = all(torch.equal(dense[name], ours[name]) for name in dense)
    return found


def peer_killed(comm: Comm) -> dict[str, object]:
    """The last rank kills itself in the middle; what the others see, and after how many seconds."""
    ours = coded(comm)
    ours.all_reduce(vector(comm, 1 << 20))()
    ours.barrier()
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        ours.all_reduce(vector(comm, 1 << 20))()
    except PeerError as error:
        return {"message": error.message, "seconds": time.monotonic() - began}
    return {}


def worker(rank: int, size: int, kind: str, out: Path) -> None:
    torch.set_num_threads(1)
    lossless.LEAST_BYTES = 0
    reduce.CHUNK_BYTES = elastic.CHUNK_BYTES = elastic.SLICE_BYTES = 256
    comm: Comm = SoloComm()
    if size > 1:
        comm = TorchComm(World(rank=rank, size=size, local_rank=rank, local_size=size), CPU)
    found = checks(comm) if kind == "checks" else peer_killed(comm)
    (out / f"{kind}-{size}-{rank}").write_text(json.dumps(found))
    if kind == "checks":
        comm.barrier()  # rank 0 holds the meeting point
        comm.close()


def main(out: Path) -> int:
    failed = 0
    for size, kind in [*((size, "checks") for size in SIZES), (3, "killed")]:
        forked.meet()
        codes = forked.together(size, partial(worker, size=size, kind=kind, out=out))
        if codes != [0] * (size - 1) + [-signal.SIGKILL if kind == "killed" else 0]:
            print(f"{size} workers, {kind}: exit codes {codes}", file=sys.stderr)
            failed += 1
    return failed


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("coded")
    forked.run_program(__file__, folder, timeout=1200)
    return folder


@pytest.mark.parametrize("size", SIZES)
def test_the_bits_are_those_without_coding(out, size):
    for rank in range(size):
        found = json.loads((out / f"checks-{size}-{rank}").read_text())
        assert len(found) >= len(ELEMENTS) + 2
        assert [name for name, same in found.items() if not same] == []


def test_a_killed_peer_is_told_to_the_others_at_once(out):
    for rank in (0, 1):
        seen = json.loads((out / f"killed-3-{rank}").read_text())
        assert "lost the other workers" in seen["message"]
        assert seen["seconds"] < AT_ONCE_S


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
