"""The monitor: a small process beside each worker that sees when it hangs. `python -m stagerun.launch.watch.monitor SETUP`.

It is a process of its own, since a worker that holds Python's lock, or is stopped, could not look at itself. The monitors of
a job talk to that of rank 0, which judges; one that rank 0's can't be reached from judges by itself. What they decide, their
workers say, and end; a worker that can't is killed.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

from stagerun.base.errors import ExitCode
from stagerun.launch.folder import report
from stagerun.launch.watch import process
from stagerun.launch.watch.judge import TICK_S, Pace, Seen, Verdict, blame, judge, tick
from stagerun.launch.watch.peers import Message, Peers
from stagerun.system.host import open_files
from stagerun.system.process import die_with_parent
from stagerun.system.pulse import SIZE, Beat, Limits, Section, read
from stagerun.system.typed import json_line

_ENDING_TICK_S = 0.05
# Longer without a look, and this process was stopped itself, with its worker (Ctrl-Z), or had no processor: it can't blame others.
_ASLEEP_S = 2.0
# How long to wait for the stacks of other hosts' ranks.
_STACKS_S = 0.5
# A worker has so long to answer that it will say why it ends.
_ANSWER_S = 0.4
# Then it may write a snapshot for so long, where it is to blame itself or isn't the one that writes them; and has a little to end.
_SNAPSHOT_S, _END_S = 10.0, 5.0
# How long the line for the log may take.
_LOG_S = 1.0
_MOST_FILES = 1 << 20


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker says to its monitor at the start. `pulse`, `stack`, `link` and `listener` (on rank 0) are file descriptors. `gone`: a
    file in which our launcher, if one started the worker, reports a host that is gone."""

    rank: int
    size: int
    pid: int
    thread: int  # the one that trains
    host: str
    limits: dict[str, float]
    pulse: int
    stack: int
    link: int
    listener: int
    gone: str


