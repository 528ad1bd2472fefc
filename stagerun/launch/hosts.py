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

from stagerun.base.errors import AGAIN, ExitCode, PeerError
from stagerun.base.recipe import Schedule
from stagerun.command.ending import tell, to_nowhere
from stagerun.launch.hostfile import Host, read_hosts
from stagerun.launch.local import Node, Orders, Outcome, verdict
from stagerun.launch.on_host import MARK, Hello
from stagerun.launch.options import HostOptions
from stagerun.launch.ssh import Way, passed_on
from stagerun.plan.choice import check_workers, most_workers
from stagerun.system import signals
from stagerun.system.typed import json_line

# From ssh's start until a host has said what it has: an interpreter, perhaps from a busy file server.
_HELLO_S = 90.0
# How much longer than --grace the workers may take once a stop was asked for or another host has failed.
_MARGIN_S, _END_S = 60.0, 2.0
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

    def shows(self, kind: str, line: str, first: bool) -> None:
        """Print a worker's line. The first host's are printed as they are, since rank 0 speaks for all."""
        stream = sys.stdout if kind == "out" else sys.stderr
        try:
            stream.write(line if first else f"{self.name}: {line}")
            stream.flush()
        except OSError:  # no one reads any more; the run goes on
            to_nowhere(stream)

    @property
    def over(self) -> bool:
        return self.end is not None or bool(self.lost)


def on_hosts(orders: Orders, folder: str, schedule: Schedule, options: HostOptions, nproc: int | None) -> int:
    """Run `orders` on all hosts; return the exit code. `schedule`: as read here, in `folder`. `nproc`: workers on each host; None: what the
    host file says, or that host's default. StagerunError if it can't begin."""
    assert options.hosts is not None
    hosts, way = read_hosts(options.hosts), Way.of(options, folder)
    if way.copied:
        _copy(hosts, way)
    launch = _Launch(orders, hosts, way)
    try:
        code, text = launch.run(launch.meet(schedule, nproc))
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
        with signals.held():
            self.all = [_Connection(host, way, self.lines) for host in hosts]

    def meet(self, schedule: Schedule, nproc: int | None) -> str:
        """Give each host its ranks. Return ADDRESS:PORT where they meet: an address of the first host's on the way to the second, and a port
        that is free there. PeerError with every host that is missing; RecipeError."""
        first, *others = self.all
        for one in self.all:
            peer = (others[0] if others else first).host.address
            one.send(environment=passed_on(), most=most_workers(schedule), peer=peer)
        last = time.monotonic() + _HELLO_S
        while waiting := [one for one in self.all if one.hello is None and not one.lost]:
            if time.monotonic() > last:
                for one in waiting:
                    one.lost = self.way.why(one.host, None, one.said)
            self._take()
        if lost := [one.lost for one in self.all if one.lost]:
            raise PeerError("\n".join(lost))
        hellos = [one.hello for one in self.all if one.hello is not None]
        size = 0
        for one, hello in zip(self.all, hellos, strict=True):
            one.ranks = range(size, size + (nproc or one.host.slots or hello.workers))
            size = one.ranks.stop
        check_workers(schedule, size)
        address = hellos[0].address if others else "127.0.0.1"
        if not address:
            hint = "name the hosts by names or addresses that all of them know"
            raise PeerError(f"{first.name} knows no address of its own by which the other hosts reach it", hint)
        return f"{address}:{hellos[0].port}"

    def run(self, endpoint: str) -> tuple[int, str]:
        """Run the workers to their end; return the exit code, and what to say."""
        for number in signals.stop_signals():
            signal.signal(number, self._stop)
        for one in self.all:
            node = Node(one.ranks.start, len(one.ranks), self.all[-1].ranks.stop, endpoint)
            one.send(orders=replace(self.orders, limits=None), node=node)
        deadline = float("inf")
        while left := [one for one in self.all if not one.over]:
            self._take()
            if self.asked or any(one.lost or (one.end is not None and one.end.failed) for one in self.all):
                deadline = min(deadline, time.monotonic() + self.orders.grace + _MARGIN_S)
            if time.monotonic() > deadline:
                for one in left:
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
        interrupted = self.asked.count(signal.SIGINT) > 1
        if (
            lost
            and not interrupted
            and not any(report.code not in (ExitCode.DONE, ExitCode.SAVED, ExitCode.PEER) for report in found)
        ):
            return ExitCode.PEER, "\n".join(lost)
        asked = self.asked[0] if self.asked else None
        outcome = Outcome(found, deaths, asked, any(end.late for end in ends), interrupted)
        return verdict(outcome, self.orders, {rank: one.name for one in self.all for rank in one.ranks})

    def _take(self) -> None:
        """Handle a line that has come from a host."""
        with suppress(queue.Empty):
            one, kind, line = self.lines.get(timeout=0.25)
            if line:
                self._heard(one, kind, line)
            else:
                one.open -= 1
                if not one.open and not one.over:
                    self._lose(one)

    def _heard(self, one: _Connection, kind: str, line: str) -> None:
        before, mark, own = line.partition(MARK) if kind == "out" else (line, "", "")
        if one.hello is None:
            one.said = before.strip() or one.said
        elif before:
            one.shows(kind, before, one is self.all[0])
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
        ranks = " ".join(map(str, one.ranks))
        text = f"{one.name} is gone: its connection ended (rank{'s' if len(one.ranks) > 1 else ''} {ranks})"
        one.lost = f"{text}\n  hint: {AGAIN}"
        tell(text)
        for other in self.all:  # workers that hang in a collective end by their monitors
            other.send(stop=signal.SIGTERM)

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
