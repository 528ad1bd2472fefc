"""`--hosts`: one command a host over ssh (`launch.on_host`), with its ranks and where all meet; all end together. This process trains nothing,
and needs no torch."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from stagerun.base.errors import ExitCode, PeerError, UsageError
from stagerun.base.recipe import Schedule
from stagerun.base.text import to_nowhere
from stagerun.launch.folder import Report
from stagerun.launch.hostfile import Host, read_hosts, workers
from stagerun.launch.local import too_late, verdict
from stagerun.launch.on_host import MARK
from stagerun.launch.options import HostOptions
from stagerun.launch.ssh import Way, passed_on
from stagerun.launch.start import Orders
from stagerun.launch.worker_count import check_workers, most_workers
from stagerun.system import signals

AGAIN = "run the same command again: it goes on from the newest snapshot"
# From ssh's start until a host has said what it has: an interpreter and torch, perhaps from a busy file server.
_HELLO_S, _WAITING_S = 90.0, 10.0
_SYNC_S = 600.0
_MARGIN_S, _END_S = 60.0, 2.0
_LOOK_S = 0.25
_LONGEST_LINE = 1 << 16
_SAID_LINES = 20


@dataclass(frozen=True, slots=True)
class Task:
    """`orders`: of all workers. `schedule`: as it is here, in `folder`."""

    orders: Orders
    folder: str
    schedule: Schedule


class _Connection:
    """The command on one host. Threads put its lines into `lines`: the connection, the stream (out, err), the line; '' at its end."""

    def __init__(self, host: Host, way: Way, lines: "queue.Queue[tuple[_Connection, str, str]]") -> None:
        self.host, self.name = host, host.name
        self.hello: dict[str, Any] | None = None
        self.end: dict[str, Any] | None = None
        self.lost = ""  # why, with a hint
        self.said: list[str] = []  # last lines on stderr before its first word
        self.first, self.nproc = 0, 0  # rank
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
        with suppress(OSError):  # gone: reading tells of that
            os.write(self.process.stdin.fileno(), json.dumps(words).encode() + b"\n")  # type: ignore[union-attr]

    @property
    def over(self) -> bool:
        return bool(self.end or self.lost)

    @property
    def ranks(self) -> str:
        return " ".join(map(str, range(self.first, self.first + self.nproc)))


def on_hosts(task: Task, options: HostOptions, nproc: int | None) -> int:
    """The exit code. `nproc`: workers on each host; None: what the host file says, or else is usual there. StagerunError for what keeps it from beginning."""
    assert options.hosts is not None
    hosts, way = read_hosts(options.hosts), options.way(task.folder, task.schedule)
    if way.sync is not None:
        _copy(hosts, way)
    launch = _Launch(task, hosts, way)
    try:
        endpoint, shares = launch.meet(nproc)
        code, text = launch.run(endpoint, shares)
    finally:
        launch.close()
    launch.say(text)
    return code


def _copy(hosts: Sequence[Host], way: Way) -> None:
    """PeerError with every host that the schedule can't be copied to."""
    with signals.held():
        started = [(host, subprocess.Popen(way.copy(host), stderr=subprocess.PIPE)) for host in hosts]
    failures = []
    for host, process in started:
        try:
            said = process.communicate(timeout=_SYNC_S)[1].decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            process.kill()
            said = f"rsync had not ended after {_SYNC_S:.0f} s"
        if process.returncode != 0:
            failures.append(f"{host.name}: the schedule can't be copied there: {said or 'rsync failed'}")
    if failures:
        raise PeerError("\n".join(failures), "rsync must be installed on all hosts, and the folder there be your own")


