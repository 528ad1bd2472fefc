"""What commands print, word for word: tests/golden/plan, tests/golden/cli and the list of commands in the manual. `scripts/dev golden` writes them."""

import re
from pathlib import Path

import contract
import pytest

from stagerun import cli

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "golden"
NOWHERE = "no-such-output-folder"  # so that nothing is done yet

# `data` is a group of commands: `data import`, `data info` ...
COMMANDS = [rows[0].split()[0] for rows in cli.COMMANDS]
COMMANDS += [f"{group} {rows[0].split()[0]}" for group, (_, inside) in cli.GROUPS.items() for rows in inside]
CASES = {
    "plan/resnet50_72ep.txt": ["plan", "solvers/resnet50_72ep", "--out", NOWHERE],
    "plan/resnet50_72ep.json": ["plan", "solvers/resnet50_72ep", "--out", NOWHERE, "--json"],
    "cli/stagerun.txt": ["--help"],
    **{f"cli/{name.replace(' ', '-')}.txt": [*name.split(), "--help"] for name in COMMANDS},
}


def printed(arguments: list[str]) -> str:
    """Standard output of a command that succeeds, run in the repository's root."""
    result = contract.stagerun(arguments, ROOT, terminal_width=100)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", CASES)
def test_output(name):
    expected = GOLDEN / name
    assert expected.exists(), f"{name} is missing: run scripts/dev golden and read it"
    assert printed(CASES[name]) == expected.read_text(), "run scripts/dev golden and read the difference"


def test_every_expected_text_has_its_case():
    found = {str(p.relative_to(GOLDEN)) for folder in ("plan", "cli") for p in (GOLDEN / folder).iterdir()}
    assert found == set(CASES)


if __name__ == "__main__":
    for case, words in CASES.items():
        (GOLDEN / case).parent.mkdir(exist_ok=True)
        (GOLDEN / case).write_text(printed(words))
    page = ROOT / "stagerun" / "manual" / "getting-started.md"
    listed = re.findall(r"^  (stagerun .*)$", printed(["--help"]), re.M)
    block = "## The commands\n\n" + "".join(f"    {line}\n" for line in listed)
    page.write_text(re.sub(r"## The commands\n\n(    .*\n)+", lambda _: block, page.read_text()))
