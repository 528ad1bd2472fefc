"""What commands print, word for word: tests/golden/plan and tests/golden/cli. `scripts/golden` writes them anew."""

import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from stagerun.cli import main

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "golden"
NOWHERE = "no-such-output-folder"  # so that nothing is done yet

NONE = click.Context(main)
TOP = {name: main.get_command(NONE, name) for name in main.list_commands(NONE)}
# `data` is a group of commands: `data import`, `data info` ...
COMMANDS = {name: command for name, command in TOP.items() if not isinstance(command, click.Group)} | {
    f"{group} {name}": command
    for group, commands in TOP.items()
    if isinstance(commands, click.Group)
    for name in commands.list_commands(NONE)
    if (command := commands.get_command(NONE, name)) is not None
}

CASES = {
    "plan/resnet50_72ep.txt": ["plan", "solvers/resnet50_72ep", "--out", NOWHERE],
    "plan/resnet50_72ep.json": ["plan", "solvers/resnet50_72ep", "--out", NOWHERE, "--json"],
    "cli/stagerun.txt": ["--help"],
    **{f"cli/{name.replace(' ', '-')}.txt": [*name.split(), "--help"] for name in sorted({*TOP, *COMMANDS})},
}


def printed(arguments: list[str]) -> str:
    """Standard output of a command that succeeds, run in the repository's root."""
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        result = CliRunner().invoke(main, arguments, prog_name="stagerun", terminal_width=100)
    finally:
        os.chdir(before)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", CASES)
def test_output(name: str) -> None:
    expected = GOLDEN / name
    assert expected.exists(), f"{name} is missing: run scripts/golden and read it"
    assert printed(CASES[name]) == expected.read_text(), "run scripts/golden and read the difference"


def test_every_expected_text_has_its_case() -> None:
    found = {str(p.relative_to(GOLDEN)) for folder in ("plan", "cli") for p in (GOLDEN / folder).iterdir()}
    assert found == set(CASES)


@pytest.mark.parametrize("name", ["preflight", "data stage", "explain"])
def test_a_retired_command_is_unknown(name: str) -> None:  # cases/help_names.txt: what to type
    assert CliRunner().invoke(main, name.split()).exit_code == 64


if __name__ == "__main__":
    for case, words in CASES.items():
        (GOLDEN / case).parent.mkdir(exist_ok=True)
        (GOLDEN / case).write_text(printed(words))
