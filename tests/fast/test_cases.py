"""Commands that train nothing, from outside: tests/cases/*.txt (`contract` says how they are written)."""

import contract
import pytest

CASES = sorted(contract.CASES.glob("*.txt"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path, tmp_path):
    contract.check(path, tmp_path)


if __name__ == "__main__":
    contract.rewrite(CASES)
