"""What the launcher and the agents on its hosts say to each other: JSON objects, one a line, over the pipes of an ssh connection.

The launcher says
    environment {values}; ask {question, ...}; go {command, nproc, threads, node, ...}; stop {signal};
    gone {text, watched}: another host is; over: rank 0 has ended well; end: at once, the workers, too; alive.
An agent says
    answer {question, ...}; out, err {text}: what is printed on that host; ended {reports, deaths, late}: the workers of
    that host have; spared {rank, code, text}: a worker has ended that the others go on without; failed {code, text}: what it was
    asked for, or to do; alive {starting, spared}.
"""

from typing import Any

from stagerun.system import lines

# Signs of life are sent so often; who has said nothing for so long is taken for gone. ssh itself gives a connection up after
# three times five seconds.
ALIVE_S, SILENCE_S = 2.0, 15.0
LONGEST = 1 << 24  # a line; more is not an agent of ours
# What is in an agent's words at least. Of an answer: by its question.
_WORDS: dict[str, dict[str, type]] = {
    "answer": {"question": str},
    "out": {"text": str},
    "err": {"text": str},
    "ended": {"reports": list, "deaths": list, "late": bool},
    "failed": {"code": int, "text": str},
    "spared": {"rank": int, "code": int, "text": str},
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


def line(kind: str, **words: Any) -> bytes:
    return lines.line({"is": kind, **words})


def reader() -> lines.Reader:
    return lines.Reader(LONGEST, _whole)


def _whole(message: lines.Message) -> bool:
    if not isinstance(message.get("is"), str):
        return False
    needed = _WORDS.get(message["is"], {})
    if message["is"] == "answer":
        needed = needed | _ANSWERS.get(str(message.get("question")), {})
    return all(isinstance(message.get(name), kind) for name, kind in needed.items()) and all(
        isinstance(row, list) and len(row) == len(kinds) and all(map(isinstance, row, kinds))
        for name, kinds in _ROWS.items()
        if message["is"] == "ended"
        for row in message[name]
    )
