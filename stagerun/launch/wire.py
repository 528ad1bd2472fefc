"""What the launcher and the agents on its hosts say to each other: JSON objects, one a line, over the pipes of an ssh connection.

The launcher says
    environment {values}; ask {question, ...}; go {command, nproc, threads, node, ...}; stop {signal};
    gone {text, watched}: another host is; end: at once, the workers, too; alive.
An agent says
    answer {question, ...}; out, err {text}: what is printed on that host; ended {reports, deaths, late}: the workers of
    that host have; failed {code, text}: what it was asked, or told to do; alive {starting}.
"""

import json
from typing import Any

# Signs of life are sent so often; who has said nothing for so long is taken for gone. ssh itself gives a connection up after
# three times five seconds.
ALIVE_S, SILENCE_S = 2.0, 15.0
LONGEST = 1 << 24  # a line; more is no agent of ours
# What is in an agent's words at least. Of an answer: by its question.
_WORDS: dict[str, dict[str, type]] = {
    "answer": {"question": str},
    "out": {"text": str},
    "err": {"text": str},
    "ended": {"reports": list, "deaths": list, "late": bool},
    "failed": {"code": int, "text": str},
}
_ANSWERS: dict[str, dict[str, type]] = {
    "facts": {"facts": dict, "devices": int, "machine": str},
    "look": {"text": str},
    "mark": {"path": str},
    "sees": {"seen": bool},
    "meet": {"addresses": list, "own": list},
    "port": {"port": int},
}
_ROWS: dict[str, tuple[type, ...]] = {"reports": (int, int, str), "deaths": (int, int)}


class Garbled(Exception):
    """The other side says what can't be understood."""


def line(kind: str, **words: Any) -> bytes:
    return json.dumps({"is": kind, **words}).encode() + b"\n"


class Reader:
    """Cuts what comes into messages."""

    def __init__(self) -> None:
        self._came = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Garbled, with what came in the place of a message."""
        *lines, self._came = (self._came + data).split(b"\n")
        if len(self._came) > LONGEST:
            raise Garbled("a line without an end")
        found = []
        for text in lines:
            try:
                message = json.loads(text)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict) or not isinstance(message.get("is"), str) or not _whole(message):
                raise Garbled(text[:200].decode(errors="replace"))
            found.append(message)
        return found


def _whole(message: dict[str, Any]) -> bool:
    needed = _WORDS.get(message["is"], {})
    if message["is"] == "answer":
        needed = needed | _ANSWERS.get(str(message.get("question")), {})
    return all(isinstance(message.get(name), kind) for name, kind in needed.items()) and all(
        isinstance(row, list) and len(row) == len(kinds) and all(map(isinstance, row, kinds))
        for name, kinds in _ROWS.items()
        if message["is"] == "ended"
        for row in message[name]
    )
