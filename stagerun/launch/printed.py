"""What is printed on other hosts, and said of them, here: the first host's words as they are, since rank 0 speaks for all; others' with
their name before each line."""

import queue
import sys
import threading
from contextlib import suppress

from stagerun.base.text import count, to_nowhere
from stagerun.system import signals

_MOST = 16 << 20  # characters that nobody has read yet
_LONGEST = 1 << 16  # a line; a longer one is cut


class Printed:
    """`plain`: the host whose words come as they are. A thread writes them: one that writes to `less`, or to a terminal after Ctrl-S,
    waits for its reader, and hosts that hear nothing meanwhile would take the launcher for gone."""

    def __init__(self) -> None:
        self.plain = ""
        self._begun: dict[tuple[str, str], str] = {}
        self._texts: queue.Queue[tuple[str, str]] = queue.Queue()
        self._size = self._dropped = 0
        self._lock = threading.Lock()
        with signals.held():
            threading.Thread(target=self._write_all, name="printed", daemon=True).start()

    def show(self, host: str, stream: str, text: str) -> None:
        if host != self.plain:
            *lines, rest = (self._begun.pop((host, stream), "") + text).split("\n")
            if len(rest) > _LONGEST:
                lines, rest = [*lines, rest], ""
            self._begun[host, stream] = rest
            text = "".join(f"{host}: {line}\n" for line in lines)
        self._put(stream, text)

    def say(self, text: str) -> None:
        """The launcher's own words, on stderr."""
        if text:
            self._put("err", f"{text}\n")

    def rest(self) -> None:
        """Lines without an end."""
        for (host, stream), text in self._begun.items():
            if text:
                self._put(stream, f"{host}: {text}\n")
        self._begun.clear()

    def close(self) -> None:
        """Returns when all is written."""
        self.rest()
        self._tell_dropped()
        self._texts.join()

    def _put(self, stream: str, text: str) -> None:
        with self._lock:
            full = self._size + len(text) > _MOST
        if full:
            self._dropped += text.count("\n")
            return
        self._tell_dropped()
        self._queue(stream, text)

    def _queue(self, stream: str, text: str) -> None:
        with self._lock:
            self._size += len(text)
        self._texts.put((stream, text))

    def _tell_dropped(self) -> None:
        if dropped := self._dropped:
            self._dropped = 0
            self._queue("err", f"{count(dropped, 'line')} left out here: nobody read what is printed\n")

    def _write_all(self) -> None:
        while True:
            stream, text = self._texts.get()
            self._write(stream, text)
            with self._lock:
                self._size -= len(text)
            self._texts.task_done()

    def _write(self, stream: str, text: str) -> None:
        to = sys.stdout if stream == "out" else sys.stderr
        encoding = to.encoding or "utf-8"
        try:
            to.write(text.encode(encoding, "backslashreplace").decode(encoding))
            to.flush()
        except OSError:  # nobody reads any more; the run goes on
            with suppress(OSError):
                to_nowhere(to)
