"""Both sides of a tracker: the sink of a run (`Following`) starts a process, which follows OUT/log.jsonl and sends what stands for good
(`Follower`). That imports no torch, and the run doesn't wait for it.

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
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from stagerun.base.events import Event, RunFinished, RunStarted, StageStarted, Stopped
from stagerun.logs.log_file import LOG, Log
from stagerun.logs.settled import Line, Settling
from stagerun.logs.table import Opened, tracker_of
from stagerun.logs.tracker import Point, Text, TrackedRun, Tracker
from stagerun.system.files import write_whole
from stagerun.system.process import program
from stagerun.system.typed import json_line, json_object, read_as

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


@dataclass(kw_only=True)
class Note:
    """How far a tracker got: OUT/trackers/NAME.json. `run` and `number` name the tracker's run, `out` is the folder that it is of. What the
    log's first `at` bytes settle was sent. `ended`: the tracker was waited for."""

    run: str
    number: int = 1
    out: str
    at: int = 0
    ended: bool = False


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
    return not note.ended or note.at < (out / LOG).stat().st_size


# -- the run's side


class Following:
    """A sink, for rank 0. It does nothing with the events: the log has them."""

    def __init__(self, tracker: str, opened: Opened) -> None:
        self.tracker, self.opened = tracker, opened
        self.news = b""
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Following":
        folder = self.opened.out / "trackers"
        try:
            folder.mkdir(exist_ok=True)
            with open(folder / f"{self.tracker}.txt", "wb") as printed:
                self.process = subprocess.Popen(
                    [sys.executable, *program("stagerun.logs.follower")],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, start_new_session=True,
                )  # fmt: skip
            assert self.process.stdin is not None and self.process.stdout is not None
            os.set_blocking(self.process.stdout.fileno(), False)
            self.process.stdin.write(json_line(self._orders()))
            self.process.stdin.flush()
        except OSError as error:
            self._warn(error.strerror or str(error))
        return self

    def _orders(self) -> Orders:
        plan, out = self.opened.plan, self.opened.out
        return Orders(
            tracker=self.tracker,
            project=plan.schedule.name,
            out=str(out.absolute()),
            size=(out / LOG).stat().st_size,
            before=self.opened.places(),
            settings={
                stage.name: {field: _plain(value) for field, value in stage.identity.items()}
                for stage in plan.schedule.stages
            },
            workers=self.opened.workers,
        )

    def __call__(self, event: Event) -> None:
        self._look()

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        again = f"the next `run` with --log {self.tracker} sends them"
        late = ""
        try:
            if self.process.wait(self.opened.patience):
                late = "lacks the last lines"
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            late = f"has not taken all lines within {self.opened.patience:.0f} s of the run's end"
        self._look()
        if late:
            self.opened.warn(f"warning: {self.tracker} {late}; {again}")
        self.process.stdout.close()

    def _look(self) -> None:
        """Says what the process wants the user to know."""
        if self.process is not None and self.process.stdout is not None:
            with suppress(OSError):
                self.news += os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self.news = self.news.split(b"\n")
        for line in lines:
            self._warn(line.decode(errors="replace"))

    def _warn(self, why: str) -> None:
        self.opened.warn(
            f"warning: {self.tracker} does not take the run's lines: {why}; training goes on, and they are sent when it does"
        )


def _plain(value: str) -> Any:
    """A number or a text, of what is written in a schedule."""
    try:
        return json.loads(value)
    except ValueError:
        return value


# -- the process


class Follower:
    """`there`: points that the tracker has."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.out = orders, Path(orders.out)
        self.tracker: Tracker | None = None
        self.there = 0
        self._begin()
        self.note = Note(run=uuid.uuid4().hex[:8], out=orders.out)
        note = _read_note(self.out, orders.tracker)
        # One that has read more than there was is of another log, which someone has removed.
        if note is not None and note.at <= orders.size and not self._copied(note):
            self.note = replace(note, out=orders.out, ended=False)
            self.starts.until = note.at
            self._undone()
            for _ in self._settled():  # which was sent
                pass
            self.starts.until = None

    def _copied(self, note: Note) -> bool:
        """Whether this folder is a copy of another one, to which the run there belongs; one that was moved isn't."""
        there, other = Path(note.out), None
        with suppress(OSError, ValueError):
            other = None if there.samefile(self.out) else _read_note(there, self.orders.tracker)
        return other is not None and other.run == note.run

    def _begin(self) -> None:
        """Reads the log from its first line."""
        self.starts = Log(self.out / LOG, wanted={"StageStarted"}.__contains__)
        self.lines, self.settling = Log(self.out / LOG), Settling()
        self.status = "failed"  # what the log says of the run's end

    def follow(self) -> None:
        """Sends what has settled. Raises what the tracker does: then this object is of no use any more."""
        tracker, sent = self.tracker or self._connect(), self.settling.count
        if self._undone():
            self._begin()
            # Trackers don't take points back (one does, online alone): another run of it shows what stands.
            if self.there:
                tracker.end("undone")
                self.note.number += 1
                tracker = self._connect()
            self._undone()
        texts: dict[str, Text] = {}
        points = self._points(texts)
        while batch := tuple(itertools.islice(points, _BATCH)):
            tracker.send(batch, ())
            self.there += len(batch)
        if texts:
            tracker.send((), tuple(texts.values()))
        if self.settling.count != sent:
            self._save()

    def _connect(self) -> Tracker:
        self._save()  # its name, before there is anything of that name
        orders, id = self.orders, self.note.run + (f"-{self.note.number}" if self.note.number > 1 else "")
        self.tracker = tracker_of(orders.tracker)()
        same = {name: getattr(orders, name) for name in ("project", "settings", "workers")}
        held = self.tracker.begin(TrackedRun(id=id, name=f"{orders.project}-{id}", out=self.out, **same))
        self.there = self.settling.count if held is None else held
        if self.there < self.settling.count:
            self._begin()
        return self.tracker

    def _undone(self) -> bool:
        """Takes the starts of stages that are new in the log. Whether one undoes what was settled."""
        undone = [event for _, event in self.starts if isinstance(event, StageStarted) and self.settling.expect(event)]
        self.lines.until = self.starts.at
        return bool(undone)

    def _settled(self) -> Iterator[Line | Text]:
        """What is settled up to the last of these starts."""
        for when, event in self.lines:
            self.status = _STATUS.get(type(event), self.status)
            yield from self.settling.read(when, event)

    def _points(self, texts: dict[str, Text]) -> Iterator[Point]:
        """What is new, and that the tracker hasn't; the newest texts go into `texts`."""
        numbers = itertools.count(self.settling.count)
        for line in self._settled():
            if isinstance(line, Text):
                texts[line.name] = line
            elif (number := next(numbers)) >= self.there:
                iteration = self.orders.before.get(line.stage, 0) + line.iter
                values = {f"{line.stage}/{name}": value for name, value in line.values.items()}
                yield Point(number=number, time=line.time, stage=line.stage, iteration=iteration, values=values)

    def _save(self) -> None:
        self.note.at = self.lines.at
        write_whole(_note_file(self.out, self.orders.tracker), json_line(self.note))

    def end(self) -> None:
        if self.tracker is not None:
            self.tracker.end(self.status)
            self.note.ended = True
            self._save()


def main() -> None:
    """stdin has Orders in its first line, and ends with the run. Each line on stdout is for the user."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the run gets it, too, and says when it is over
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a tracker prints
    with suppress(OSError):
        os.nice(5)
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        orders = Orders(**json.loads(stdin.readline()))
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
