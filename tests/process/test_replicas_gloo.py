"""Replicas between real processes over gloo: the bits with parts of a job, and the bytes that cross the network.

Run as a program, with a folder, this file is one worker.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import processes
import pytest
import torch
from engine_help import CPU, SOLVER, Linear, arithmetic, cut, dataset, tensors
from facade import Determinism, Precision, Sync, SyncMethod, World, make_state, reducer_of, update, update_replicas

from stagerun.comm import Comm, SoloComm, TorchComm, runs_of
from stagerun.engine.codec import digest
from stagerun.engine.state import replicas_of
from stagerun.schedule import make_knobs

SIDE, WARM_UP, PERIOD, MEETINGS = 100, 4, 8, 3
LENGTH = WARM_UP + PERIOD * MEETINGS
SOLVER = replace(
    SOLVER,
    precision=Precision.FP32,
    warmup_iter=WARM_UP,
    max_iter=LENGTH,
    sync=Sync(method=SyncMethod.LOCAL, replicas=2, period=PERIOD),
)


def train(comm: Comm) -> dict[str, object]:
    """Bytes that this worker has handed to the network before each iteration, and digests of what comes of it."""
    state = make_state(Linear(SIDE * SIDE), SOLVER, CPU)
    state.replicas = replicas_of(Determinism.ELASTIC, state, SOLVER, comm)
    reducer = reducer_of(Determinism.ELASTIC, state, SOLVER, comm)
    run, knobs, sent = runs_of(4, comm.size)[comm.rank], make_knobs(SOLVER), [comm.traffic.sent]
    for i in range(LENGTH):
        whole = dataset(8, size=SIDE, seed=i)
        pieces = ((k, cut(whole, 2 * k, 2 * k + 2), k == run[-1]) for k in run)
        move = update_replicas if state.replicas.begin(i) else update
        assert not move(state, pieces, knobs(i), reducer, arithmetic(SOLVER), lambda: False).wrong
        sent.append(comm.traffic.sent)
    state.replicas.show()
    return {
        "sent": sent,
        "digests": {name: digest(t) for name, t in tensors(state).items()},
    }


def told(folder: Path, workers: int) -> list[dict[str, object]]:
    """What each of so many processes says."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port())}
    paths = os.pathsep.join(path for path in sys.path if path)
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env={**os.environ, **meeting, "PYTHONPATH": paths, "RANK": str(rank), "WORLD_SIZE": str(workers)},
        )
        for rank in range(workers)
    ]
    try:
        assert [process.wait(300) for process in started] == [0] * workers
    finally:
        for process in started:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_bits_are_those_of_one_worker_and_bytes_fall_when_the_replicas_have_parted(
    tmp_path: Path, workers: int
) -> None:
    torch.set_num_threads(1)
    alone = train(SoloComm())
    for one in told(tmp_path, workers):
        assert one["digests"] == alone["digests"]
        sent = one["sent"]
        each = [after - before for before, after in pairwise(sent)]
        before = each[0]
        if workers == 2:  # each has a replica of its own
            meeting = [each[WARM_UP + PERIOD * n - 1] for n in range(1, MEETINGS + 1)]
            quiet = [b for i, b in enumerate(each) if i >= WARM_UP and (i - WARM_UP + 1) % PERIOD]
            assert max(quiet) < 1000 and max(meeting) <= before
            assert sum(each[WARM_UP:]) <= before * (LENGTH - WARM_UP) / PERIOD * 1.01
        assert sum(each[:WARM_UP]) == WARM_UP * before


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    comm = TorchComm(World(rank=rank, size=size), CPU)
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(train(comm)))
    comm.barrier()
    comm.close()
