"""Bytes of gradients at the socket: two workers in a network of their own, whose kernel counts them, against `Comm.traffic` and dense.

Run as a program inside that network, this file starts the workers and prints what was counted, as JSON.
"""

import json
import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from compressing import how
from engine_help import CPU, SOLVER, started
from facade import Determinism, Method, Model, Precision, World, reducer_of
from torch import Tensor

from stagerun.comm import Reducer, TorchComm, gather_json
from stagerun.models import build

METHODS = [m for m in Method if m is not Method.AUTO]
# What an iteration may send at most, as a share of dense.
MOST = {Method.TOP_K: 0.022, Method.TERNGRAD: 0.065, Method.QSGD: 0.26}
HEADERS = 2_000  # bytes of an iteration and worker, beside 1 % of what is sent


@dataclass(frozen=True)
class Counted:
    """Bytes of an iteration and worker: at the socket, by `Comm.traffic`, and what dense gradients have at the socket."""

    method: str
    socket: float
    traffic: float
    dense: float


# -- in the network


def handed_over() -> int:
    """What this process's TCP connections have carried away so far, without what TCP sent twice: it does so on a busy machine."""
    return sum(_carried(int(name)) for name in os.listdir("/proc/self/fd"))


def _carried(descriptor: int) -> int:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as one:
            told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # a socket of another kind, or the descriptor that listed the folder
        return 0
    assert len(told) >= 216, "this Linux doesn't count the bytes of a connection"
    sent, again = struct.unpack_from("QQ", told, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
    return int(sent - again)


def iterate(reducer: Reducer, parameters: Sequence[Tensor], comm: TorchComm, iter: int) -> None:
    """With gaussian gradients, whose scale is another in each layer."""
    draw = torch.Generator().manual_seed(100 * iter + comm.rank)
    gradients = [torch.randn(p.shape, generator=draw) * 10.0 ** -(1 + i % 4) for i, p in enumerate(parameters)]
    loss = torch.stack([(p * g).sum() for p, g in zip(parameters, gradients, strict=True)]).sum()
    # Mean and variance of each BatchNorm's channels, the loss and a flag.
    tail = torch.ones(sum(p.numel() for p in parameters if p.dim() == 1) + 2, dtype=torch.float64)
    reducer.begin(iter)
    reducer.add(loss, comm.rank, tail, last=True)
    reducer.finish()
    reducer.accept()


def worker(rank: int) -> list[tuple[str, int, int]]:
    """(method, bytes on the wire, bytes that both workers say that they have sent) for ResNet-9, of 6.57 million numbers."""
    torch.set_num_threads(1)
    comm = TorchComm(World(rank=rank, size=2, local_rank=rank, local_size=2), CPU)
    found = []
    for method in METHODS:
        compress = how(method, **({"ratio": 0.01} if method is Method.TOP_K else {}))
        solver = replace(SOLVER, batch_size=4, precision=Precision.FP32, compress=compress)
        state = started(build(Model(name="resnet9", num_classes=10)), solver, comm)
        reducer = reducer_of(Determinism.FIXED, state, solver, comm)
        parameters = [p.tensor for p in state.solver.parameters]
        iterate(reducer, parameters, comm, 0)  # connections are made
        comm.barrier()
        wire, traffic = handed_over(), comm.traffic.sent
        comm.barrier()  # no one has begun before everyone has looked
        iterate(reducer, parameters, comm, 1)
        comm.barrier()  # what was sent has arrived
        mine = [handed_over() - wire, comm.traffic.sent - traffic]
        wire, sent = map(sum, zip(*gather_json(comm, mine), strict=True))
        found.append((method.value, wire, sent))
    comm.close()
    return found


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
    torch.set_num_threads(1)
    other = os.fork()
    mine = worker(1 if other == 0 else 0)
    if other == 0:
        os._exit(0)
    assert os.waitpid(other, 0)[1] == 0
    dense = next(wire for method, wire, _ in mine if method == Method.NONE.value)
    print(json.dumps([asdict(Counted(method, wire / 2, sent / 2, dense / 2)) for method, wire, sent in mine]))


# -- what is asserted of it


@pytest.fixture(scope="module")
def counted() -> list[Counted]:
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("no network namespace may be made here")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["unshare", "-n", sys.executable, __file__],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (root, root / "tests/help"))),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = [Counted(**one) for one in json.loads(done.stdout)]
    return found


def test_what_is_counted_as_sent_is_what_crosses_the_socket(counted: list[Counted]) -> None:
    """Gloo adds a header to each message, which weighs where messages are short; a barrier is a message."""
    for one in counted:
        assert one.traffic <= one.socket <= 1.01 * one.traffic + HEADERS, one


@pytest.mark.parametrize("method", MOST)
def test_a_method_sends_no_more_than_it_is_for(counted: list[Counted], method: Method) -> None:
    (one,) = (c for c in counted if c.method == method.value)
    assert one.socket <= MOST[method] * one.dense, one


if __name__ == "__main__":
    main()
