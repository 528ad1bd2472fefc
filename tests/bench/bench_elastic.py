"""What `determinism: ELASTIC` costs: a training step with it against one with the default, on 1, 2, 3, 4 workers.

The workers are processes of this machine that meet over gloo, each with one thread unless --threads says otherwise. In the same processes
both train the same network on the same batches, in turn in blocks of a few steps, and each pair of blocks gives one ratio, so
that a machine whose speed drifts slows both. All workers do the same number of logical workers' forward and backward passes, or one more
where those can't be dealt out evenly. It prints the median time of a step for each, the part of it after the last backward
pass (waiting for the sum, and the update), and the median and quartiles of the ratios (above 1: ELASTIC is slower).
"""

import argparse
import os
import socket
import statistics
import time
from dataclasses import replace

import torch
from bench_step import CASES, Case, endless, make_batches, training

from stagerun.base.recipe import Determinism
from stagerun.comm import Comm, SoloComm, TorchComm
from stagerun.system.world import World


class Training:
    """A network that this worker trains with its share of the logical workers."""

    def __init__(self, case: Case, determinism: Determinism, comm: Comm, logical: int) -> None:
        self._events = training(case, endless(make_batches(case)), comm, determinism, logical)
        self.steps: list[float] = []
        self.updates: list[float] = []

    def work(self, count: int, comm: Comm, counts: bool = True) -> None:
        comm.barrier()
        started, updating = time.perf_counter(), 0.0
        for _ in range(count):
            updating += next(self._events).update_seconds
        comm.barrier()
        if counts:
            self.steps.append((time.perf_counter() - started) / count)
            self.updates.append(updating / count)


def compare(case: Case, comm: Comm, options: argparse.Namespace) -> str:
    """A line of the table."""
    default, elastic = (Training(case, d, comm, options.logical) for d in (Determinism.FIXED, Determinism.ELASTIC))
    for side in (default, elastic):
        side.work(2, comm, counts=False)
    for pair in range(options.pairs):
        # Who goes first changes, so that what a block leaves behind (heat, caches) falls on both alike.
        for side in (default, elastic)[:: 1 if pair % 2 == 0 else -1]:
            side.work(options.steps, comm)
    ratios = [e / d for e, d in zip(elastic.steps, default.steps, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    times = " ".join(
        f"{1000 * statistics.median(s):9.1f}" for s in (default.steps, elastic.steps, default.updates, elastic.updates)
    )
    return f"{case.model.name:<14} {case.batch:>5} {comm.size:>7} {times}   {median:.3f} ({low:.3f} - {high:.3f})"


def worker(rank: int, size: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    comm: Comm = SoloComm()
    if size > 1:
        comm = TorchComm(World(rank=rank, size=size, local_rank=rank, local_size=size), torch.device("cpu"))
    for name in options.case:
        line = compare(replace(CASES[name], batch=options.batch), comm, options)
        if rank == 0:
            print(line, flush=True)
    comm.barrier()
    # All is measured. The orderly way out, through the end of the interpreter, now and then ended in an abort on a busy machine.
    os._exit(0)


def run(size: int, options: argparse.Namespace) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    torch.multiprocessing.spawn(worker, (size, options), size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, nargs="+", default=["resnet_small", "resnet18"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--logical", type=int, default=8, help="logical workers in all")
    parser.add_argument("--batch", type=int, default=8, help="images of one logical worker")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="of a block")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    options = parser.parse_args()
    print(f"{options.logical} logical workers; milliseconds of a step, and of it after the last backward pass")
    print("network        batch workers   default   ELASTIC  (default)  (ELASTIC)  ratio of the steps (quartiles)")
    for size in options.workers:
        run(size, options)


if __name__ == "__main__":
    main()
