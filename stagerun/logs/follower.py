"""Both sides of a tracker: the sink of a run (`Following`) starts a process that follows OUT/log.jsonl and sends the settled lines
(`Follower`). It imports no torch, and the run doesn't wait for it.

OUT/trackers/NAME.json notes its progress. After each of these failures the tracker gets every line once:

- The run is killed: the process reads the end of its stdin, sends the settled lines, and ends.
- The process is killed before the tracker stored its lines: `begin` asks what the tracker has, and the missing lines are read from the log
  again; from its beginning, if the tracker has fewer than noted.
- It is killed between the tracker's storing and the note: the tracker has more lines than noted, and these are not sent again.
- The run is killed before it logged a finished snapshot: the next StageStarted settles the lines.
- It is killed while the tracker finishes: the note lacks `ended`, and the next command asks the tracker what it has.
- The last process still sends while the next one starts: they take turns by a lock.
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
from stagerun.logs.table import Opened, tracker_of
from stagerun.logs.tracker import Line, Point, Settling, Text, TrackedRun, Tracker
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
    """The run's message to the process of a tracker, in the first line of its stdin, which ends with the run. `size`: of the log before this
    process life. `before`: iterations above each stage."""

    tracker: str
    project: str
    out: str
    size: int
    before: dict[str, int]
    settings: dict[str, dict[str, Any]]
    workers: int


@dataclass(kw_only=True)
class Note:
    """A tracker's progress: OUT/trackers/NAME.json. `run` and `number` name the tracker's run of the folder `out`. Lines settled by the log's
    first `at` bytes were sent. `ended`: the tracker has finished."""

    run: str
    number: int = 1
    out: str
    at: int = 0
    ended: bool = False


def _note_file(out: Path, tracker: str) -> Path:
    return out / "trackers" / f"{tracker}.json"


def _read_note(out: Path, tracker: str) -> Note | None:
    """Return None without a note. OSError; ValueError for a damaged one."""
    try:
        return read_as(Note, json_object(_note_file(out, tracker).read_bytes()))
    except FileNotFoundError:
        return None


def lacks(out: Path, tracker: str) -> bool:
    """Return whether a tracker lacks lines of the log, or has not finished."""
    try:
        note = _read_note(out, tracker)
    except ValueError:  # its process reports it
        return True
    if note is None:
        return (out / LOG).exists()
    return not note.ended or note.at < (out / LOG).stat().st_size


# -- the run's side


class Following:
    """A sink, for rank 0. It ignores the events: the log has them."""

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
            before=self.opened.iterations_before(),
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
        """Print the messages of the process."""
        if self.process is not None and self.process.stdout is not None:
            with suppress(OSError):
                self.news += os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self.news = self.news.split(b"\n")
        for line in lines:
            self._warn(line.decode(errors="replace"))

    def _warn(self, why: str) -> None:
        self.opened.warn(
            f"warning: {self.tracker} does not take the run's lines: {why}; training continues, and they are sent later"
        )


def _plain(value: str) -> Any:
    """Return a value of a schedule as a number, or else as text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


# -- the process


