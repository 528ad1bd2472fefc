"""For test files that are programs, too: the program imports torch once and forks the workers of each job, a moment each."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import processes


def meet(address: str = "127.0.0.1") -> int:
    """The port where those that are forked next find each other."""
    port = processes.free_port()
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    return port


def together(size: int, work: Callable[[int], object], patience: int = 300) -> list[int]:
    """The exit codes, by rank, of so many processes that call `work(rank)`; the negative number of a signal that ended one.
    After `patience` seconds SIGALRM does."""
    pids = [_fork(rank, work, patience) for rank in range(size)]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _fork(rank: int, work: Callable[[int], object], patience: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(patience)
    code = 1
    try:
        work(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run_program(file: str, out: Path, timeout: float, **environment: str) -> str:
    """Runs a test file as a program whose argument is `out`; what it says on stderr. It must end well."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(tests.parent), str(tests / "help"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, file, str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr
