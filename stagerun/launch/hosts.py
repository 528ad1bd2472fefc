"""`--hosts`: start one command a host over ssh (`launch.on_host`), tell each its ranks and where all meet, and end them together. The
launcher itself trains nothing and needs no torch."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import IO, Any

import msgspec

from stagerun.base.errors import AGAIN, ExitCode, PeerError, UsageError
from stagerun.base.recipe import Schedule
from stagerun.base.text import to_nowhere
from stagerun.command.ending import tell
from stagerun.launch.hostfile import Host, read_hosts
from stagerun.launch.local import Node, Orders, Outcome, verdict
from stagerun.launch.on_host import MARK, Hello
from stagerun.launch.options import HostOptions
from stagerun.launch.ssh import Way, passed_on
from stagerun.plan.workers import check_workers, most_workers
from stagerun.system import signals
from stagerun.system.typed import json_line

# From ssh's start until a host has said what it has: an interpreter, perhaps from a busy file server.
_HELLO_S = 90.0
# How much longer than --grace the workers may take once a stop was asked for or another host has failed.
_MARGIN_S, _END_S = 60.0, 2.0
# How long workers without a monitor may take once another host is lost: they may hang in what they wait for.
_UNWATCHED_S = 3.0
_LONGEST_LINE = 1 << 16


class _Connection:
    """The command on one host. Two threads put its lines into `lines`, with the stream (out, err); '' at a stream's end."""

    def __init__(self, host: Host, way: Way, lines: "queue.Queue[tuple[_Connection, str, str]]") -> None:
        self.host, self.name = host, host.name
        self.hello: Hello | None = None
        self.end: Outcome | None = None
        self.lost = ""  # why, with a hint
        self.said = ""  # last line before its first word: ssh's, or a shell's
        self.ranks = range(0)
        self.open = 2  # streams
        self.process = subprocess.Popen(
            way.command(host), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher
        )  # fmt: skip
        for kind, stream in (("out", self.process.stdout), ("err", self.process.stderr)):
            threading.Thread(target=self._read, args=(kind, stream, lines), daemon=True).start()

    def _read(self, kind: str, stream: IO[bytes], lines: "queue.Queue[tuple[_Connection, str, str]]") -> None:
        while data := stream.readline(_LONGEST_LINE):
            lines.put((self, kind, data.decode(errors="replace")))
        lines.put((self, kind, ""))

    def send(self, **words: Any) -> None:
        """Also from a signal handler: one short write."""
        with suppress(OSError):  # the host is gone, which its streams show
            os.write(self.process.stdin.fileno(), json_line(words))  # type: ignore[union-attr]

    @property
    def over(self) -> bool:
        return self.end is not None or bool(self.lost)

    @property
    def failed(self) -> bool:
        ended = self.end is not None and (self.end.deaths or any(report.code for report in self.end.reports))
        return bool(self.lost or ended)


def on_hosts(orders: Orders, folder: str, schedule: Schedule, options: HostOptions, nproc: int | None) -> int:
    """Run `orders` on all hosts; return the exit code. `schedule`: as read here, in `folder`. `nproc`: workers on each host; None: what the
    host file says, or that host's default. StagerunError if it can't begin."""
    assert options.hosts is not None
    hosts, way = read_hosts(options.hosts), Way.of(options, folder, schedule)
    if way.sources:
        _copy(hosts, way)
    launch = _Launch(orders, hosts, way)
    try:
        launch.meet(schedule, nproc)
        code, text = launch.run(launch.endpoint())
    finally:
        launch.close()
    tell(text)
    return code


def _copy(hosts: Sequence[Host], way: Way) -> None:
    """PeerError with every host that the schedule can't be copied to."""
    with signals.held():
        started = [(host, subprocess.Popen(way.copy(host), stderr=subprocess.PIPE)) for host in hosts]
    failures = []
    for host, process in started:
        said = process.communicate()[1].decode(errors="replace").strip()
        if process.returncode != 0:
            failures.append(f"{host.name}: the schedule can't be copied there: {said or 'rsync failed'}")
    if failures:
        raise PeerError("\n".join(failures), "rsync must be installed on all hosts, and the folder there be your own")


