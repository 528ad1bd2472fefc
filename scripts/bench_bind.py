"""What binding workers to cores does to a training step: one with `run --bind cores` against one with `--bind none`.

The workers are processes of this machine that meet over gloo, as in `scripts/bench elastic`. In the same processes the same network is
trained in turn in blocks of a few steps, bound and unbound, and each pair of blocks gives one ratio (below 1: bound is faster). This needs
an otherwise idle machine: a bound worker can't get out of the way of another program.
"""

import argparse
import os
import statistics
from dataclasses import replace

import torch
from bench_elastic import Training
from bench_step import CASES, Case

from stagerun.base.recipe import Determinism
from stagerun.comm import Comm, SoloComm, TorchComm
from stagerun.launch.addresses import free_port
from stagerun.launch.placing import Seat, make_plan
from stagerun.system import binding
from stagerun.system.cores import read
from stagerun.system.world import World


def unbind(cpus: set[int]) -> None:
    for tid in binding.names():
        os.sched_setaffinity(tid, cpus)


def rebind(seat: Seat) -> None:
    """As `run` has bound them; the team that computes is there by now."""
    for tid in binding.names():
        os.sched_setaffinity(tid, seat.compute)
    binding.bind(seat)
    binding.bind_communication(groups=False)


def compare(case: Case, comm: Comm, seat: Seat, options: argparse.Namespace) -> str:
    """A line of the table."""
    cpus = os.sched_getaffinity(0)
    training = Training(case, Determinism.FIXED, comm, options.logical)
    training.work(2, comm, counts=False)
    sides: dict[str, list[float]] = {"bound": [], "unbound": []}
    for pair in range(options.pairs):
        for side in ("bound", "unbound")[:: 1 if pair % 2 == 0 else -1]:
            rebind(seat) if side == "bound" else unbind(cpus)
            training.work(options.steps, comm)
            sides[side].append(training.steps[-1])
    ratios = [b / u for b, u in zip(sides["bound"], sides["unbound"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    times = " ".join(f"{1000 * statistics.median(s):9.1f}" for s in sides.values())
    return f"{case.model.name:<14} {case.batch:>5} {comm.size:>7} {times}   {median:.3f} ({low:.3f} - {high:.3f})"


def worker(rank: int, size: int, options: argparse.Namespace) -> None:
    plan = make_plan(replace(read(), gpus=()), size)
    torch.set_num_threads(plan.threads)
    comm: Comm = SoloComm()
    if size > 1:
        comm = TorchComm(World(rank=rank, size=size, local_rank=rank, local_size=size), torch.device("cpu"))
    for name in options.case:
        line = compare(replace(CASES[name], batch=options.batch), comm, plan.seats[rank], options)
        if rank == 0:
            print(line, flush=True)
    comm.barrier()
    os._exit(0)  # as in bench_elastic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, nargs="+", default=["resnet_small", "resnet18"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--logical", type=int, default=8, help="logical workers in all")
    parser.add_argument("--batch", type=int, default=8, help="images of one logical worker")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="of a block")
    options = parser.parse_args()
    print("milliseconds of a step")
    print("network        batch workers     bound   unbound   ratio (quartiles)")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    torch.multiprocessing.spawn(worker, (options.workers, options), options.workers)


if __name__ == "__main__":
    main()
