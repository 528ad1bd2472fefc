"""The monitor: a small process beside each worker that sees when it hangs. `python -m stagerun.launch.watch.monitor SETUP`.

It is a process of its own, since a worker that holds Python's lock, or is stopped, could not look at itself. The monitors of
a job talk to that of rank 0, which judges; one that rank 0's can't be reached from judges by itself. What they decide, their
workers say, and end; a worker that can't is killed.
"""

import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from stagerun.launch.watch.judge import Ending, Seen, ending, judge, tick
from stagerun.launch.watch.peers import Hub, Spoke
from stagerun.launch.watch.process import Setup, Worker, gone, log_failure, prepare
from stagerun.system.lines import Closed, Lines
from stagerun.system.process import die_with_parent
from stagerun.system.pulse import Limits, Section

_ENDING_TICK_S = 0.05
# Longer without a look, and this process was stopped itself, with its worker (Ctrl-Z), or had no processor: it can't blame others.
_ASLEEP_S = 2.0
# A worker has so long to answer that it will say why it ends.
_ANSWER_S = 0.4
# Then it may write a snapshot for so long, where it is to blame itself or isn't the one that writes them; and has a little to end.
_SNAPSHOT_S, _END_S = 10.0, 5.0
# How long the line for the log may take.
_LOG_S = 1.0


class Monitor:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.limits = Limits({Section(name): value for name, value in setup.limits.items()})
        self.worker = Worker(setup.rank, setup.pid, setup.thread, setup.pulse, setup.stack)
        self.link = Lines(socket.socket(fileno=setup.link))
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.link, selectors.EVENT_READ, self._from_worker)
        self.hub: Hub | None = None
        self.spoke: Spoke | None = None
        if setup.rank:
            self.spoke = Spoke(setup, self.limits, self.selector, self._end, self.worker.stack)
        elif setup.size > 1:
            self.hub = Hub(setup, self.limits, self.selector, self.link.send, self.worker.stack)
        now = time.monotonic()
        self.tick_s = tick(setup.size)
        self.looked, self.awake = now, now  # last look; since when nothing kept this process from looking
        self.stopped_since: float | None = None
        self.prepared = self.done = False
        self.log = ""
        # The end:
        self.text = ""
        self.patience = _SNAPSHOT_S
        self.answered = 0.0  # when
        self.ending_since = 0.0
        self.threads: list[threading.Thread] = []  # that may take for ever

    def run(self) -> None:
        if self.hub is not None:
            self.hub.listen()
        while not self.done:
            due = self.looked + (self.tick_s if not self.text else _ENDING_TICK_S)
            for key, _ in self.selector.select(max(0.0, due - time.monotonic())):
                key.data(key.fileobj)
            if time.monotonic() >= due:
                self._tick()
        for thread in self.threads:
            thread.join(_LOG_S)
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()

    # -- the worker

    def _from_worker(self, link: Lines) -> None:
        try:
            messages = link.receive()
        except Closed:
            self._gone()
            return
        for message in messages:
            match message:
                case {"bye": True}:
                    self._farewell(worded=True)
                    self.done = True
                case {"who": True}:
                    side = self.hub or self.spoke
                    self.link.send({"gone": side.gone(time.monotonic()) if side is not None else []})
                case {"log": str(path)}:
                    self.log = path
                case {"answered": True}:
                    self.answered = time.monotonic()
                case {"meet": dict(place)}:
                    self._meet(place)

    def _meet(self, place: dict[str, Any]) -> None:
        if self.hub is not None:
            self.hub.meet(place["token"])
        if self.spoke is not None:
            self.spoke.meet(place)

    def _gone(self) -> None:
        """The worker has ended, one way or another: perhaps as it was asked to, perhaps without a word, which the others then hear
        from here. Their collectives may never show it."""
        if self.text:
            self._log()  # not before: what it has still trained and saved comes first
        else:
            self._farewell(worded=False)
        self.done = True

    def _farewell(self, worded: bool) -> None:
        for side in (self.hub, self.spoke):
            if side is not None:
                side.farewell(worded)

    def _look(self, now: float) -> Seen:
        beat, state = self.worker.beat(), self.worker.state()
        if state != "T":
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now
        began = max(beat.since if beat.waiting else beat.moved, self.awake)
        return Seen(
            rank=self.setup.rank,
            host=self.setup.host,
            pid=self.setup.pid,
            section=beat.section,
            stage=beat.stage,
            iter=beat.iter,
            idle=max(0.0, now - began),
            waiting=beat.waiting,
            printing=beat.printing,
            compiled=beat.compiled,
            slowest=beat.slowest,
            state=state,
            stopped=now - self.stopped_since if self.stopped_since is not None else 0.0,
            batches=beat.batches,
            busy=beat.busy,
        )

    # -- looking and judging

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self.looked > _ASLEEP_S + self.tick_s:
            self._woke(now)
        self.looked = now
        if self.text:
            self._see_to_the_end(now)
            return
        if os.getppid() != self.setup.pid:  # a process that the worker has forked may keep its link open
            self._gone()
            return
        if text := gone(self.setup.gone):  # the launcher sees a host's end sooner than silence can show it
            self._end(Ending(text, False))
            return
        own = self._look(now)
        if (end := self._judge(own, now)) is not None:
            self._end(end)
        elif not self.prepared:  # not before it watches
            self.prepared = True
            prepare()

    def _judge(self, own: Seen, now: float) -> Ending | None:
        if self.hub is not None:
            return self.hub.judge(own, now)
        if self.spoke is not None:
            return self.spoke.judge(own, now)
        verdict = judge([own], 1, self.limits)
        return ending(own.rank, verdict, {own.rank: self.worker.stack()}) if verdict is not None else None

    def _woke(self, now: float) -> None:
        self.awake = now
        self.stopped_since = None
        for side in (self.hub, self.spoke):
            if side is not None:
                side.woke(now)

    # -- the end

    def _end(self, end: Ending) -> None:
        """Has the worker say it and end."""
        if self.text:
            return
        self.text, self.ending_since = end.text, time.monotonic()
        if self.setup.rank == 0 and not end.guilty:
            self.patience = self.limits.of(Section.SAVE)
        self.link.send({"end": self.text, "patience": float(self.patience)})

    def _see_to_the_end(self, now: float) -> None:
        if not self.answered and now > self.ending_since + _ANSWER_S:
            self.answered = now
            # It adds nothing more, and its end may be that of all processes, as in a container.
            self._log()
            for thread in self.threads:
                thread.join(_LOG_S)
            self.threads += self.worker.speak_for(self.text)
        if now > self.ending_since + self.patience + _END_S:
            self.worker.kill()
            self._log()
            self.done = True

    def _log(self) -> None:
        if self.log:
            self.threads.append(log_failure(self.log, self.text))
            self.log = ""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # meant for the worker, whose end ends this one, too
    setup = Setup(**json.loads(sys.argv[1]))
    # It sees that the worker has ended, and informs the other monitors; but not while it is stopped, as with Ctrl-Z.
    with suppress(OSError):
        die_with_parent(signal.SIGCONT)
    monitor = Monitor(setup)
    if os.getppid() == setup.pid:  # so it was when the monitor opened the process
        monitor.run()


if __name__ == "__main__":
    main()
