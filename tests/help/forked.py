"""Workers of a test file that runs itself as a program: that imports torch once and forks them, a fresh set as often as it likes."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import processes

HELP = Path(__file__).parent


def exit_codes(
    size: int, work: Callable[[int], object], seconds: int = 300, host: str = "127.0.0.1", port: int | None = None
) -> list[int]:
    """What `size` workers end with, by rank; of one that a signal has killed, its number, negative. They meet at `host`, by default at a port
    that is free."""
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(processes.free_port() if port is None else port))
    pids = [_forked(rank, work, seconds) for rank in range(size)]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _forked(rank: int, work: Callable[[int], object], seconds: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(seconds)
    code = 1
    try:
        work(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run_program(file: str, folder: Path, seconds: float = 1200, **environment: str) -> str:
    """Runs `file` with `folder` as its argument, to a good end. What it has said."""
    path = os.pathsep.join([str(HELP.parents[1]), str(HELP), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, file, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        stderr=subprocess.PIPE,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr
