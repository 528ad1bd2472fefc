"""What is said about wrong files, word for word: tests/golden/spec/NAME.err.

NAME.prototxt is a schedule.prototxt, read beside two good stages `a` and `b`; NAME is a folder where more is needed, with arguments
of `--set` in a file `set`, and Python that would not do elsewhere in `*.py_`. `scripts/golden` writes the .err files anew.
"""

from pathlib import Path

import pytest
from facade import RecipeError

from stagerun.language import read

FOLDER = Path(__file__).parents[1] / "golden" / "spec"
CASES = sorted({p.stem for p in FOLDER.glob("*.prototxt")} | {p.name for p in FOLDER.iterdir() if p.is_dir()})
GOOD = b'base_lr: 0.1\nlr_policy: "poly"\npower: 2\nmax_epoch: 2.5\n'


def said(name: str) -> str:
    """The rendered mistakes of a case. Fails where there are none."""
    folder, changes = FOLDER / name, []
    if folder.is_dir():
        kinds = ("prototxt", "py", "py_", "txt")
        texts = {p.name.removesuffix("_"): p.read_bytes() for kind in kinds for p in folder.glob(f"*.{kind}")}
        if (folder / "set").exists():
            changes = (folder / "set").read_text().splitlines()
    else:
        first = (FOLDER / f"{name}.prototxt").read_bytes()
        texts = {"schedule.prototxt": first, "a.prototxt": GOOD, "b.prototxt": GOOD}
    with pytest.raises(RecipeError) as caught:
        read(texts, f"/schedules/{name}", changes)
    return caught.value.render() + "\n"


@pytest.mark.parametrize("name", CASES)
def test_message(name):
    expected = FOLDER / f"{name}.err"
    assert expected.exists(), f"{expected.name} is missing: run scripts/golden and read it"
    assert said(name) == expected.read_text(), "run scripts/golden and read the difference"


def test_every_expected_text_has_its_case():
    assert sorted(p.stem for p in FOLDER.glob("*.err")) == CASES


if __name__ == "__main__":
    for case in CASES:
        (FOLDER / f"{case}.err").write_text(said(case))
