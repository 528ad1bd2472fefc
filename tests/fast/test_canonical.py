"""The stored form of every folder in solvers/, and the identity of its stages, byte for byte: tests/golden/canonical.

A difference makes what people have trained stale. `scripts/dev golden` writes the files anew.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from facade import RecipeError, completed, recipe
from test_spec_resolve import SCHEDULE, A, B

from stagerun.language import canonical, load, read

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
    assert stored(name) == (FOLDER / f"{name}.prototxt").read_text(), "run scripts/dev golden and read the difference"


def test_every_file_has_its_folder():
    assert sorted(path.stem for path in FOLDER.iterdir()) == NAMES


if __name__ == "__main__":
    for case in NAMES:
        (FOLDER / f"{case}.prototxt").write_text(stored(case))


# -- What is said about wrong files, word for word: tests/golden/spec/NAME.err

SPEC = Path(__file__).parents[1] / "golden" / "spec"
CASES = sorted({p.stem for p in SPEC.glob("*.prototxt")} | {p.name for p in SPEC.iterdir() if p.is_dir()})
GOOD = b'base_lr: 0.1\nlr_policy: "poly"\npower: 2\nmax_epoch: 2.5\n'


def said(name: str) -> str:
    """The rendered mistakes of a case. Fails where there are none."""
    folder, changes = SPEC / name, []
    if folder.is_dir():
        kinds = ("prototxt", "py", "py_", "txt")
        texts = {p.name.removesuffix("_"): p.read_bytes() for kind in kinds for p in folder.glob(f"*.{kind}")}
        if (folder / "set").exists():
            changes = (folder / "set").read_text().splitlines()
    else:
        first = (SPEC / f"{name}.prototxt").read_bytes()
        texts = {"schedule.prototxt": first, "a.prototxt": GOOD, "b.prototxt": GOOD}
    with pytest.raises(RecipeError) as caught:
        read(texts, f"/schedules/{name}", changes)
    return caught.value.render() + "\n"


@pytest.mark.parametrize("name", CASES)
def test_message(name):
    expected = SPEC / f"{name}.err"
    assert expected.exists(), f"{expected.name} is missing: run scripts/dev golden and read it"
    assert said(name) == expected.read_text(), "run scripts/dev golden and read the difference"


def test_every_expected_text_has_its_case():
    assert sorted(p.stem for p in SPEC.glob("*.err")) == CASES


if __name__ == "__main__":
    for case in CASES:
        (SPEC / f"{case}.err").write_text(said(case))


# -- Identities of snapshots that another version made: what that did not know has its default

FOLDERS = sorted(p.parent for p in (Path(__file__).parents[2] / "solvers").glob("*/schedule.prototxt"))
# Their defaults follow from other fields.
DERIVED = {
    "solver.random_seed", "model.batch_norm_param.moving_average_fraction", "model.batch_norm_param.eps",
    *(f"solver.compress_param.{name}" for name in ("memory", "ratio", "threshold", "qstates", "rank")),
}  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_identity_of_this_version_is_complete_and_a_default_that_is_left_out_comes_back(folder):
    for stage in (stages := load(folder).stages):
        whole = completed(stage.identity)
        assert stage.identity.items() <= whole.items()
        # A field may count for some stages only.
        assert whole.keys() - stage.identity.keys() <= stage.origins.keys()
    stage = stages[-1]
    whole = completed(stage.identity)
    defaults = {k for k in stage.identity.keys() - DERIVED if stage.origins[k].layer == "default"}
    assert len(defaults) > 10
    assert completed({key: value for key, value in stage.identity.items() if key not in defaults}) == whole
    for key in defaults:
        assert completed({k: v for k, v in stage.identity.items() if k != key}) == whole, key


def test_a_message_that_may_be_absent_is_not_there_with_its_defaults():
    def identity(transform: str) -> Mapping[str, str]:
        text = SCHEDULE.replace("transform_param {", "transform_param { " + transform)
        return read({"schedule.prototxt": text, "a.prototxt": A, "b.prototxt": B}, "/s").stages[0].identity

    key = "solver.transform_param.random_resized_crop_param"
    without, empty = identity(""), identity("random_resized_crop_param {}")
    assert without[key] == "none" and key not in empty
    inside = {k for k in empty if k.startswith(f"{key}.")}
    assert inside and completed(empty) != completed(without)
    # A field of it that is younger than the snapshot has its default, where the message is there.
    for name in inside:
        assert completed({k: v for k, v in empty.items() if k != name}) == completed(empty)
    assert completed({k: v for k, v in without.items() if k != key}) == completed(without)


def test_what_counts_no_more_is_left_out_and_what_is_not_known_stays():
    found = completed({"name": '"old"', "solver.display": "5", recipe.FROM_ITER: "7", "solver.from_the_future": "1"})
    assert "name" not in found and "solver.display" not in found
    assert found[recipe.FROM_ITER] == "7" and found["solver.from_the_future"] == "1"
    assert found["solver.momentum"] == completed({})["solver.momentum"]
