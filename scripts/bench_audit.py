"""What `audit_param` costs: a training step with it against one without, on 2 workers unless --workers says otherwise.

The workers are processes of this machine that meet over gloo, each with one thread unless --threads says otherwise. In the same processes both
train the same network on the same batches, in turn in blocks of --every steps. A block with audits has one comparison of the state, one
gradient computed again and two proofs: what the defaults have in 200 iterations. So what a block costs more, times --every / 200, is the cost with
the defaults, which is printed: half a per cent itself would be lost in the noise. Median and quartiles are over pairs of blocks.
"""

import argparse
import os
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from bench_step import CASES, DECAY, LR, MOMENTUM, Case, make_batches

from stagerun.base import recipe
from stagerun.comm import Comm, SoloComm, TorchComm, make_reducer, runs_of
from stagerun.engine.device import dtype_of
from stagerun.engine.images import Normalise
from stagerun.engine.loop import StageLoop, train
from stagerun.engine.state import make_state
from stagerun.engine.update import Arithmetic
from stagerun.models import build
from stagerun.plan import State
from stagerun.schedule import make_knobs
from stagerun.system.world import World
from stagerun.train.auditing import Audits

DEFAULT = 200


class Training:
    """A network that this worker trains with its share of the device batches; with `every`, it is audited."""

    def __init__(self, case: Case, comm: Comm, logical: int, every: int) -> None:
        audit = recipe.Audit(compare_iter=every, replay_iter=every, proof_iter=every // 2) if every else None
        solver = recipe.Solver(
            base_lr=LR, lr_policy="fixed", max_iter=1 << 40, batch_size=case.batch * logical, device_batch_size=case.batch,
            momentum=MOMENTUM, weight_decay=DECAY, test_batch_size=case.batch, random_seed=1, audit=audit,
        )  # fmt: skip
        torch.manual_seed(1)
        state = make_state(build(case.model), solver, case.device)
        normalise = Normalise(solver.transform, case.model.channels, case.device, dtype_of(case.precision), True)
        loop = StageLoop(
            stage="bench", max_iter=solver.max_iter, batch_size=solver.batch_size, epoch_images=1 << 20, start_position=0,
            run=runs_of(logical, comm.size)[comm.rank], knobs=make_knobs(solver), snapshot=0, test_interval=0,
            arithmetic=Arithmetic(
                logical_workers=logical, normalise=normalise, precision=solver.precision, clip_gradients=None,
                forward_seed=lambda position: position,
            ),
        )  # fmt: skip
        images = make_batches(case)

        def at(position: int) -> Any:
            return images[position // case.batch % len(images)]

        def batches() -> Iterator[Any]:
            for i in range(1 << 40):
                for worker in loop.run:
                    yield at(i * loop.batch_size + worker * case.batch)
                if self.audits is not None and (position := self.audits.place(i)) is not None:
                    yield at(position)

        @contextmanager
        def read(asked: Any) -> Iterator[Iterator[Any]]:
            yield (at(position) for position, _ in asked)

        run: Any = SimpleNamespace(
            worker=SimpleNamespace(comm=comm, device=case.device, others=""), proof="", is_piece=False, differed={}, drifted=False,
            step=SimpleNamespace(files=None), planned=SimpleNamespace(state=State.FRESH),
            stage=SimpleNamespace(name="bench", average=None, solver=solver),
        )  # fmt: skip
        run.audits = self.audits = Audits(run, state, loop, audit) if audit is not None else None
        reducer: Any = make_reducer(
            recipe.Determinism.FIXED, [p.tensor for p in state.solver.parameters], comm, logical
        )
        fed = batches()
        if self.audits is not None:
            reducer = self.audits.around(reducer, read, fed)
        self._events = train(loop, state, fed, reducer, lambda: False)
        self.steps: list[float] = []

    def work(self, count: int, comm: Comm, counts: bool = True) -> None:
        comm.barrier()
        started = time.perf_counter()
        for _ in range(count):
            next(self._events)
            if self.audits is not None:
                list(self.audits.after())
        comm.barrier()
        if counts:
            self.steps.append((time.perf_counter() - started) / count)


def compare(case: Case, comm: Comm, options: argparse.Namespace) -> str:
    """A line of the table."""
    plain, audited = (Training(case, comm, options.logical, every) for every in (0, options.every))
    for side in (plain, audited):
        side.work(options.every, comm, counts=False)
    for pair in range(options.pairs):
        # Who goes first changes, so that what a block leaves behind (heat, caches) falls on both alike.
        for side in (plain, audited)[:: 1 if pair % 2 == 0 else -1]:
            side.work(options.every, comm)
    share = options.every / DEFAULT
    costs = [100 * share * (a / p - 1) for a, p in zip(audited.steps, plain.steps, strict=True)]
    low, median, high = statistics.quantiles(costs, n=4)
    times = " ".join(f"{1000 * statistics.median(s):9.1f}" for s in (plain.steps, audited.steps))
    return f"{case.model.name:<14} {case.batch:>5} {comm.size:>7} {times}   {median:.2f} % ({low:.2f} to {high:.2f})"


def worker(rank: int, size: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    comm: Comm = SoloComm()
    if size > 1:
        comm = TorchComm(World(rank=rank, size=size, local_rank=rank, local_size=size), torch.device("cpu"))
    for name in options.case:
        case = CASES[name]
        line = compare(replace(case, batch=options.batch or case.batch), comm, options)
        if rank == 0:
            print(line, flush=True)
    comm.barrier()
    os._exit(
        0
    )  # all is measured; the way out through the interpreter's end now and then ends in an abort on a busy machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--logical", type=int, default=2, help="device batches of an iteration")
    parser.add_argument("--batch", type=int, help="images of a device batch  [default: the case's]")
    parser.add_argument("--every", type=int, default=4, help="steps of a block, even")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    options = parser.parse_args()
    print(
        f"{options.logical} device batches an iteration; milliseconds of a step, with all audits once in {options.every} steps"
    )
    print("network        batch workers     plain   audited   cost of a step with the defaults (quartiles)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    torch.multiprocessing.spawn(worker, (options.workers, options), options.workers)


if __name__ == "__main__":
    main()