class Follower:
    """Sends settled lines. `stored`: points that the tracker has."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.out = orders, Path(orders.out)
        self.tracker: Tracker | None = None
        self.stored = 0
        self._begin()
        self.note = Note(run=uuid.uuid4().hex[:8], out=orders.out)
        note = _read_note(self.out, orders.tracker)
        # A note beyond the log's size belongs to a log that was removed.
        if note is not None and note.at <= orders.size and not self._copied(note):
            self.note = replace(note, out=orders.out, ended=False)
            self.starts.until = note.at
            self._undone()
            for _ in self._settled():  # sent before
                pass
            self.starts.until = None

    def _copied(self, note: Note) -> bool:
        """Return whether this folder is a copy, not a moved one, of the folder to which the tracker's run belongs."""
        noted, other = Path(note.out), None
        with suppress(OSError, ValueError):
            other = None if noted.samefile(self.out) else _read_note(noted, self.orders.tracker)
        return other is not None and other.run == note.run

    def _begin(self) -> None:
        """Read the log from its first line."""
        self.starts = Log(self.out / LOG, wanted={"StageStarted"}.__contains__)
        self.lines, self.settling = Log(self.out / LOG), Settling()
        self.status = "failed"  # of the run's end, by the log

    def follow(self) -> None:
        """Send the settled lines. Raises any error of the tracker, after which this object must be discarded."""
        tracker, sent = self.tracker or self._connect(), self.settling.count
        if self._undone():
            self._begin()
            # Trackers don't take points back (one does, only online): start another run.
            if self.stored:
                tracker.end("undone")
                self.note.number += 1
                tracker = self._connect()
            self._undone()
        texts: dict[str, Text] = {}
        points = self._points(texts)
        while batch := tuple(itertools.islice(points, _BATCH)):
            tracker.send(batch, ())
            self.stored += len(batch)
        if texts:
            tracker.send((), tuple(texts.values()))
        if self.settling.count != sent:
            self._save()

    def _connect(self) -> Tracker:
        self._save()  # the name, before its first use
        orders, id = self.orders, self.note.run + (f"-{self.note.number}" if self.note.number > 1 else "")
        self.tracker = tracker_of(orders.tracker)()
        same = {name: getattr(orders, name) for name in ("project", "settings", "workers")}
        held = self.tracker.begin(TrackedRun(id=id, name=f"{orders.project}-{id}", out=self.out, **same))
        self.stored = self.settling.count if held is None else held
        if self.stored < self.settling.count:
            self._begin()
        return self.tracker

    def _undone(self) -> bool:
        """Read new starts of stages in the log. Return whether one undoes settled lines."""
        undone = [event for _, event in self.starts if isinstance(event, StageStarted) and self.settling.expect(event)]
        self.lines.until = self.starts.at
        return bool(undone)

    def _settled(self) -> Iterator[Line | Text]:
        """Yield the lines settled up to the last of these starts."""
        for when, event in self.lines:
            self.status = _STATUS.get(type(event), self.status)
            yield from self.settling.read(when, event)

    def _points(self, texts: dict[str, Text]) -> Iterator[Point]:
        """Yield the points that the tracker lacks; the newest texts go into `texts`."""
        numbers = itertools.count(self.settling.count)
        for line in self._settled():
            if isinstance(line, Text):
                texts[line.name] = line
            elif (number := next(numbers)) >= self.stored:
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
    """Follow a run: stdin has Orders in its first line, and ends with the run. Each line on stdout is for the user."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the run gets it, too, and closes stdin
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the tracker's output
    with suppress(OSError):
        os.nice(5)
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        orders = Orders(**json.loads(stdin.readline()))
    over = threading.Event()
    threading.Thread(target=_watch, args=(over,), daemon=True).start()
    lock = open(Path(orders.out) / "trackers" / f".{orders.tracker}.lock", "wb")  # noqa: SIM115 - held to the end
    fcntl.flock(lock, fcntl.LOCK_EX)
    os._exit(_followed(orders, over, messages))  # a tracker's own threads and exit handlers may wait for a server


def _followed(orders: Orders, over: threading.Event, messages: TextIO) -> int:
    """Follow to the end of the run; return 1 if the tracker was unreachable then."""
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
            if why != failed:  # it may be down for days
                traceback.print_exc()
            if not failed:
                with suppress(OSError):
                    messages.write(f"{why}\n")
            failed = why
    return int(bool(failed))


def _watch(over: threading.Event) -> None:
    while os.read(0, 1 << 16):
        pass
    over.set()
    time.sleep(END_S)
    os.killpg(0, signal.SIGKILL)  # with the tracker's processes


if __name__ == "__main__":
    main()
