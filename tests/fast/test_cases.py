"""Commands that train nothing, from outside: tests/cases/*.txt (`contract` says how they are written)."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import contract
import pytest

CASES = sorted(contract.CASES.glob("*.txt"))


def command(words: Sequence[str], folder: Path) -> tuple[int, str]:
    done = contract.stagerun(words, folder)
    return done.exit_code, done.output


def played(case: contract.Case, folder: Path) -> str:
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
