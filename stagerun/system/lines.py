"""JSON objects, one a line: what a worker and the monitors say to each other.

The other side may be anyone's: a line that is too long, is not JSON, is nested too deep or is not an object ends the conversation.
"""

import json
import socket
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

# A line of a monitor holds a rank's state or a stack. What can't leave since the other side is cut off is kept up to this many bytes,
# too, and the rest left out.
LONGEST = 64 * 1024


class Closed(Exception):
    """The other side has gone, or says what can't be understood."""


def line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Reader:
    """Cuts the bytes that come into messages. `longest`: bytes of a line."""

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        self._came = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole by now. Closed."""
        *texts, self._came = (self._came + data).split(b"\n")
        if max(len(text) for text in (*texts, self._came)) > self.longest:
            raise Closed
        try:
            found = [json.loads(text) for text in texts]
        except (ValueError, RecursionError) as error:
            raise Closed from error
        if not all(isinstance(message, dict) for message in found):
            raise Closed
        return found


class Lines:
    """A connected stream socket, spoken over without ever waiting for the other side."""

    def __init__(self, connection: socket.socket, longest: int = LONGEST) -> None:
        connection.setblocking(False)
        self.socket, self.reader = connection, Reader(longest)
        self._leaving = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """What doesn't go now goes with the next call."""
        if len(self._leaving) < LONGEST:
            self._leaving += line(message)
        # No room; or no way, which the kernel reports where a link is down for a moment: whether it stays so, silence shows. Where
        # the other side has gone, reading says so.
        with suppress(OSError):
            sent = self.socket.send(self._leaving)
            self._leaving = self._leaving[sent:]

    def receive(self) -> list[Message]:
        """What has come. Closed at the end, or at anything but objects a line."""
        try:
            data = self.socket.recv(LONGEST)
        except ConnectionError as error:
            raise Closed from error
        except OSError:  # nothing there, or no way there at present
            return []
        if not data:
            raise Closed
        return self.reader.feed(data)

    def close(self) -> None:
        self.socket.close()