class _Launch:
    def __init__(self, orders: Orders, hosts: Sequence[Host], way: Way) -> None:
        self.orders, self.way = orders, way
        self.lines: queue.Queue[tuple[_Connection, str, str]] = queue.Queue()
        self.asked: list[int] = []  # stop signals
        self.deadline = float("inf")
        with signals.held():
            self.all = [_Connection(host, way, self.lines) for host in hosts]

    def meet(self, schedule: Schedule, nproc: int | None) -> None:
        """Give each host its ranks. PeerError with every host that is missing; UsageError, RecipeError."""
        for one in self.all:
            one.send(environment=passed_on(), most=most_workers(schedule), head=self.all[0].host.address)
        last = time.monotonic() + _HELLO_S
        while waiting := [one for one in self.all if one.hello is None and not one.lost]:
            if time.monotonic() > last:
                for one in waiting:
                    one.lost = self.way.why(one.host, None, one.said)
            self._take()
        if lost := [one.lost for one in self.all if one.lost]:
            raise PeerError("\n".join(lost))
        names: dict[str, str] = {}
        size = 0
        for one, hello in self._hellos():
            if (other := names.setdefault(hello.machine, one.name)) != one.name:
                raise UsageError(
                    f"{other} and {one.name} are the same host", f"for two workers on it write `{other}:2`"
                )
            one.ranks = range(size, size + (nproc or one.host.slots or hello.workers))
            size = one.ranks.stop
        check_workers(schedule, size)

    def _hellos(self) -> list[tuple[_Connection, Hello]]:
        return [(one, one.hello) for one in self.all if one.hello is not None]

    def endpoint(self) -> str:
        """ADDRESS:PORT: an address of the first host's by which the others know it, and a port that is free there. PeerError."""
        (head, first), *others = self._hellos()
        if not others:
            return f"127.0.0.1:{first.port}"
        known = [address for _, hello in (*others, (head, first)) for address in hello.addresses]
        if len(first.own) == 1:
            known += first.own  # whatever the others call it
        address = next((a for a in known if a in first.own), None)
        if address is None:
            raise PeerError(
                f"{head.name} has the addresses {', '.join(first.own) or 'of its loopback device alone'}, and the other hosts know it by none of "
                f"these, but by {', '.join(dict.fromkeys(known)) or 'none'}",
                "name it in the host file by a name or address by which the others reach it",
            )
        return f"{address}:{first.port}"

    def run(self, endpoint: str) -> tuple[int, str]:
        """Run the workers to their end; return the exit code, and what to say."""
        for number in signals.stop_signals():
            signal.signal(number, self._stop)
        for one in self.all:
            node = Node(one.ranks.start, len(one.ranks), self.all[-1].ranks.stop, endpoint)
            one.send(orders=replace(self.orders, limits=None), node=node)
        while not all(one.over for one in self.all):
            self._take()
            if self.asked or any(one.failed for one in self.all):
                self.deadline = min(self.deadline, time.monotonic() + self.orders.grace + _MARGIN_S)
            for one in self.all:
                if time.monotonic() > self.deadline and not one.over:
                    one.send(end=True)
                    one.lost = f"{one.name}: its workers had not ended in time, and were killed\n  hint: {AGAIN}"
        return self._verdict()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a stop signal on, so that all save; a second SIGINT ends all at once."""
        self.asked.append(number)
        for one in self.all:
            if self.asked.count(signal.SIGINT) > 1:
                one.send(end=True)
            elif len(self.asked) == 1:
                one.send(stop=number)

    def _verdict(self) -> tuple[int, str]:
        ends = [one.end for one in self.all if one.end is not None]
        found = sorted((report for end in ends for report in end.reports), key=lambda report: report.rank)
        deaths = {rank: code for end in ends for rank, code in end.deaths.items()}
        lost = [one.lost for one in self.all if one.lost]
        if self.asked.count(signal.SIGINT) > 1:
            if found and found[0].rank == 0 and found[0].code in (ExitCode.DONE, ExitCode.SAVED):
                return found[0].code, found[0].text
            return ExitCode.INTERRUPTED, "ended without saving"
        if lost and not any(report.code not in (ExitCode.DONE, ExitCode.SAVED, ExitCode.PEER) for report in found):
            return ExitCode.PEER, "\n".join(lost)
        outcome = Outcome(found, deaths, self.asked[0] if self.asked else None, any(end.late for end in ends))
        return verdict(outcome, self.orders, {rank: one.name for one in self.all for rank in one.ranks})

    def _take(self) -> None:
        """Handle a line that has come from a host."""
        with suppress(queue.Empty):
            self._heard(*self.lines.get(timeout=0.25))

    def _heard(self, one: _Connection, kind: str, line: str) -> None:
        if not line:
            one.open -= 1
            if not one.open and not one.over:
                self._lose(one)
            return
        before, mark, own = line.partition(MARK) if kind == "out" else (line, "", "")
        if one.hello is None:
            one.said = before.strip() or one.said
        elif before:
            # The first host's lines come as they are, since rank 0 speaks for all.
            stream = sys.stdout if kind == "out" else sys.stderr
            try:
                stream.write(before if one is self.all[0] else f"{one.name}: {before}")
                stream.flush()
            except OSError:  # no one reads any more; the run goes on
                to_nowhere(stream)
        if mark:
            with suppress(ValueError):  # cut off in the middle: its end follows
                if one.hello is None:
                    one.hello = msgspec.convert(json.loads(own), Hello)
                else:
                    one.end = msgspec.convert(json.loads(own), Outcome, str_keys=True)

    def _lose(self, one: _Connection) -> None:
        """The connection ended before the workers did: the other hosts' workers end, too."""
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(1.0)
        if not one.ranks:
            one.lost = self.way.why(one.host, one.process.poll(), one.said)
            return
        text = f"{one.name} is gone: its connection ended (rank{'s' * (len(one.ranks) > 1)} {' '.join(map(str, one.ranks))})"
        one.lost = f"{text}\n  hint: {AGAIN}"
        tell(text)
        words: dict[str, Any] = {"gone": one.lost}
        if self.orders.limits is None:  # no monitor reads that
            words, self.deadline = {"stop": signal.SIGTERM}, min(self.deadline, time.monotonic() + _UNWATCHED_S)
        for other in self.all:
            if not other.over:
                other.send(**words)

    def close(self) -> None:
        """End what is left on the hosts."""
        last = time.monotonic() + _END_S
        for one in self.all:
            with suppress(OSError):
                one.process.stdin.close()  # type: ignore[union-attr]
        for one in self.all:
            try:
                one.process.wait(max(0.0, last - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
