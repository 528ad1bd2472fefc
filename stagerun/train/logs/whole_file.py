"""A log that is written as a whole each time, in the place of the old one."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from stagerun.base.errors import PermissionDenied, StagerunError, StorageError
from stagerun.store import LocalDisk, write_atomic
from stagerun.system.files import open_shared


class WholeFile:
    """A small text file. Rank 0 only. It is written aside and renamed, so that readers and killed runs see the old lines or the new, none cut
    short, and lines that a resumed run makes void can go.

    `lines`: what it holds. A log that can't be written is not a reason to lose training: `warn` reports the first failure,
    and the next write tries again, with all lines. PermissionDenied, StorageError if an old file can't be read.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self.warn, self._warned = path, warn, False
        try:
            with os.fdopen(open_shared(path), encoding="utf-8", errors="replace") as file:
                self.lines = file.read().splitlines()
        except FileNotFoundError:
            self.lines = []
        except PermissionError as error:
            raise PermissionDenied(f"{path} may not be read", "give another output folder with --out") from error
        except OSError as error:
            raise StorageError(f"can't read {path}: {error.strerror}", "check the disk") from error

    def write(self, lines: Sequence[str]) -> None:
        if list(lines) == self.lines:
            return
        try:
            write_atomic(LocalDisk(), self.path, "".join(f"{line}\n" for line in lines).encode())
        except StagerunError as error:
            if not self._warned:
                self._warned = True
                self.warn(
                    f"warning: {self.path} can't be written: {error.message}; training goes on without its new lines"
                )
            return
        self.lines = list(lines)

    def left_out(self, count: int) -> None:
        """Warns of lines that were read and mean nothing here."""
        if count:
            lines = "line that is not its own" if count == 1 else "lines that are not its own"
            self.warn(f"warning: {self.path} holds {count} {lines}, left out from now on")
