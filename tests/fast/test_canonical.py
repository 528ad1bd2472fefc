"""The stored form of every folder in solvers/, and the identity of its stages, byte for byte: tests/golden/canonical.

A difference makes what people have trained stale. `scripts/golden` writes the files anew.
"""

import hashlib
import json
from pathlib import Path

import pytest

from stagerun.language import canonical, load

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parents[1] / "golden" / "canonical"
NAMES = sorted(path.parent.name for path in (ROOT / "solvers").glob("*/schedule.prototxt"))


def stored(name: str) -> str:
    """The canonical text without the place of this checkout, and a digest of each stage's identity."""
    schedule = load(ROOT / "solvers" / name)
    text = canonical(schedule).replace(str(ROOT), "ROOT")
    if len(schedule.stages) > 100:  # 500 kB of what sweeps make
        text = f"# {hashlib.sha256(text.encode()).hexdigest()}\n"
    for stage in schedule.stages:
        identity = json.dumps(dict(sorted(stage.identity.items()))).replace(str(ROOT), "ROOT")
        text += f"# identity of {stage.name}: {hashlib.sha256(identity.encode()).hexdigest()}\n"
    return text


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_form_stays(name):
    assert stored(name) == (FOLDER / f"{name}.prototxt").read_text(), "run scripts/golden and read the difference"


def test_every_file_has_its_folder():
    assert sorted(path.stem for path in FOLDER.iterdir()) == NAMES


if __name__ == "__main__":
    for case in NAMES:
        (FOLDER / f"{case}.prototxt").write_text(stored(case))
