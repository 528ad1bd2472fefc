"""Commands that train, from outside: tests/cases/trained/*.txt (`contract` says how they are written), beside data/ as of `tiny`. Each
time is TIME, and a table of hours HOURS: columns that round to zero seconds are left out."""

import re
from collections.abc import Sequence
from pathlib import Path

import contract
import pytest
import small
import tiny

TIME = re.compile(r"\b\d+(\.\d+)? m?s\b")
HOURS = re.compile(r"^stage +iterations  training .* in all$(\n.*)*?\ntotal .*TIME$", re.M)
CASES = sorted((contract.CASES / "trained").glob("*.txt"))


def command(words: Sequence[str], folder: Path) -> tuple[int, str]:
    done = small.stagerun(*words, cwd=folder)
    return done.returncode, HOURS.sub("HOURS", TIME.sub("TIME", done.stdout + done.stderr))


def with_data(name: str, folder: Path) -> None:
    tiny.make_data(folder / "data")


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path, tmp_path):
    contract.check(path, tmp_path, command, with_data)


if __name__ == "__main__":
    contract.rewrite(CASES, command, with_data)
