"""The report of an import, `stagerun-import.txt` beside the records: what it says, and what can be read from it later."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from stagerun.base.errors import DataError
from stagerun.base.text import count, shown
from stagerun.data.importing.items import regular
from stagerun.data.importing.partial import Note
from stagerun.system.imports import REPORT

if TYPE_CHECKING:
    from stagerun.data.importing.engine import Work

_LEFT_OUT = "left out"  # : how many
_COUNT_LINE = re.compile(rf"{_LEFT_OUT}: ([0-9]+)\n".encode())
_LONGEST_LINE = 1 << 16
_MOST_IGNORED = 1000  # in the report
_EXTENSION = re.compile(r"\.\S{1,10}")  # of `Mr. Smith on the beach` it is none
_MOST_EXTENSIONS = 8


def ignored_text(names: Sequence[str]) -> str:
    """`ignored: 5 files (.heic 2, .txt 1, no extension 2)`: extensions in small letters, the most first."""
    suffixes = (PurePosixPath(name).suffix.lower() for name in names)
    found = Counter(suffix if _EXTENSION.fullmatch(suffix) else "no extension" for suffix in suffixes)
    ordered = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    parts = [f"{shown(suffix)} {n}" for suffix, n in ordered[:_MOST_EXTENSIONS]]
    if others := sum(n for _, n in ordered[_MOST_EXTENSIONS:]):
        parts.append(f"others {others}")
    return f"ignored: {count(len(names), 'file')} ({', '.join(parts)})"


def text_of(work: "Work", records: int, notes: list[Note], kinds: Mapping[str, int]) -> bytes:
    """Without times, so that the same images give the same text."""
    identity = work.identity
    lines = [_printable(work.title), f"identity {identity_digest(identity)}"]
    lines += [f"{name}: {value}" for name, value in identity.items()]
    lines += ["", f"records: {records}", *(f"  {kind}: {n}" for kind, n in kinds.items())]
    for title, wanted in ((_LEFT_OUT, True), ("taken by rule", False)):
        chosen = [note for note in notes if note.bad is wanted]
        lines += ["", f"{title}: {len(chosen)}"]
        lines += [f"  {what}: {n}" for what, n in Counter(note.what for note in chosen).most_common()]
        lines += [f"{note.what}\t{line_of(note)}" for note in chosen]
    if work.ignored:
        # Behind the lines above: what `left_out_of` looks for comes first, whatever files are called.
        lines += ["", ignored_text(work.ignored), *(_printable(name) for name in work.ignored[:_MOST_IGNORED])]
        if (more := len(work.ignored) - _MOST_IGNORED) > 0:
            lines.append(f"and {more} more")
    return "".join(line + "\n" for line in lines).encode(errors="surrogateescape")


def line_of(note: Note) -> str:
    return _printable(f"{note.name}: {note.text}" if note.text else note.name)


def identity_digest(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def left_out_of(out: Path, identity: Mapping[str, Any]) -> int | None:
    """How many images were left out, if OUT is what this very work makes; None if it isn't."""
    try:
        with open(out / REPORT, "rb", opener=regular) as stream:
            stream.readline(_LONGEST_LINE)
            if stream.readline(_LONGEST_LINE) != f"identity {identity_digest(identity)}\n".encode():
                return None
            for line in stream:
                if found := _COUNT_LINE.fullmatch(line):
                    return int(found[1])
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, DataError):  # none, or no file
        pass
    return None


def _printable(text: str) -> str:
    """Names come from others' archives: a line break in one would look like a line of ours."""
    return "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else "?" for c in text)
