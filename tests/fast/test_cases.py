"""Commands that train nothing, from outside: tests/cases/*.txt (`contract` says how they are written)."""

from pathlib import Path

import contract
import pytest

CASES = sorted(contract.CASES.glob("*.txt"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path, tmp_path: Path) -> None:
    contract.check(path, tmp_path)


if __name__ == "__main__":
    contract.rewrite(CASES)
