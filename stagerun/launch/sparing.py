"""Workers that the others go on without: each says of itself when it is one, and our launcher doesn't end the job with it. No torch."""

import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stagerun.base.errors import ExitCode
from stagerun.launch.folder import Report, reports, spare, spared
from stagerun.system.pulse import Pulse

_LOST_S, _MISSED_S = 1.0, 10.0
# A worker that the others go on without has so long to end when rank 0 has ended well; it may be stopped.
LEFT_S = 10.0


@contextmanager
def sparing(worker: int, pulse: Pulse, yes: bool = True) -> Iterator[None]:
    """Within it the others go on without this worker if it is gone. `worker`: its rank at the job's start; `yes`: False does nothing.

    Its own error is one that the others go on without, so the mark stays."""
    if not yes:
        yield
        return
    spare(worker, True)
    pulse.spare(True)
    yield
    pulse.spare(False)
    spare(worker, False)


def failed(codes: Mapping[int, int | None], spared: Collection[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Sorts the workers that have ended as they shouldn't, by rank: those that the others go on without, and those that are needed. One that
    was stopped and has saved is no loss, but the end of all. `codes`: of all workers here, None of one that runs."""
    gone = {rank: code for rank, code in codes.items() if code}
    needed = {rank: code for rank, code in gone.items() if rank not in spared or code == ExitCode.SAVED}
    return {rank: code for rank, code in gone.items() if rank not in needed}, needed


def without(
    reports: Sequence[Report], deaths: Mapping[int, int], spared: Collection[int]
) -> tuple[list[Report], dict[int, int]]:
    """What a verdict is made of: how workers ended, but for those that the others went on without."""
    kept = [one for one in reports if one.rank not in spared or one.code in (ExitCode.DONE, ExitCode.SAVED)]
    return kept, {rank: code for rank, code in deaths.items() if rank not in spared or code == ExitCode.SAVED}


def patience(code: int) -> float:
    """Seconds after its end until a worker counts as lost: one that is needed may end now and be why. Longer for one that has missed
    others, which may still save what is trained."""
    return _MISSED_S if code == ExitCode.PEER else _LOST_S


def lost_text(rank: int, code: int, said: str, host: str = "") -> str:
    """For the user. `said`: what the worker reported."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    text = f"warning: worker {rank}{f' on {host}' if host else ''} {how}; the others go on without it"
    return f"{text}\n  it said: {said}" if said else text


@dataclass
class Watch:
    """Over this host's workers, whose report folder is `folder`. `say`: gets rank, exit code and last words of each that is lost, once."""

    folder: Path
    say: Callable[[int, int, str], None]
    over: bool = False  # rank 0, on whichever host, has ended well
    _since: dict[int, float] = field(default_factory=dict)  # of those that have ended as they shouldn't
    _said: set[int] = field(default_factory=set)
    _left: float = 0.0  # since when those that can be spared are waited for

    def goes_on(self, codes: Mapping[int, int | None], kill: Callable[[int], None]) -> bool:
        """Whether the workers are to be left alone although some have failed. `codes` as of `failed`; `kill` ends a worker."""
        now, marked = time.monotonic(), spared(self.folder)
        self.over = self.over or codes.get(0) == ExitCode.DONE
        gone, needed = failed(codes, marked)
        for rank, code in gone.items() if not needed else ():
            # When none is left here this is the last look.
            if now > self._since.setdefault(rank, now) + patience(code) or self.over or None not in codes.values():
                self._tell_of(rank, code)
        self._end_left(codes, marked, now, kill)
        return bool(gone) and not needed and None in codes.values()

    def _tell_of(self, rank: int, code: int) -> None:
        if rank not in self._said:
            self._said.add(rank)
            self.say(rank, code, next((one.text for one in reports(self.folder, 1, rank)), ""))

    def _end_left(
        self, codes: Mapping[int, int | None], marked: Collection[int], now: float, kill: Callable[[int], None]
    ) -> None:
        """Where rank 0 has ended well nothing is left to do for one that it went on without."""
        left = [rank for rank, code in codes.items() if code is None and rank in marked]
        if not self.over or not left:
            return
        self._left = self._left or now
        if now > self._left + LEFT_S:
            for rank in left:
                kill(rank)
