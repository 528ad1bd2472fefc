"""Files of a source that no image was made of because of their names or places, as the summary and the report name them."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from stagerun.text import count

IGNORED_LINE = "ignored by name"  # : how many
_EXTENSION = re.compile(r"\.\S{1,10}")  # of `Mr. Smith on the beach` it is none
_MOST_EXTENSIONS = 8
_MOST_NAMES = 3


def ignored_text(names: Sequence[str]) -> str:
    """`ignored by name: 5 files (.heic 2, .txt 1, no extension 2)`: the most first, extensions in small letters. Before that, if there
    are any, `beside the class folders, not taken: 2 files (a.jpg, b.jpg)`."""
    beside = [name for name in names if "/" not in name]
    inside = [name for name in names if "/" in name]
    texts = []
    if beside:
        shown = _printable(", ".join(beside[:_MOST_NAMES])) + ", ..." * (len(beside) > _MOST_NAMES)
        texts.append(f"beside the class folders, not taken: {count(len(beside), 'file')} ({shown})")
    if inside:
        texts.append(f"{IGNORED_LINE}: {count(len(inside), 'file')} ({_extensions(inside)})")
    return "; ".join(texts)


def _extensions(names: Sequence[str]) -> str:
    found = Counter(PurePosixPath(name).suffix.lower() for name in names)
    strange = [suffix for suffix in found if not _EXTENSION.fullmatch(suffix)]
    without = sum(found.pop(suffix) for suffix in strange)
    ordered = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    parts = [f"{_printable(suffix)} {n}" for suffix, n in ordered[:_MOST_EXTENSIONS]]
    if others := sum(n for _, n in ordered[_MOST_EXTENSIONS:]):
        parts.append(f"other extensions {others}")
    if without:
        parts.append(f"no extension {without}")
    return ", ".join(parts)


def _printable(suffix: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in suffix)
