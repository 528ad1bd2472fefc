"""Noticing that a file of a schedule's folder was saved. Polls: it works on every file system, network ones too."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stagerun.spec.resolve import SCHEDULE_FILE, stage_files

INTERVAL = 0.4  # seconds between two looks
# An editor may empty a file, fill it and rename it: a change counts once two looks so far apart see the same.
SETTLED = 0.1

Seen = Mapping[str, tuple[int, int, int]]


def changes(look: Callable[[], Seen], wait: Callable[[float], None]) -> Iterator[None]:
    """Yields at once, and then after each change of what `look` sees.

    What is changed while the caller draws is seen by the next look, since the last one was before.
    """
    seen = look()
    yield
    while True:
        wait(INTERVAL)
        now = look()
        if now == seen:
            continue
        while True:
            wait(SETTLED)
            before, now = now, look()
            if now == before:
                break
        if now != seen:
            seen = now
            yield


def look_at(folder: Path) -> Seen:
    """The files that a schedule is made of: its *.prototxt, and the stages' files, wherever and whatever they are. Those that
    can't be seen are left out, so that their coming is a change."""
    names = set()
    try:
        names |= {name for name in os.listdir(folder) if name.endswith(".prototxt")}
        names |= set(stage_files((folder / SCHEDULE_FILE).read_bytes()))
    except (OSError, ValueError):  # gone for the moment, or not a text: reading it says so
        pass
    seen = {}
    for name in sorted(names):
        try:
            stat = os.stat(folder / name)
        except (OSError, ValueError):
            continue
        seen[name] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    return seen
