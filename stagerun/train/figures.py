"""What a rehearsal measured, kept in the output folder for `plan`. No torch."""

import json
from dataclasses import asdict
from pathlib import Path

from stagerun import store
from stagerun.plan.estimate import Figures, figures_from


def path_of(out: Path) -> Path:
    return out / "rehearsal.json"


def write_figures(disk: store.Disk, out: Path, figures: Figures) -> None:
    """Rank 0 only. StorageError or PermissionDenied if it can't be written."""
    store.write_atomic(disk, path_of(out), json.dumps(asdict(figures)).encode())


def read_figures(out: Path) -> Figures | None:
    """What the last rehearsal left; None if there was none, or another version's."""
    try:
        return figures_from(json.loads(path_of(out).read_bytes()))
    except (OSError, ValueError, TypeError, KeyError):
        return None
