"""The monitor: a small process for each worker that detects a hang. `python -m stagerun.launch.monitor SETUP`.

A worker that holds Python's lock, or is stopped, can't watch itself. The monitors talk over sockets: torch's store would need torch (ten times
the memory), and its calls hang when the store's host is cut off. Workers print what the monitors decide, and end; a worker that can't is killed.
Imports are kept small, since a monitor starts with every worker.
"""

import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from stagerun.base.errors import ExitCode
from stagerun.launch.judge import LONGEST, Pace, Peers, Seen, blame, judge, tick
from stagerun.launch.stopping import remove_left_folder, report
from stagerun.system import signals
from stagerun.system.files import LineFile
from stagerun.system.host import host_name
from stagerun.system.process import die_with_parent, stat
from stagerun.system.pulse import SIZE, Beat, Limits, Section, read
from stagerun.system.typed import json_line

_ENDING_TICK_S = 0.05
# After a longer pause this process was itself stopped with its worker (Ctrl-Z), or had no processor: it can't blame others.
_ASLEEP_S = 2.0
# How long to wait for the stacks of other hosts' ranks.
_STACKS_S = 0.5
# A worker must confirm within _ANSWER_S that it will print why it ends.
_ANSWER_S = 0.4
# Then it has _SNAPSHOT_S for a snapshot (an innocent rank 0, which writes them, has the time-out of `save`), and _END_S to end.
_SNAPSHOT_S, _END_S = 10.0, 5.0
# Time for the line of the log.
_LOG_S = 1.0
_JUST_ENDED_S = 1e-9
# Sent by monitors only. It would end a worker that has no handler yet.
STACK_SIGNAL = signal.SIGRTMIN + 5
# Time to write a stack, and the pause after which it counts as whole.
_STACK_S, _WHOLE_S = 0.4, 0.04
_MOST_LINES = 20
_STARTS = "stagerun/launch/start.py"  # the calls up to the worker's job


@dataclass(frozen=True, slots=True)
class Setup:
    """A worker's message to its monitor at the start. `pulse`, `stack` and `link` are file descriptors."""

    rank: int
    size: int
    pid: int
    thread: int  # that trains
    limits: dict[str, float]
    pulse: int
    stack: int
    link: int


class Monitor:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.limits = Limits({Section(name): value for name, value in setup.limits.items()})
        self.link = socket.socket(fileno=setup.link)
        self.link.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.link, selectors.EVENT_READ, self._hear_worker)
        self.peers, self.pace = Peers(setup.rank, setup.size), Pace()
        now = time.monotonic()
        self.tick_s = tick(setup.size)
        self.looked, self.awake = now, now  # last poll; since when polls are regular
        self.beat = Beat(moved=now)
        self.stopped_since: float | None = None
        self.stack: str | None = None  # of the worker, while it is to blame
        self.verdict_at = 0.0
        self.gone: list[str] = []
        self.done = False
        self.log = ""
        # The end:
        self.text = ""
        self.patience = _SNAPSHOT_S
        self.answered = False
        self.ending_since = 0.0

    def run(self) -> None:
        while not self.done:
            due = self.looked + (_ENDING_TICK_S if self.text else self.tick_s)
            for key, _ in self.selector.select(max(0.0, due - time.monotonic())):
                key.data()
            if not self.done and time.monotonic() >= due:
                self._tick(time.monotonic())

    def _hear_worker(self) -> None:
        try:
            data, files, *_ = socket.recv_fds(self.link, LONGEST, 1)
        except OSError:
            data = b""
        if not data:
            self._worker_ended()
            return
        match json.loads(data):
            case {"bye": True}:
                self._leave(worded=True)
            case {"log": str(path)}:
                self.log = path
            case {"answered": True}:
                self.answered = True
            case {"token": str(token)}:
                link = socket.socket(fileno=files[0])
                self.peers.meet(token, link)
                self.selector.register(link, selectors.EVENT_READ, self._hear_peers)

    def _tell(self, **message: Any) -> None:
        """Tell the worker."""
        with suppress(OSError):  # it is gone, or is stopped and doesn't read
            self.link.send(json_line(message))

    def _hear_peers(self) -> None:
        if end := self.peers.hear(time.monotonic()):
            self._end(end)

    def _worker_ended(self) -> None:
        """Handle the worker's end. The others hear of an unannounced one from here, since their collectives may never show it."""
        if not self.text and not self.done:
            self._leave(worded=False)
        self.done = True

    def _leave(self, worded: bool) -> None:
        record = replace(self._look(time.monotonic()), ended=_JUST_ENDED_S, worded=worded)
        for _ in range(3):  # datagrams may be lost, and none follows
            self.peers.speak(record)
        self.done = True

    # -- polling and judging

    def _tick(self, now: float) -> None:
        if now - self.looked > _ASLEEP_S + self.tick_s:
            self.awake, self.stopped_since = now, None
            self.pace.restart()
            self.peers.woke(now)
        self.looked = now
        if self.text:
            self._see_to_the_end(now)
        elif os.getppid() != self.setup.pid:  # a fork of the worker may keep its link open
            self._worker_ended()
        else:
            self._judge(now)

    def _judge(self, now: float) -> None:
        record = self._look(now)
        if not blame(record, self.setup.size, self.limits):
            self.stack = None
        elif self.stack is None:
            self.stack = stack(self.setup.pid, self.setup.thread, self.setup.stack)
        record = replace(record, stack=self.stack)
        self.peers.speak(record)
        if (gone := self.peers.gone(now)) != self.gone:
            self.gone = gone
            self._tell(gone=gone)
        if self.peers.judged(now):
            return
        seen = [record, *self.peers.seen(now)]
        verdict = judge(seen, self.setup.size, self.limits)
        if verdict is None:
            self.verdict_at = 0.0
            for text in self.pace.look(seen) if self.setup.rank == 0 else ():
                self._tell(news=text)
        else:
            self.verdict_at = self.verdict_at or now
            reachable = [one for one in verdict.guilty if one.silence <= self.tick_s * 2 and not one.ended]
            if now > self.verdict_at + _STACKS_S or all(one.stack is not None for one in reachable):
                self._end(verdict.message(), record.rank in {one.rank for one in verdict.guilty})

    def _look(self, now: float) -> Seen:
        # A beat in the writing: keep the last one.
        setup, beat = self.setup, read(os.pread(self.setup.pulse, SIZE, 0)) or self.beat
        self.beat, letter = beat, state(setup.pid)
        if letter != "T":
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now
        return Seen(
            **asdict(beat),
            rank=setup.rank,
            host=host_name(),
            pid=setup.pid,
            idle=max(0.0, now - max(beat.since if beat.waiting else beat.moved, self.awake)),
            state=letter,
            stopped=now - self.stopped_since if self.stopped_since is not None else 0.0,
        )

    # -- the end

    def _end(self, text: str, guilty: bool = False) -> None:
        """Make the worker print the text and end."""
        if self.text:
            return
        self.text, self.ending_since = text, time.monotonic()
        if self.setup.rank == 0 and not guilty:
            self.patience = self.limits.of(Section.SAVE)
        self._tell(end=text, patience=self.patience)
        self._tell_others()

    def _tell_others(self) -> None:
        if self.setup.rank == 0:
            self.peers.speak(self._look(time.monotonic()), self.text)

    def _see_to_the_end(self, now: float) -> None:
        self._tell_others()
        late = now > self.ending_since + self.patience + _END_S
        if late or (not self.answered and now > self.ending_since + _ANSWER_S):
            # Print before the kill, which may end all processes, as in a container.
            briefly(self._last_word, late)
            kill(self.setup.pid)
            self.done = True

    def _last_word(self, printed: bool) -> None:
        """Log and print the text; `printed`: by the worker."""
        if self.log:
            log_failure(self.log, self.text)
        if not printed and not report(self.setup.rank, ExitCode.PEER, self.text):
            say(f"rank {self.setup.rank}: {self.text}\n")


