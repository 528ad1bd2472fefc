"""Gradient reduction: stagerun's against torch's DistributedDataParallel, and with the overlap of backward against without it.

The workers are processes that meet over gloo: on this machine, or, with --rank, one on each host (start the same command there with
MASTER_ADDR and MASTER_PORT set). In the same processes every way trains the same network on the same images, in turn in blocks of a few
steps. A step is forward, backward and the sum of the gradients over the workers, without the update, which is the same in both. It prints
the median time of a step, the part of it after backward (the exposed part of the reduction), this worker's processor time, and the ratios
of the first way's times to those of each. Processor time is the steadier one on a machine that others use. `gradients`: a digest of those
of the first step, and whether the last step's, in the same process, are the same.

Ways: `ours` (determinism: FIXED), `late` (the same, but nothing is sent before backward is over), `elastic` (determinism: ELASTIC), `ddp`
(torch's settings).
"""

import argparse
import hashlib
import math
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench_step import CASES
from facade import Determinism, World
from forked import meet
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from turns import parser, ratio, turns

from stagerun.comm import Comm, TorchComm, make_reducer
from stagerun.comm.reduce import FlatReducer, Reducer
from stagerun.models import build


class LateReducer(FlatReducer):
    """Everything is sent when backward is over."""

    def _count(self, chunk: int) -> None:
        pass


class Way:
    """One way to add gradients up; `step` gives the seconds that came after backward."""

    def __init__(self, name: str, case: str, comm: Comm, batch: int) -> None:
        torch.manual_seed(1)
        self.name, self.comm = name, comm
        self.model: nn.Module = build(CASES[case].model).to(memory_format=torch.channels_last).train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        generator = torch.Generator().manual_seed(100 + comm.rank)
        shape = (batch, CASES[case].model.channels, CASES[case].side, CASES[case].side)
        self.images = torch.randn(shape, generator=generator).contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, CASES[case].model.num_classes, (batch,), generator=generator)
        self.tail = torch.zeros(10_000, dtype=torch.float64)  # about as much as the BatchNorm statistics of a ResNet-18
        self.reducer: Reducer | None = self._reducer()
        self.forward: Callable[[Tensor], Tensor] = self.model
        if name == "ddp":
            self.forward = DistributedDataParallel(self.model)
        self.steps: list[float] = []
        self.exposed: list[float] = []
        self.worked: list[float] = []  # seconds of all processors together

    def _reducer(self) -> Reducer | None:
        if self.name == "late":
            return LateReducer(self.parameters, self.comm)
        kind = {"ours": Determinism.FIXED, "elastic": Determinism.ELASTIC}.get(self.name)
        return None if kind is None else make_reducer(kind, self.parameters, self.comm, self.comm.size)

    def step(self) -> float:
        if self.reducer is not None:
            self.reducer.begin()
            self.reducer.add(self._loss() / self.comm.size, self.comm.rank, self.tail, True)
            started = time.perf_counter()
            self.reducer.finish()
            return time.perf_counter() - started
        for p in self.parameters:
            p.grad = None
        self._loss().backward()  # DDP's ends when all is summed, and BatchNorm's buffers it has sent before
        return math.nan

    def _loss(self) -> Tensor:
        return F.cross_entropy(self.forward(self.images), self.labels)

    def work(self, count: int, counts: bool = True) -> None:
        self.comm.barrier()
        started, worked, exposed = time.perf_counter(), time.process_time(), 0.0
        for _ in range(count):
            exposed += self.step()
        seconds, worked = time.perf_counter() - started, time.process_time() - worked
        if counts:
            self.worked.append(worked / count)
            self.steps.append(seconds / count)
            self.exposed.append(exposed / count)

    def digest(self) -> str:
        """The digest of the gradients."""
        found = hashlib.sha256()
        for p in self.parameters:
            assert p.grad is not None
            found.update(p.grad.contiguous().numpy().tobytes())
        return found.hexdigest()[:16]


def compare(options: argparse.Namespace, case: str, comm: Comm) -> None:
    ways = [Way(name, case, comm, options.batch) for name in options.ways]
    digests = []
    for way in ways:
        way.step()  # of DDP the one after which it lays its buckets out anew
        digests.append(way.digest())
        way.work(2, counts=False)
    for way in turns(ways, options.rounds):
        way.work(options.steps)
    if comm.rank == 0:
        for way, digest in zip(ways, digests, strict=True):
            print(_line(case, comm.size, way, ways[0], digest, way.digest()), flush=True)
    comm.barrier()


def _line(case: str, size: int, way: Way, first: Way, before: str, after: str) -> str:
    step, exposed, worked = (1000 * statistics.median(times) for times in (way.steps, way.exposed, way.worked))
    same = "same" if before == after else "other"
    return (
        f"{case:<13} {size:>7} {way.name:<8} {step:9.1f} {exposed:9.1f} {worked:9.1f}   {ratio(first.steps, way.steps)}  "
        f"{ratio(first.worked, way.worked)}  {before} {same}"
    )


def worker(rank: int, size: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    comm = TorchComm(World(rank=rank, size=size, local_rank=0, local_size=1), torch.device("cpu"))
    for case in options.case:
        compare(options, case, comm)
    # All is measured. The orderly way out, through the end of the interpreter, now and then ended in an abort on a busy machine.
    os._exit(0)


def main() -> None:
    asked = parser(__doc__, rounds=40, threads=1)
    asked.add_argument("--case", choices=CASES, nargs="+", default=["resnet18"])
    asked.add_argument("--ways", nargs="+", default=["ours", "ddp"])
    asked.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    asked.add_argument("--rank", type=int, default=None, help="be this one worker of the job")
    asked.add_argument("--batch", type=int, default=8, help="images of one worker")
    asked.add_argument("--steps", type=int, default=2, help="of a block")
    options = asked.parse_args()
    if options.rank in (None, 0):
        print(
            "network       workers way        step ms   exposed processor   first way's time / its  same, processor time   gradients"
        )
    if options.rank is not None:
        worker(options.rank, options.workers[0], options)
    for size in options.workers:
        meet()
        torch.multiprocessing.spawn(worker, (size, options), size)


if __name__ == "__main__":
    main()
