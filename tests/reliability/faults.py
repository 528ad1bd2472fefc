"""A fault at a call of the disk of a run, which its rank 0 alone reads and writes.

    python tests/reliability/faults.py kill@17 run DIR      rank 0 kills itself (SIGKILL) at the 17th call of its disk
    ENOSPC@17       the 17th call fails: no space left on the device
    ENOSPC@17+      from then on every call does that needs space
    EIO@17-90       calls 17 to 90 do, as when a server is away for a while
    count@1+        none does; each prints a bell, to be counted

Each method of `store.Disk` and of its `File` is a call, counted from 1 in the life of the process. Of a write that a fault meets half is put
down. ENOSPC meets whatever needs space, EIO everything. The lock, the beats of the lease, log.jsonl and results are left out.
"""

import errno
import os
import re
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    TESTS = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(TESTS), str(TESTS / "help")]

from disks import HookedDisk, Killed

from stagerun import store

CAME = "FAULT: "  # what is printed when it comes begins so
NEEDS_SPACE = {"mkdir", "create", "write", "sync", "link"}


class FaultyDisk(HookedDisk):
    """`fault`: kill@N, or an error or `count` at call N, at all from N on (N+), or at calls N to M (N-M)."""

    def __init__(self, fault: str) -> None:
        super().__init__(store.LocalDisk(), self._meet)
        match = re.fullmatch(r"(kill|ENOSPC|EIO|count)@([0-9]+)(\+|-([0-9]+))?", fault)
        assert match, fault
        self.what, self.first, self.came = match[1], int(match[2]), False
        self.last = int(match[4] or sys.maxsize) if match[3] else self.first

    def _meet(self, number: int, name: str) -> None:
        if not self.first <= number <= self.last:
            return
        if self.what == "count":
            os.write(2, b"\a")
            return
        if self.what == "ENOSPC" and self.last > self.first and name not in NEEDS_SPACE:
            return
        if not self.came:
            self.came = True
            # In one call, and past every buffer: it may be the last that this process does.
            os.write(2, f"{CAME}{self.what} at call {number} of the disk, {name}\n".encode())
        if self.what == "kill":
            raise Killed
        code = getattr(errno, self.what)
        raise OSError(code, os.strerror(code))

    def call(self, *args: object) -> object:
        try:
            return super().call(*args)
        except Killed:
            os.kill(os.getpid(), signal.SIGKILL)
            raise


def install(fault: str) -> None:
    """From here on runs of this process, and of its forks, meet the fault."""
    from facade import Keeper

    Keeper.disk = FaultyDisk(fault)


if __name__ == "__main__":
    from stagerun.__main__ import main

    install(sys.argv.pop(1))
    main()
