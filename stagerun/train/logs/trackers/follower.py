"""The process of one tracker: it follows OUT/log.jsonl and sends what stands for good. It imports no torch, and the run doesn't wait for it.

How far it got stands in OUT/trackers/NAME.json. Each of the cases in which that or the tracker is behind ends with each line there once:

- The run is killed: this process reads the end of its stdin, sends what has settled by then, and ends.
- This process is killed, too, before a tracker has stored what it was sent: the tracker is asked what it has (`begin`), and what it lacks is
  read from the log again; from its beginning, if the tracker has less than was noted.
- It is killed after the tracker has stored lines and before that is noted: the tracker has more than was noted, and these are not sent.
- The log was killed before it said that a snapshot is there: the next StageStarted says so.
- It is killed while the tracker takes its time at the end: the note doesn't say `ended`, and the next command asks the tracker what it has.
- The last life's process still sends while the next one starts: they take turns by a lock.
"""

import fcntl
import json
import os
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from stagerun.base.events import RunFinished, RunStarted, Stopped
from stagerun.system.files import open_shared, write_whole
from stagerun.train.log_file import Place, read_on
from stagerun.train.logs.table import tracker_of
from stagerun.train.logs.trackers.settled import Line, Restart, Settling, Undone
from stagerun.train.logs.trackers.tracker import Point, Text, TrackedRun, Tracker

END_S = 30.0  # from the run's end to this process's
_AGAIN_S = 10.0  # between two attempts to reach a tracker
_BATCH = 500
_LOOK_S = 2.0
_STATUS: dict[type, str] = {RunStarted: "failed", RunFinished: "finished", Stopped: "stopped"}  # until the next of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the run says to the process of a tracker, in the first line of its stdin, which ends when the run does. `size`: of the log
    before this process life. `goes_on`: where it takes up each stage that it will train. `before`: iterations above each stage."""

    tracker: str
    project: str
    out: str
    size: int
    goes_on: dict[str, int]
    before: dict[str, int]
    settings: dict[str, dict[str, Any]]
    workers: int


class Follower:
    """`there`: points that the tracker has. `noted`: those of them that the note counts."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.out = orders, Path(orders.out)
        self.file = _note_of(self.out, orders.tracker)
        self.tracker: Tracker | None = None
        self.there = self.noted = 0
        self.status = "failed"  # what the log says of the run's end
        self.run, self.number = uuid.uuid4().hex[:8], 1
        self._begin_at(Settling())
        with suppress(FileNotFoundError):
            note = json.loads(self.file.read_bytes())
            settling = _settling(note["settling"])
            another_log = settling.at > orders.size  # someone has removed the one that it is of
            if not another_log and not self._copied(note):
                self.run, self.number, self.noted = note["run"], note["number"], settling.count
                self.status = note["status"]
                self._begin_at(settling)

    def _copied(self, note: dict[str, Any]) -> bool:
        """Whether this folder is a copy of another one, to which the run there belongs; one that was moved isn't."""
        there = Path(note["out"])
        with suppress(OSError, ValueError, KeyError):
            same = there.samefile(self.out)
            return not same and json.loads(_note_of(there, self.orders.tracker).read_bytes())["run"] == note["run"]
        return False

    def follow(self) -> None:
        """Sends what has settled. Raises what the tracker does: then this object is of no use any more."""
        while True:
            try:
                return self._follow()
            except Undone as undone:
                # Trackers don't take points back (one does, online alone): another run of it shows what stands.
                if self.there and self.tracker is not None:
                    self.tracker.end("undone")
                    self.tracker, self.number = None, self.number + 1
                self.there = 0
                self._begin_at(Settling(restarts=undone.restarts))
                self._note()

    def _follow(self) -> None:
        if self.tracker is None:
            self._note()  # its name, before there is anything of that name
            self.tracker = tracker_of(self.orders.tracker)()
            held = self.tracker.begin(self._tracked())
            self.there = self.noted if held is None else held
            if self.there < self.noted:
                self._begin_at(Settling(restarts=self.settling.restarts))
        if not self.settling.at:
            self._begin_at(Settling(restarts=self._undone()))
        points: list[Point] = []
        texts: dict[str, Text] = {}
        for found in self._settled():
            if isinstance(found, Text):
                texts[found.name] = found
            elif found.number >= self.there:
                points.append(found)
            if len(points) >= _BATCH:
                self._send(points, texts)
        self._send(points, texts)
        if self.settling.count > self.noted:
            self._note()

    def _begin_at(self, settling: Settling) -> None:
        self.settling, self.looked = settling, False

    def _undone(self) -> list[Restart]:
        """What has undone something up to here, found before any of it is sent."""
        while True:
            try:
                for _ in self._read():
                    pass
                return self.settling.restarts
            except Undone as undone:
                self._begin_at(Settling(restarts=undone.restarts))

    def _send(self, points: list[Point], texts: dict[str, Text]) -> None:
        if points or texts:
            assert self.tracker is not None
            self.tracker.send(tuple(points), tuple(texts.values()))
            self.there += len(points)
        points.clear()
        texts.clear()

    def _settled(self) -> Iterator[Point | Text]:
        number, before = self.settling.count, self.orders.before
        for found in self._read():
            if isinstance(found, Line):
                yield Point(
                    number=number,
                    time=found.time,
                    stage=found.stage,
                    iteration=before.get(found.stage, 0) + found.iter,
                    values={f"{found.stage}/{name}": value for name, value in found.values.items()},
                )
                number += 1
            else:
                yield found

    def _read(self) -> Iterator[Line | Text]:
        """New lines of the log. Where this process life begins, what it will train again counts as undone."""
        settling, place = self.settling, Place(self.settling.at)
        with os.fdopen(open_shared(self.out / "log.jsonl"), "rb") as file:
            for time, event in read_on(file, place):
                if place.begin >= self.orders.size:
                    yield from self._look_ahead()
                self.status = _STATUS.get(type(event), self.status)
                yield from settling.read(place.begin, place.at, time, event)
        settling.at = place.at
        if place.at >= self.orders.size:
            yield from self._look_ahead()

    def _look_ahead(self) -> Iterator[Line]:
        if not self.looked:
            self.looked = True
            goes_on = [Restart(self.orders.size, stage, iter) for stage, iter in self.orders.goes_on.items()]
            yield from self.settling.restart(goes_on)

    def _tracked(self) -> TrackedRun:
        another = f"-{self.number}" if self.number > 1 else ""
        project = self.orders.project
        return TrackedRun(
            id=self.run + another,
            name=f"{project}-{self.run}{another}",
            project=project,
            out=self.out,
            settings=self.orders.settings,
            workers=self.orders.workers,
        )

    def _note(self, ended: bool = False) -> None:
        note = {
            "run": self.run,
            "number": self.number,
            "out": self.orders.out,
            "status": self.status,
            "ended": ended,
            "settling": asdict(self.settling),
        }
        write_whole(self.file, json.dumps(note).encode())
        self.noted = self.settling.count

    def end(self) -> None:
        if self.tracker is not None:
            self.tracker.end(self.status)
            self._note(ended=True)


