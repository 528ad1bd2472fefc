"""Compressed gradients on slow links: each method, and what AUTO chooses, against dense gradients.

Two hosts, each a network namespace of its own (root, or a user who may make some), are joined by a pair of virtual cards whose rate the
kernel limits (tbf) in both directions: by --rate in Mbit/s, 0 for none. On each is one worker. AUTO first measures and chooses as it
does before a stage. Then all ways train the same network on the same images, in the same processes, in turn, a step of each way in a
turn: forward, backward, the sum of the gradients and the update, with a learning rate of 0. It prints, by way, the median step, the
bytes that a worker sends in one, and the median and quartiles of the ratios of its steps to the dense ones of the same turn.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from bench_step import CASES, DECAY, LR, MEAN, MOMENTUM, SCALE, Case, make_batches

from stagerun.base import recipe
from stagerun.base.compression import ALLOWED, applied, default_memory
from stagerun.comm import TorchComm
from stagerun.engine.device import dtype_of
from stagerun.engine.images import Normalise
from stagerun.engine.state import make_state
from stagerun.engine.trials import Trial
from stagerun.engine.update import Arithmetic
from stagerun.models import build
from stagerun.system.world import World
from stagerun.train.choices import of_choice
from stagerun.train.trying import find

NET, PORT = "10.98.0", "29477"
AUTO = recipe.Compression(method=recipe.Method.AUTO, ratio=0.01, memory=recipe.Memory.RESIDUAL, allow=ALLOWED)
NETWORKS = CASES | {"alexnet_bn": Case(recipe.Model(name="alexnet_bn", num_classes=10), side=32, batch=8)}


def trial_of(name: str, batch: int, rank: int, workers: int) -> Trial:
    case = replace(NETWORKS[name], batch=batch)
    solver = recipe.Solver(
        base_lr=LR,
        lr_policy="fixed",
        max_iter=1 << 40,
        batch_size=batch * workers,
        device_batch_size=batch,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        transform=recipe.Transform(mean_value=(MEAN,), scale=SCALE),
        test_batch_size=batch,
        random_seed=1,
    )
    torch.manual_seed(1)
    state = make_state(build(case.model), solver, case.device)
    normalise = Normalise(solver.transform, case.model.channels, case.device, dtype_of(solver.precision), True)
    how = Arithmetic(
        logical_workers=workers,
        normalise=normalise,
        precision=solver.precision,
        clip_gradients=None,
        forward_seed=lambda position: position,
    )
    images = make_batches(case, rank + 1)[rank]
    return Trial(build(case.model), state, solver, recipe.Determinism.FIXED, how, images, range(rank, rank + 1))


def stated(way: str) -> recipe.Compression:
    method = recipe.Method(way)
    return recipe.Compression(method=method, memory=default_memory(method, False))


def worker(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    comm = TorchComm(World(rank=options.rank, size=2, local_rank=0, local_size=1), torch.device("cpu"))
    trial = trial_of(options.case, options.batch, comm.rank, comm.size)
    say = print if comm.rank == 0 else (lambda *words, **options: None)
    ways = {way: stated(way) for way in options.ways if way != "AUTO"}
    if "AUTO" in options.ways:
        began, looking = time.monotonic(), find(comm, trial, AUTO, lambda: False, 3)
        while True:
            try:
                say(f"  AUTO: {next(looking)}", flush=True)
            except StopIteration as end:
                found = end.value
                break
        say(f"  AUTO: {of_choice(found.choice)}: {found.why}; {time.monotonic() - began:.0f} s", flush=True)
        say("  AUTO: tried " + ", ".join(f"{way} {1e3 * s:.0f} ms" for way, s in found.seconds.items()), flush=True)
        ways["AUTO"] = applied(AUTO, found.choice)
    measure(options, comm, trial, ways, say)
    os._exit(0)  # as in bench_reduce


def measure(
    options: argparse.Namespace, comm: TorchComm, trial: Trial, ways: dict[str, recipe.Compression], say: Any
) -> None:
    reducers = {way: trial.reducer(comm, compress) for way, compress in ways.items()}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    sent = {}
    began = time.monotonic()
    for turn in range(options.turns + 1):
        over = torch.tensor([int(time.monotonic() - began > options.seconds)])
        comm.broadcast(over)  # rank 0's clock
        if over.item() and turn > 3:
            break
        for way in list(ways)[:: 1 if turn % 2 else -1]:
            comm.barrier()
            before = comm.traffic.sent
            seconds = trial.step(reducers[way])
            sent[way] = comm.traffic.sent - before
            if turn:  # the first makes room
                taken[way].append(seconds)
    dense = taken["NONE"]
    for way, times in taken.items():
        ratios = [a / b for a, b in zip(times, dense, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        say(
            f"{options.case:<13} {options.rate or 'no limit':>8} {'dense' if way == 'NONE' else way:<9} "
            f"{1e3 * statistics.median(times):9.1f} {sent[way] / 1e6:9.3f} MB {sent[way] / sent['NONE']:7.1%}   "
            f"{middle:.3f} ({low:.3f} - {high:.3f})  {len(times)}",
            flush=True,
        )


class Hosts:
    """Two network namespaces, which end with this process; a link between them."""

    def __init__(self) -> None:
        hold = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"]
        self.holders = [subprocess.Popen(hold, stdout=subprocess.PIPE) for _ in range(2)]
        for holder in self.holders:
            assert holder.stdout is not None and holder.stdout.readline() == b"ready\n", "no network namespaces here"
        self.run(0, f"ip link add eth0 type veth peer name eth0 netns {self.holders[1].pid}")
        for rank in range(2):
            self.run(rank, f"ip addr add {NET}.{rank + 1}/24 dev eth0")
            self.run(rank, "ip link set lo up")
            self.run(rank, "ip link set eth0 up")

    def words(self, rank: int, words: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.holders[rank].pid), "-n", *words]

    def run(self, rank: int, line: str) -> None:
        subprocess.run(self.words(rank, line.split()), check=True)

    def shape(self, mbit: float) -> None:
        for rank in range(2):
            limit = f"tbf rate {mbit:g}mbit burst 256k latency 50ms" if mbit else "noqueue"
            self.run(rank, f"tc qdisc replace dev eth0 root {limit}")

    def close(self) -> None:
        for holder in self.holders:
            holder.kill()


def cell(hosts: Hosts, case: str, rate: float) -> None:
    hosts.shape(rate)
    environment = os.environ | {
        "MASTER_ADDR": f"{NET}.1",
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, *sys.argv, "--case", case, "--rate", f"{rate:g}"]
    started = [subprocess.Popen(hosts.words(r, [*words, "--rank", str(r)]), env=environment) for r in range(2)]
    for process in started:
        if process.wait():
            sys.exit(f"a worker ended with {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=NETWORKS, nargs="+", default=["resnet18"])
    parser.add_argument("--rates", type=float, nargs="+", default=[20, 100, 300, 1000, 0], help="Mbit/s; 0: no limit")
    parser.add_argument("--ways", nargs="+", default=["NONE", "TOP_K", "QSGD", "INT8", "BF16", "AUTO"])
    parser.add_argument("--batch", type=int, default=8, help="images of one worker")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=120, help="start no new turn after so long")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "NONE" not in options.ways:
        options.ways.insert(0, "NONE")
    if options.rank is not None:
        return worker(options)
    print(
        "network         Mbit/s way         step ms  sent in a step  of dense   its time / dense's      turns",
        flush=True,
    )
    hosts = Hosts()
    try:
        for case in options.cases:
            for rate in options.rates:
                cell(hosts, case, rate)
    finally:
        hosts.close()


if __name__ == "__main__":
    main()
