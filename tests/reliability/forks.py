"""Runs of stagerun in forked processes: a second each where a new Python with torch takes several, for trials of hundreds of lives.

A process that has imported torch, and has computed nothing yet, waits for orders and forks the workers of a run. Each of them
is `stagerun run` from its first line on. Several find RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under a foreign
launcher; one alone finds none of them. What is left out is stagerun's own launcher, and Python's start.

A fork copies the calling thread only, and the locks that others hold: so the process looks each time that it has one thread.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

# Seconds until a life counts as hung, and is killed. Generous: the machine may be busy.
PATIENCE = 180
HUNG = 1000  # in place of an exit code
TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Life:
    """`codes` by rank: exit codes, negative for a signal, HUNG where PATIENCE was over. `texts` by rank: what it printed."""

    codes: tuple[int, ...]
    texts: tuple[str, ...]
    seconds: float


class Forks:
    """A context manager. One life at a time."""

    def __enter__(self) -> "Forks":
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for whoever gives the orders
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.kill()  # and with it what it has forked
        self._server.communicate()

    def life(
        self,
        arguments: Sequence[object],
        workers: int,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        fault: str = "",
    ) -> Life:
        """`stagerun ARGUMENTS...` in `workers` processes, to their end. What they print goes into files in `folder`. `fault`: as of
        `faults.FaultyDisk`."""
        begun = time.monotonic()
        order = {
            "arguments": [str(word) for word in arguments],
            "workers": workers,
            "folder": str(folder),
            "environment": dict(environment or {}),
            "fault": fault,
        }
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the process that forks is gone"
        texts = tuple((folder / f"{rank}.txt").read_text(errors="replace") for rank in range(workers))
        return Life(tuple(json.loads(answer)), texts, time.monotonic() - begun)


# ---- the process that forks


def serve() -> None:
    sys.path[:1] = [str(TESTS), str(TESTS / "help")]  # this folder's names are not modules of their own
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed  # noqa: F401

    import stagerun.cli
    import stagerun.train.command
    import stagerun.train.run  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_life(json.loads(line))), flush=True)


def _life(order: dict) -> list[int]:
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: not to be forked"
    with socket.socket() as meeting:
        # Bound until the run is over, so that nobody else is given the port; rank 0 may bind it too, since nobody listens.
        meeting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        meeting.bind(("127.0.0.1", 0))
        pids = [_fork(order, rank, meeting.getsockname()[1]) for rank in range(order["workers"])]
        return _ended(pids)


def _fork(order: dict, rank: int, port: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
        code = _worker(order, rank, port)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _worker(order: dict, rank: int, port: int) -> int:
    log = os.open(Path(order["folder"]) / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.chdir(order["folder"])  # where the report of a bug goes
    os.environ.update(order["environment"])
    if order["workers"] > 1:
        place = {"RANK": rank, "WORLD_SIZE": order["workers"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
    sys.argv = ["stagerun", *order["arguments"]]
    from reliability.faults import install

    from stagerun.cli import main

    if order["fault"]:
        install(order["fault"])
    try:
        main(order["arguments"])
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    return code


def _ended(pids: Sequence[int]) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in set(pids) - codes.keys():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = HUNG
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    serve()
