"""Files of a source that no image was made of because of their names, as the summary and the report tell of them."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from stagerun.text import count

IGNORED_LINE = "ignored by name"  # : how many
_EXTENSION = re.compile(r"\.\S{1,10}")  # of `Mr. Smith on the beach` it is none
_MOST_EXTENSIONS = 8


def ignored_text(names: Sequence[str]) -> str:
    """`ignored by name: 5 files (.heic 2, .txt 1, no extension 2)`: the most first, extensions in small letters."""
    found = Counter(PurePosixPath(name).suffix.lower() for name in names)
    strange = [suffix for suffix in found if not _EXTENSION.fullmatch(suffix)]
    without = sum(found.pop(suffix) for suffix in strange)
    ordered = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    parts = [f"{_printable(suffix)} {n}" for suffix, n in ordered[:_MOST_EXTENSIONS]]
    if others := sum(n for _, n in ordered[_MOST_EXTENSIONS:]):
        parts.append(f"other extensions {others}")
    if without:
        parts.append(f"no extension {without}")
    return f"{IGNORED_LINE}: {count(len(names), 'file')} ({', '.join(parts)})"


def _printable(suffix: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in suffix)
