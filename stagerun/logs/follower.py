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
from stagerun.logs.log_file import LOG, Place, read_on
from stagerun.logs.settled import Line, Restart, Settling, Undone
from stagerun.logs.table import tracker_of
from stagerun.logs.tracker import Point, Text, TrackedRun, Tracker
from stagerun.system.files import open_shared, write_whole
from stagerun.system.typed import json_object, read_as

END_S = 30.0  # from the run's end to this process's
_AGAIN_S = 10.0  # between two attempts to reach a tracker
_BATCH = 500
_LOOK_S = 2.0
_STATUS: dict[type, str] = {RunStarted: "failed", RunFinished: "finished", Stopped: "stopped"}  # until the next of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the run says to the process of a tracker, in the first line of its stdin, which ends when the run does. `size`: of the log
    before this process life. `before`: iterations above each stage."""

    tracker: str
    project: str
    out: str
    size: int
    before: dict[str, int]
    settings: dict[str, dict[str, Any]]
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """How far a tracker got: OUT/trackers/NAME.json. `run` and `number` name the tracker's run, `out` is the folder that it is of."""

    run: str
    number: int
    out: str
    status: str
    ended: bool
    settling: Settling


def _note_file(out: Path, tracker: str) -> Path:
    return out / "trackers" / f"{tracker}.json"


def _read_note(out: Path, tracker: str) -> Note | None:
    """None where there is none. OSError; ValueError for what no follower has written."""
    try:
        return read_as(Note, json_object(_note_file(out, tracker).read_bytes()))
    except FileNotFoundError:
        return None


def lacks(out: Path, tracker: str) -> bool:
    """Whether a tracker has not been sent all of the log, or not been waited for."""
    try:
        note = _read_note(out, tracker)
    except ValueError:  # its process says so
        return True
    if note is None:
        return (out / LOG).exists()
    return not note.ended or note.settling.at < (out / LOG).stat().st_size


class Follower:
    """`there`: points that the tracker has. `noted`: those of them that the note counts."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.out = orders, Path(orders.out)
        self.tracker: Tracker | None = None
        self.there = self.noted = 0
        self.status = "failed"  # what the log says of the run's end
        self.run, self.number = uuid.uuid4().hex[:8], 1
        self.settling = Settling()
        note = _read_note(self.out, orders.tracker)
        # One that has read more than there was is of another log, which someone has removed.
        if note is not None and note.settling.at <= orders.size and not self._copied(note):
            self.run, self.number, self.noted, self.status = note.run, note.number, note.settling.count, note.status
            self.settling = note.settling

    def _copied(self, note: Note) -> bool:
        """Whether this folder is a copy of another one, to which the run there belongs; one that was moved isn't."""
        there = Path(note.out)
        with suppress(OSError, ValueError):
            other = None if there.samefile(self.out) else _read_note(there, self.orders.tracker)
            return other is not None and other.run == note.run
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
                self.settling = Settling(restarts=undone.restarts)
                self._note()

    def _follow(self) -> None:
        if self.tracker is None:
            self._note()  # its name, before there is anything of that name
            self.tracker = tracker_of(self.orders.tracker)()
            held = self.tracker.begin(self._tracked())
            self.there = self.noted if held is None else held
            if self.there < self.noted:
                self.settling = Settling(restarts=self.settling.restarts)
        if not self.settling.at:
            self.settling = Settling(restarts=self._undone())
        points: list[Point] = []
        texts: dict[str, Text] = {}
        number = self.settling.count
        for found in self._read():
            if isinstance(found, Text):
                texts[found.name] = found
                continue
            if number >= self.there:
                points.append(
                    Point(
                        number=number,
                        time=found.time,
                        stage=found.stage,
                        iteration=self.orders.before.get(found.stage, 0) + found.iter,
                        values={f"{found.stage}/{name}": value for name, value in found.values.items()},
                    )
                )
            number += 1
            if len(points) >= _BATCH:
                self._send(points, texts)
        self._send(points, texts)
        if self.settling.count > self.noted:
            self._note()

    def _undone(self) -> list[Restart]:
        """What has undone something up to here, found before any of it is sent."""
        while True:
            try:
                for _ in self._read():
                    pass
                return self.settling.restarts
            except Undone as undone:
                self.settling = Settling(restarts=undone.restarts)

    def _send(self, points: list[Point], texts: dict[str, Text]) -> None:
        if points or texts:
            assert self.tracker is not None
            self.tracker.send(tuple(points), tuple(texts.values()))
            self.there += len(points)
        points.clear()
        texts.clear()

    def _read(self) -> Iterator[Line | Text]:
        """What new lines of the log settle."""
        settling, place = self.settling, Place(self.settling.at)
        with os.fdopen(open_shared(self.out / LOG), "rb") as file:
            for time, event in read_on(file, place):
                self.status = _STATUS.get(type(event), self.status)
                yield from settling.read(place.begin, place.at, time, event)
        settling.at = place.at

    def _tracked(self) -> TrackedRun:
        id = self.run + (f"-{self.number}" if self.number > 1 else "")
        return TrackedRun(
            id=id,
            name=f"{self.orders.project}-{id}",
            project=self.orders.project,
            out=self.out,
            settings=self.orders.settings,
            workers=self.orders.workers,
        )

    def _note(self, ended: bool = False) -> None:
        note = Note(
            run=self.run,
            number=self.number,
            out=self.orders.out,
            status=self.status,
            ended=ended,
            settling=self.settling,
        )
        write_whole(_note_file(self.out, self.orders.tracker), json.dumps(asdict(note)).encode())
        self.noted = self.settling.count

    def end(self) -> None:
        if self.tracker is not None:
            self.tracker.end(self.status)
            self._note(ended=True)


def main() -> None:
    """stdin has Orders in its first line, and ends with the run. Each line on stdout is for the user."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the run gets it, too, and says when it is over
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a tracker prints
    with suppress(OSError):
        os.nice(5)
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):  # and nothing of what comes after it
        line += byte
    orders = Orders(**json.loads(line))
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


def _watch(over: threading.Event) -> None:
    while os.read(0, 1 << 16):
        pass
    over.set()
    time.sleep(END_S)
    os.killpg(0, signal.SIGKILL)  # with what a tracker has started


if __name__ == "__main__":
    main()
