"""JSON objects over a socket, one a line, without ever waiting for the other side."""

import json
import socket
from contextlib import suppress
from typing import Any

# A line holds a rank's state or a stack; a longer one ends the connection. What can't leave since the other side is cut off is kept
# up to this many bytes, too, and the rest left out.
LONGEST = 64 * 1024
_READ_BYTES = 64 * 1024


class Closed(Exception):
    """The other side has gone, or says what can't be understood."""


class Lines:
    """A connected stream socket."""

    def __init__(self, connection: socket.socket, longest: int = LONGEST) -> None:
        connection.setblocking(False)
        self.socket, self.longest = connection, longest
        self._came = b""
        self._leaving = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """What doesn't go now goes with the next call."""
        if len(self._leaving) < LONGEST:
            self._leaving += json.dumps(message).encode() + b"\n"
        # No room; or no way, of which the kernel tells where a link is down for a moment: whether it stays so, silence tells. Where
        # the other side has gone, reading says so.
        with suppress(OSError):
            sent = self.socket.send(self._leaving)
            self._leaving = self._leaving[sent:]

    def receive(self) -> list[dict[str, Any]]:
        """What has come. Closed at the end, or at anything but objects a line."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except ConnectionError as error:
            raise Closed from error
        except OSError:  # nothing there, or no way there at present
            return []
        if not data:
            raise Closed
        *lines, self._came = (self._came + data).split(b"\n")
        if max(len(line) for line in (*lines, self._came)) > self.longest:
            raise Closed
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise Closed from error
        if not all(isinstance(message, dict) for message in messages):
            raise Closed
        return messages

    def close(self) -> None:
        self.socket.close()
