"""Lines between two ranks, in real processes: what arrives, several at a time, and what is seen of a peer that is gone.

Run as a program, this file starts the workers: it imports torch once and forks them.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import forked
import pytest
import torch
from engine_help import CPU, peer_error
from facade import Line, PeerError, World

from stagerun.comm import Comm, TorchComm

SIZE, VICTIM, ROUNDS, ELEMENTS = 4, 2, 40, 100_003
MEETING = timedelta(seconds=2)

Seen = dict[str, object]


def echo(comm: Comm, seen: Seen) -> None:
    """Rank 0 sends to all others at a time, and they send it back; in the middle one of them is killed."""
    if comm.rank:
        back = Line(comm, 0, "echo")
        for i in range(ROUNDS):
            words, (got,) = back.receive(CPU)
            if comm.rank == VICTIM and i == ROUNDS // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            back.send(words, [got + comm.rank])
        back.close()
        return

    def talk(peer: int) -> None:
        try:
            to = Line(comm, peer, "echo")
            for i in range(ROUNDS):
                sent = torch.arange(ELEMENTS) * 1.0 + i
                to.send(["round", i, None, "ä"], [sent])
                begun = time.monotonic()
                words, (got,) = to.receive(CPU)
                assert words == ["round", i, None, "ä"]
                seen[f"rounds {peer}"] = i + 1
                assert torch.equal(got, sent + peer)
            to.close()
        except PeerError as error:
            seen[f"error {peer}"], seen[f"seconds {peer}"] = error.message, time.monotonic() - begun

    with ThreadPoolExecutor() as threads:
        list(threads.map(talk, range(1, SIZE)))
    seen["sent"] = comm.traffic.sent


def patient(comm: Comm, seen: Seen) -> None:
    """Nothing for longer than the two may take to meet, then tensors of odd kinds, then the other end closes."""
    if comm.rank > 1:
        return
    one = Line(comm, 1 - comm.rank, "patient", meeting=MEETING)
    again = Line(comm, 1 - comm.rank, "another")
    odd = [torch.tensor([], dtype=torch.float32), torch.tensor([1, 2]), torch.tensor([3.0], dtype=torch.bfloat16)]
    if comm.rank:
        time.sleep(MEETING.total_seconds() + 1)
        one.send(["odd"], odd)
        one.close()
        again.send([], [])
        return
    _, got = one.receive(CPU)
    seen["odd"] = all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, odd, strict=True))
    seen["closed"] = peer_error(lambda: one.receive(CPU))
    again.receive(CPU)


def alone(comm: Comm, seen: Seen) -> None:
    """The peer never comes."""
    if comm.rank:
        return
    begun = time.monotonic()
    seen["alone"] = peer_error(lambda: Line(comm, 1, "alone", timedelta(seconds=1)))
    seen["alone seconds"] = time.monotonic() - begun


def worker(rank: int, out: Path) -> None:
    torch.set_num_threads(1)
    comm = TorchComm(World(rank=rank, size=SIZE, local_rank=rank, local_size=SIZE), CPU)
    seen: Seen = {}
    for check in (patient, alone, echo):
        check(comm, seen)
        if check is not echo:
            comm.barrier()
    if rank == 0:
        (out / "seen").write_text(json.dumps(seen))


def main(out: Path) -> int:
    forked.meet()
    codes = forked.together(SIZE, partial(worker, out=out), patience=50)
    print(codes, file=sys.stderr)
    return codes != [-signal.SIGKILL if rank == VICTIM else 0 for rank in range(SIZE)]


# -- what is asserted of it


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    out = tmp_path_factory.mktemp("lines")
    forked.run_program(__file__, out, timeout=60)
    return json.loads((out / "seen").read_text())


def test_a_line_waits_for_as_long_as_its_peer_lives_carries_any_tensor_and_tells_of_a_peer_that_is_gone(
    seen: Seen,
) -> None:
    assert seen["odd"] is True
    assert str(seen["closed"]).startswith("lost worker 1 while trying to receive from it: ")
    assert seen["alone"] == "worker 1 did not come within 1 s" and 0.9 < float(str(seen["alone seconds"])) < 5


def test_a_killed_peer_is_an_error_on_its_line_at_once_and_on_no_other(seen: Seen) -> None:
    assert str(seen[f"error {VICTIM}"]).startswith(f"lost worker {VICTIM} while trying to receive from it: ")
    assert float(str(seen[f"seconds {VICTIM}"])) < 2
    assert seen[f"rounds {VICTIM}"] == ROUNDS // 2
    for peer in {1, 2, 3} - {VICTIM}:
        assert (seen[f"rounds {peer}"], f"error {peer}" in seen) == (ROUNDS, False)
    messages = 2 * ROUNDS + ROUNDS // 2 + 1
    assert 0 < int(str(seen["sent"])) - messages * 4 * ELEMENTS < messages * 100, "vectors, and a few words with each"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