class Monitor:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.limits = Limits({Section(name): value for name, value in setup.limits.items()})
        open_files(_MOST_FILES)  # on rank 0 a connection for each rank
        self.peers = Peers(setup.rank, setup.size, self._end)
        self.pace = Pace()
        now = time.monotonic()
        self.tick_s = tick(setup.size)
        self.looked, self.awake = now, now  # last look; since when nothing kept this process from looking
        self.beat = Beat(moved=now)
        self.stopped_since: float | None = None
        self.blamed: Seen | None = None
        self.blamed_at = self.verdict_at = 0.0
        self.gone: list[str] = []
        self.done = False
        self.log = ""
        # The end:
        self.text = ""
        self.patience = _SNAPSHOT_S
        self.answered = 0.0  # when
        self.ending_since = 0.0
        self.threads: list[threading.Thread] = []  # that may take for ever

    async def run(self) -> NoReturn:
        reader, self.writer = await asyncio.open_connection(sock=socket.socket(fileno=self.setup.link))
        if self.setup.listener >= 0:
            await self.peers.listen(socket.socket(fileno=self.setup.listener))
        worker = asyncio.create_task(self._hear_worker(reader))
        while not self.done:
            due = self.looked + (self.tick_s if not self.text else _ENDING_TICK_S)
            await asyncio.wait([worker], timeout=min(TICK_S, max(0.0, due - time.monotonic())))
            if worker.done():
                self._gone()
            elif time.monotonic() >= due:
                self._tick()
        self._join()
        os._exit(0)  # all is said; asyncio would complain of tasks that it cancels

    async def _hear_worker(self, reader: asyncio.StreamReader) -> None:
        """Take what the worker says, to its end."""
        with suppress(OSError):
            while text := await reader.readline():
                match json.loads(text):
                    case {"bye": True}:
                        self.peers.send({"bye": True, "worded": True})
                        self.done = True
                        return
                    case {"log": str(path)}:
                        self.log = path
                    case {"answered": True}:
                        self.answered = time.monotonic()
                    case {"meet": dict(place)}:
                        self.peers.meet(place)

    def _tell(self, message: Message) -> None:
        """Tell the worker."""
        self.writer.write(json_line(message))

    def _gone(self) -> None:
        """The worker has ended, one way or another: perhaps as it was asked to, perhaps without a word, which the others then hear
        from here. Their collectives may never show it."""
        if self.text:
            self._log()  # not before: what it has still trained and saved comes first
        elif not self.done:
            self.peers.send({"bye": True, "worded": False})
        self.done = True

    # -- looking and judging

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self.looked > _ASLEEP_S + self.tick_s:
            self.awake, self.stopped_since = now, None
            self.pace.restart()
            self.peers.woke(now)
        self.looked = now
        if self.text:
            self._see_to_the_end(now)
        elif os.getppid() != self.setup.pid:  # a process that the worker has forked may keep its link open
            self._gone()
        elif text := self._lost_host():
            self._end(text)
        else:
            self._judge(now)

    def _lost_host(self) -> str:
        """What our launcher says of a host that is gone: it sees that sooner than silence can show it; ''."""
        with suppress(OSError, ValueError), open(self.setup.gone) as file:
            return str(json.load(file))
        return ""

    def _judge(self, now: float) -> None:
        own = self._look(now)
        # For its stack a stopped worker is sent on: it is reported as it was before, until rank 0's monitor has seen it.
        if self.blamed is not None and now < self.blamed_at + _STACKS_S + 2 * self.tick_s:
            own = self.blamed
        elif blame(own, self.setup.size, self.limits):
            stack = process.stack(self.setup.rank, self.setup.pid, self.setup.thread, self.setup.stack)
            own = self.blamed = replace(own, stack=stack)
            self.blamed_at = now
        self.peers.speak(own)
        if (gone := self.peers.gone(now)) != self.gone:
            self.gone = gone
            self._tell({"gone": gone})
        if self.peers.judged(now):
            return
        seen = [own, *self.peers.seen(now)]
        verdict = judge(seen, self.setup.size, self.limits)
        if verdict is None:
            self.verdict_at = 0.0
            for text in self.pace.look(seen) if self.setup.rank == 0 else ():
                self._tell({"news": text})
        else:
            self.verdict_at = self.verdict_at or now
            if now > self.verdict_at + _STACKS_S or not self._stacks_missing(verdict):
                text = verdict.message()
                if self.setup.rank == 0:
                    self.peers.send({"end": text})
                self._end(text, own.rank in {one.rank for one in verdict.guilty})

    def _stacks_missing(self, verdict: Verdict) -> bool:
        """Whether a stack may still come, of a rank that can be reached."""
        return any(one.stack is None and not one.silence > self.tick_s * 2 and not one.ended for one in verdict.guilty)

    def _look(self, now: float) -> Seen:
        # The one before where a new one is being written.
        setup, beat = self.setup, read(os.pread(self.setup.pulse, SIZE, 0)) or self.beat
        self.beat, state = beat, process.state(setup.pid)
        if state != "T":
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now
        known = asdict(beat)
        moved, since = known.pop("moved"), known.pop("since")
        return Seen(
            rank=setup.rank,
            host=setup.host,
            pid=setup.pid,
            idle=max(0.0, now - max(since if beat.waiting else moved, self.awake)),
            state=state,
            stopped=now - self.stopped_since if self.stopped_since is not None else 0.0,
            **known,
        )

    # -- the end

    def _end(self, text: str, guilty: bool = False) -> None:
        """Has the worker say it and end."""
        if self.text:
            return
        self.text, self.ending_since = text, time.monotonic()
        if self.setup.rank == 0 and not guilty:
            self.patience = self.limits.of(Section.SAVE)
        self._tell({"end": text, "patience": self.patience})

    def _see_to_the_end(self, now: float) -> None:
        if not self.answered and now > self.ending_since + _ANSWER_S:
            self.answered = now
            # It adds nothing more, and its end may be that of all processes, as in a container.
            self._log()
            self._join()
            reported = report(self.setup.rank, ExitCode.PEER, self.text)
            process.kill(self.setup.pid)
            if not reported:
                self._aside(process.say, f"rank {self.setup.rank}: {self.text}\n")
        if now > self.ending_since + self.patience + _END_S:
            process.kill(self.setup.pid)
            self._log()
            self.done = True

    def _log(self) -> None:
        if self.log:
            self._aside(process.log_failure, self.log, self.text)
            self.log = ""

    def _aside(self, do: Callable[..., None], *words: str) -> None:
        """In a thread: the disk may be what hangs, and it may be that no one reads what is said."""
        self.threads.append(threading.Thread(target=do, args=words, daemon=True))
        self.threads[-1].start()

    def _join(self) -> None:
        for thread in self.threads:
            thread.join(_LOG_S)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # meant for the worker, whose end ends this one, too
    setup = Setup(**json.loads(sys.argv[1]))
    # It sees that the worker has ended, and informs the other monitors; but not while it is stopped, as with Ctrl-Z.
    with suppress(OSError):
        die_with_parent(signal.SIGCONT)
    monitor = Monitor(setup)
    if os.getppid() == setup.pid:
        asyncio.run(monitor.run())


if __name__ == "__main__":
    main()