class _Launch:
    def __init__(self, task: Task, hosts: Sequence[Host], way: Way) -> None:
        self.task, self.way = task, way
        self.lines: queue.Queue[tuple[_Connection, str, str]] = queue.Queue()
        self.asked: list[int] = []  # stop signals
        self.asked_at = 0.0
        self.running = False
        with signals.held():
            self.all = [_Connection(host, way, self.lines) for host in hosts]

    # -- before the start

    def meet(self, nproc: int | None) -> tuple[str, dict[str, int]]:
        """Where all workers meet, and how many each host has. PeerError with every host that is missing; UsageError, RecipeError."""
        head = self.all[0]
        for one in self.all:
            one.send(environment=passed_on(), most=most_workers(self.task.schedule), head=head.host.address)
        last, say_at = time.monotonic() + _HELLO_S, time.monotonic() + _WAITING_S
        while waiting := [one for one in self.all if one.hello is None and not one.lost]:
            now = time.monotonic()
            if now > say_at:
                self.say(f"waiting for {', '.join(one.name for one in waiting)}")
                say_at = last
            for one in waiting if now > last else ():
                one.lost = _why(self.way, one, None)
            self._look()
        if lost := [one.lost for one in self.all if one.lost]:
            raise PeerError("\n".join(lost))
        first: dict[str, str] = {}
        for one in self.all:
            if (other := first.setdefault(_hello(one)["machine"], one.name)) != one.name:
                raise UsageError(
                    f"{other} and {one.name} are the same host", f"for two workers on it write `{other}:2`"
                )
        usual = {one.name: int(_hello(one)["workers"]) for one in self.all}
        shares = workers([one.host for one in self.all], nproc, usual)
        check_workers(self.task.schedule, sum(shares.values()))
        return self._endpoint(), shares

    def _endpoint(self) -> str:
        """An address of the first host's that the others know it by, and a port that is free there. PeerError."""
        head = self.all[0]
        port, own = _hello(head)["port"], _hello(head)["own"]
        if len(self.all) == 1:
            return f"127.0.0.1:{port}"
        known = [a for one in self.all[1:] for a in _hello(one)["addresses"]] + _hello(head)["addresses"]
        if len(own) == 1:
            known += own  # the only one that there is, whatever it is called by
        address = next((a for a in known if a in own), None)
        if address is None:
            raise PeerError(
                f"{head.name} has the addresses {', '.join(own) or 'of its loopback device alone'}, and the other hosts know it by none of "
                f"these, but by {', '.join(dict.fromkeys(known)) or 'none'}",
                "name it in the host file by a name or address by which the others reach it",
            )
        return f"{address}:{port}"

    # -- the workers' life

    def run(self, endpoint: str, shares: Mapping[str, int]) -> tuple[int, str]:
        for number in signals.stop_signals():
            signal.signal(number, self._stop)
        orders, first = self.task.orders, 0
        job = uuid.uuid4().hex
        self.running = True
        for index, one in enumerate(self.all):
            one.first, one.nproc = first, shares[one.name]
            node = {"index": index, "count": len(self.all), "first": first, "endpoint": endpoint, "job": job}
            one.send(
                command=list(orders.command), nproc=one.nproc, threads=orders.threads,
                grace=orders.grace, saves=orders.saves, node=node,
            )  # fmt: skip
            first += one.nproc
        trouble = 0.0
        while not all(one.over for one in self.all):
            self._look()
            if not trouble and any(one.lost or (one.end and _failed(one.end)) for one in self.all):
                trouble = time.monotonic()
            began = self.asked_at or trouble
            if began and time.monotonic() > began + orders.grace + _MARGIN_S:
                for one in self.all:
                    if not one.over:
                        one.send(end=True)
                        one.lost = f"{one.name}: its workers had not ended in time, and were killed\n  hint: {AGAIN}"
        return self._verdict(shares)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Passes a stop signal on, so that all save; a second SIGINT ends all at once."""
        self.asked.append(number)
        self.asked_at = self.asked_at or time.monotonic()
        for one in self.all:
            if self.asked.count(signal.SIGINT) > 1:
                one.send(end=True)
            elif len(self.asked) == 1:
                one.send(stop=number)

    def _verdict(self, shares: Mapping[str, int]) -> tuple[int, str]:
        ends = [one.end for one in self.all if one.end]
        found = sorted((Report(*row) for end in ends for row in end["reports"]), key=lambda report: report.rank)
        deaths = {rank: code for end in ends for rank, code in end["deaths"]}
        lost = [one.lost for one in self.all if one.lost]
        if self.asked.count(signal.SIGINT) > 1:
            if found and found[0].rank == 0 and found[0].code in (ExitCode.DONE, ExitCode.SAVED):
                return found[0].code, found[0].text
            return ExitCode.INTERRUPTED, "ended without saving"
        if lost and not any(report.code not in (ExitCode.DONE, ExitCode.SAVED, ExitCode.PEER) for report in found):
            return ExitCode.PEER, "\n".join(lost)
        names = [name for name, nproc in shares.items() for _ in range(nproc)]
        code, text = verdict(found, deaths, bool(self.asked), self.task.orders.stopped, dict(enumerate(names)))
        if code == ExitCode.PEER and any(end["late"] for end in ends):
            number = self.asked[0] if self.asked else signal.SIGTERM
            return code, too_late(signal.Signals(number), self.task.orders.grace)
        return code, text

    # -- what hosts say

    def _look(self) -> None:
        """Takes what has come."""
        with suppress(queue.Empty):
            self._heard(*self.lines.get(timeout=_LOOK_S))
            while True:
                self._heard(*self.lines.get_nowait())

    def _heard(self, one: _Connection, kind: str, line: str) -> None:
        if not line:
            one.open -= 1
            if not one.open and not one.over:
                self._lose(one)
            return
        before, mark, own = line.partition(MARK) if kind == "out" else (line, "", "")
        if before and one.hello is None:  # ssh's words, or a shell's
            one.said = [*one.said, before.strip()][-_SAID_LINES:] if before.strip() else one.said
        elif before:
            self._show(one, kind, before)
        if not mark:
            return
        with suppress(ValueError):  # cut off in the middle: its end follows
            message = json.loads(own)
            if one.hello is None:
                one.hello = message
            else:
                one.end = message

    def _lose(self, one: _Connection) -> None:
        """Its connection has ended, before its workers have as far as is known: the others end, too."""
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(1.0)
        if not self.running:
            one.lost = _why(self.way, one, one.process.poll())
            return
        what = f"rank{'s' * (one.nproc > 1)} {one.ranks}"
        one.lost = f"{one.name} is gone: its connection ended ({what})\n  hint: {AGAIN}"
        self.say(one.lost.partition("\n")[0])
        for other in self.all:
            if not other.over:
                other.send(gone=one.lost, watched=self.task.orders.limits is not None)

    def _show(self, one: _Connection, kind: str, line: str) -> None:
        """The first host's lines come as they are, since rank 0 speaks for all; others have the host's name before them."""
        stream = sys.stdout if kind == "out" else sys.stderr
        text = line if one is self.all[0] else f"{one.name}: {line}"
        encoding = stream.encoding or "utf-8"
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except OSError:  # no one reads any more; the run goes on
            with suppress(OSError):
                to_nowhere(stream)

    def say(self, text: str) -> None:
        """The launcher's own words."""
        if text:
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends what is left on the hosts."""
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


def _hello(one: _Connection) -> dict[str, Any]:
    assert one.hello is not None
    return one.hello


def _failed(end: Mapping[str, Any]) -> bool:
    return bool(end["deaths"]) or any(code not in (ExitCode.DONE, ExitCode.SAVED) for _, code, _ in end["reports"])


def _why(way: Way, one: _Connection, code: int | None) -> str:
    text, hint = way.why(one.host, code, one.said)
    return f"{text}\n  hint: {hint}" if hint else text
