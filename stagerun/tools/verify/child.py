"""A `stagerun` command in processes of its own, and the signals that interrupt it."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from stagerun.launch.folder import LAUNCHER_PID
from stagerun.system.process import lives, living, program

MARK = "STAGERUN_LIFE"  # in the environment of all its processes
POLL_S = 0.005
GONE_S = 30.0  # the kernel ends what a killed launcher leaves; freeing a network's memory takes a moment


class Child:
    """`stagerun ARGUMENTS...`, which prints into the file `said`. Start it in the main thread: it dies with that.

    As a context manager it leaves no process, and no folder of its launcher.
    """

    def __init__(self, arguments: Sequence[str], said: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._temporary = tempfile.mkdtemp()
        with open(said, "wb") as file:
            # In a session of its own: Ctrl-C is for the parent, which then ends it.
            self.process = subprocess.Popen(
                [sys.executable, *program("stagerun"), *arguments],
                env={**os.environ, MARK: self.mark, LAUNCHER_PID: str(os.getpid()), "TMPDIR": self._temporary},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + GONE_S  # a process that hangs in the kernel can't be ended
        seen = {self.process.pid}
        # A dying process loses its environment, and with it the mark, before it lets go of its files: wait for its id, too.
        while ((left := self.processes()) or any(map(living, seen))) and time.monotonic() < deadline:
            for process in left:
                seen.add(process.pid)
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.05)
            time.sleep(POLL_S)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        """Return its living processes."""
        return [process for process in psutil.process_iter() if _said(process, MARK) == self.mark and lives(process)]

    def strike(self, rng: random.Random) -> str:
        """Stop the command, or kill one of its processes that train or launch, or all. Return in words what was hit, '' if nothing lived."""
        own, names = self.process.pid, {self.process.pid: "the launcher"}
        for process in self.processes():
            with suppress(psutil.Error):
                if process.ppid() == own and (rank := _said(process, "RANK")):
                    names[process.pid] = f"rank {rank}"
        number, name, targets = signal.SIGKILL, "all processes", [process.pid for process in self.processes()]
        draw = rng.randrange(5)
        if draw == 0:
            number, name, targets = signal.SIGTERM, names[own], [own]
        elif draw < 4:
            target = rng.choice(sorted(names))
            name, targets = names[target], [target]
        hit = False
        for pid in targets if self.process.poll() is None else ():  # else another process may have its id by now
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                hit = True
        return f"{number.name} to {name}" if hit else ""

    def outlived(self) -> int:
        """Count the processes that are left GONE_S after its end."""
        deadline = time.monotonic() + GONE_S
        while (left := len(self.processes())) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left


def _said(process: psutil.Process, name: str) -> str | None:
    """Return a variable of the environment that a process was started with; None, too, if it is gone or another user's."""
    with suppress(psutil.Error):
        return process.environ().get(name)
    return None
