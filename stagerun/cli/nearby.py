"""Where else a schedule may have been run, for `status` and `snapshots` in another folder than that of `run`."""

import os
from contextlib import suppress
from itertools import islice
from pathlib import Path

from stagerun.cli.looking import LOG, Target
from stagerun.errors import listing
from stagerun.events import RunStarted
from stagerun.logged import event_of

_MOST_TRIED, _MOST_SHOWN, _LINE = 1000, 5, 1 << 20


def elsewhere(target: Target) -> str:
    """A hint where nothing is in the default output folder; '' where --out or an output folder was given."""
    if target.folder is None or target.schedule is None:
        return ""
    found = _outputs(target.folder, target.schedule.name)
    if not found:
        return "\n  hint: `run` writes to out/NAME in the folder it is called in; name another one with --out"
    return f"\n  hint: a run of it is in {listing([str(p) for p in found])}: give that with --out"


def _outputs(folder: Path, name: str) -> list[Path]:
    """Output folders of schedules of that name: beside the schedule and in it, and in `out` there, here, and in every folder above."""
    here, folder = Path.cwd(), folder.resolve()
    bases = [folder, folder.parent, *(above / "out" for start in (here, folder) for above in (start, *start.parents))]
    tried: list[Path] = []
    for base in dict.fromkeys(bases):
        with suppress(OSError), os.scandir(base) as entries:
            tried += [Path(entry.path) for entry in islice(entries, _MOST_TRIED)]
    return sorted(path for path in dict.fromkeys(tried) if _schedule_of(path) == name)[:_MOST_SHOWN]


def _schedule_of(out: Path) -> str | None:
    """By the first line of its log; None where there is none."""
    with suppress(OSError, ValueError), open(out / LOG, "rb") as file:
        found = event_of(file.readline(_LINE))
        return found[1].schedule if found is not None and isinstance(found[1], RunStarted) else None
    return None