def lacks(out: Path, tracker: str) -> bool:
    """Whether a tracker has not been sent all of the log, or not been waited for."""
    try:
        note = json.loads(_note_of(out, tracker).read_bytes())
        return not note["ended"] or note["settling"]["at"] < (out / "log.jsonl").stat().st_size
    except FileNotFoundError:
        return (out / "log.jsonl").exists()
    except (ValueError, KeyError, TypeError):  # it says so itself
        return True


def _note_of(out: Path, tracker: str) -> Path:
    return out / "trackers" / f"{tracker}.json"


def _settling(note: dict[str, Any]) -> Settling:
    waiting, restarts = [Line(**one) for one in note["waiting"]], [Restart(**one) for one in note["restarts"]]
    return Settling(**{**note, "waiting": waiting, "restarts": restarts})


def main() -> None:
    """stdin has Orders in its first line, and ends with the run. Each line on stdout is for the user."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the run gets it, too, and says when it is over
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a tracker prints
    with suppress(OSError):
        os.nice(5)
    orders = Orders(**json.loads(_first_line()))
    over = threading.Event()
    threading.Thread(target=_watch, args=(over,), daemon=True).start()
    lock = open(Path(orders.out) / "trackers" / f".{orders.tracker}.lock", "wb")  # noqa: SIM115 - held to the end
    fcntl.flock(lock, fcntl.LOCK_EX)
    os._exit(_followed(orders, over, said))  # a tracker's own threads and exit handlers may wait for a server


def _followed(orders: Orders, over: threading.Event, said: TextIO) -> int:
    """To the end of the run; 1 if the tracker was away then."""
    follower: Follower | None = None
    failed, ended = "", False
    while not ended:
        ended = over.wait(_AGAIN_S if failed else _LOOK_S)
        try:
            follower = follower or Follower(orders)
            follower.follow()
            if ended:
                follower.end()
            failed = ""
        except BaseException as error:  # a tracker may raise anything, SystemExit too
            follower, why = None, f"{type(error).__name__}: {error}".partition("\n")[0]
            if why != failed:  # it may be away for days
                traceback.print_exc()
            if not failed:
                with suppress(OSError):
                    said.write(f"{why}\n")
            failed = why
    return int(bool(failed))


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _watch(over: threading.Event) -> None:
    while os.read(0, 1 << 16):
        pass
    over.set()
    time.sleep(END_S)
    os.killpg(0, signal.SIGKILL)  # with what a tracker has started


if __name__ == "__main__":
    main()