# -- the worker's process


def state(pid: int) -> str:
    """Return /proc's letter; Z for a process that is gone."""
    return (stat(pid) or "Z")[0]


def stack(pid: int, thread: int, memory: int) -> str:
    """Return the Python stack of the worker, shortened, within some tenths of a second; '' without an answer. `thread`: identity of the
    training thread. `memory`: descriptor of the file that the worker's handler writes to.

    Never resume a stopped worker for it: rank 0 might have been stopped just after it checked its hold on the output folder, which another
    run may have taken since.
    """
    if state(pid) == "T":
        return ""
    with suppress(OSError):
        os.kill(pid, STACK_SIGNAL)
    size, end = 0, time.monotonic() + _STACK_S
    while time.monotonic() < end:
        time.sleep(_WHOLE_S)
        before, size = size, os.fstat(memory).st_size
        if size == before > 0:
            break
    return shortened(os.pread(memory, min(size, 1 << 20), 0).decode(errors="replace"), thread)


def shortened(text: str, trains: int) -> str:
    """Return the training thread's newest calls of faulthandler's text, without the first ones, which are always the same."""
    lines = iter(text.splitlines())
    begins = f"thread {trains:#018x}"
    if not any(begins in line.lower() for line in lines):
        return ""
    calls = takewhile(lambda line: line.strip() and _STARTS not in line, lines)
    trimmed = [call.strip() for call in calls]
    more = [f"and {len(trimmed) - _MOST_LINES} more"] if len(trimmed) > _MOST_LINES else []
    return "\n".join([*trimmed[:_MOST_LINES], *more])


def kill(pid: int) -> None:
    if os.getppid() == pid:  # otherwise it has ended, and the number may be reused
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def say(text: str) -> None:
    with suppress(OSError):
        os.write(2, (signals.erase_line(2) + text).encode())


def briefly(do: Callable[..., None], *args: object) -> None:
    """Call it in a thread, and wait for a moment: the disk, or the reader of stderr, may hang."""
    thread = threading.Thread(target=do, args=args, daemon=True)
    thread.start()
    thread.join(_LOG_S)


def log_failure(path: str, text: str) -> None:
    """Append the run's end to its log."""
    record = {"time": round(time.time(), 3), "event": "Failed", "code": int(ExitCode.PEER), "text": text}
    # One call, on a new line even if the worker was stopped within a line.
    with suppress(OSError), closing(LineFile(Path(path))) as file:
        file.append(json.dumps(record).encode() + b"\n")


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # for the worker, whose end ends this process
    setup = Setup(**json.loads(sys.argv[1]))
    # A stopped monitor (Ctrl-Z) must resume to announce its worker's end.
    with suppress(OSError):
        die_with_parent(signal.SIGCONT)
    monitor = Monitor(setup)
    if os.getppid() == setup.pid:
        monitor.run()
    remove_left_folder()
    os._exit(0)  # wait for no thread


if __name__ == "__main__":
    main()
