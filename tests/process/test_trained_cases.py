"""Commands that train, from outside: tests/cases/trained/*.txt (`contract` says how they are written), beside data/ as of `tiny`. Each
time is TIME."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import contract
import pytest
import small
import tiny

TIME = re.compile(r"\b\d+(\.\d+)? m?s\b")
CASES = sorted((contract.CASES / "trained").glob("*.txt"))


def command(words: Sequence[str], folder: Path) -> tuple[int, str]:
    done = small.stagerun(*words, cwd=folder)
    return done.returncode, TIME.sub("TIME", done.stdout + done.stderr)


def played(case: contract.Case, folder: Path) -> str:
    tiny.make_data(folder / "data")
    case.write(folder)
    return case.played(folder, command)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path, tmp_path: Path) -> None:
    case = contract.Case.read(path)
    assert played(case, tmp_path) == case.transcript, "run scripts/golden and read the difference"


if __name__ == "__main__":
    for one in map(contract.Case.read, CASES):
        with tempfile.TemporaryDirectory() as folder:
            one.rewrite(played(one, Path(folder).resolve()))
