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


def test_every_option_is_a_decision() -> None:
    """A new option must be written down here, too."""
    options = {
        name: sorted(o for p in command.params if isinstance(p, click.Option) for o in p.opts)
        for name, command in COMMANDS.items()
    }
    assert options == {
        "check": ["--fetch", "--set", "--strict"],
        "completion": [],
        "data import": [
            "--background",
            "--format",
            "--ground-truth",
            "--labels",
            "--limit",
            "--max-bad",
            "--no-shuffle",
            "--prepare",
            "--quality",
            "--raw",
            "--resize-height",
            "--resize-shorter",
            "--resize-width",
            "--restart",
            "--root",
            "--seed",
            "--split",
            "--synsets",
            "--threads",
        ],
        "data index": ["--classes", "--force", "--ignore-label", "--max-bad", "--no-mean", "--threads"],
        "data info": ["--classes", "--json"],
        "data show": ["--first", "--number", "--output", "--set", "--size", "--stage", "--val"],
        "data verify": ["--decode", "--json", "--threads"],
        "eval": [
            "--data",
            "--device-batch",
            "--ema",
            "--iterations",
            "--json",
            "--out",
            "--per-class",
            "--set",
            "--stage",
            "--threads",
            "--trust-code",
            "--views",
            "--weights",
        ],
        "export": [
            "--caffemodel",
            "--double",
            "--ema",
            "--force",
            "--onnx",
            "--out",
            "--output",
            "--rgb",
            "--safetensors",
            "--size",
            "--solverstate",
            "--torch",
            "--trust-code",
        ],
        "help": [],
        "import caffe": [
            "--images",
            "--no-nets",
            "--order",
            "--out",
            "--overlap",
            "--root",
            "--val-images",
            "--workers",
        ],
        "diff": ["--json", "--plot", "--scale", "--x"],
        "fmt": ["--check", "--diff"],
        "lsp": [],
        "new": ["--from", "--list", "--train", "--val"],
        "plan": [
            "--budget",
            "--csv",
            "--images-per-second",
            "--json",
            "--net",
            "--only",
            "--out",
            "--plot",
            "--redo",
            "--scale",
            "--set",
            "--size",
            "--until",
            "--weights",
            "--why",
            "--x",
        ],
        "predict": [
            "--background",
            "--classes",
            "--device-batch",
            "--ema",
            "--json",
            "--out",
            "--resize-height",
            "--resize-shorter",
            "--resize-width",
            "--threads",
            "--top",
            "--trust-code",
            "--views",
        ],
        "rehearse": [
            "--device-batch",
            "--find-lr",
            "--first-rate",
            "--hosts",
            "--iters",
            "--json",
            "--last-rate",
            "--nproc",
            "--on-hosts",
            "--only",
            "--out",
            "--set",
            "--ssh",
            "--sync",
            "--synthetic",
            "--threads",
            "--until",
            "--workers",
        ],
        "report": ["--across", "--against", "--by", "--diff", "--effect", "--format", "--output", "--plot"],
        "retry": ["--max-restarts", "--out", "--schedule"],
        "run": [
            "--bind",
            "--grace",
            "--hosts",
            "--log",
            "--nproc",
            "--only",
            "--out",
            "--parallel",
            "--profile",
            "--redo",
            "--replay",
            "--require-bit-exact",
            "--retry",
            "--set",
            "--ssh",
            "--stop-after",
            "--sync",
            "--threads",
            "--timeout",
            "--until",
        ],
        "sbatch": [
            "--account",
            "--cpus-per-worker",
            "--gpus-per-node",
            "--nodes",
            "--out",
            "--partition",
            "--set",
            "--signal-before",
            "--submit",
            "--time",
            "--workers-per-node",
        ],
        "status": [
            "--drop",
            "--force",
            "--json",
            "--out",
            "--pin",
            "--set",
            "--snapshots",
            "--unpin",
            "--verify",
        ],
        "verify": [
            "--batches",
            "--device-batch",
            "--iters",
            "--json",
            "--kills",
            "--nproc",
            "--out",
            "--proofs",
            "--seed",
            "--set",
            "--stretch",
            "--synthetic",
            "--then-workers",
            "--threads",
            "--trust-code",
        ],
        "view": ["--budget", "--host", "--images-per-second", "--port", "--save", "--set", "--x"],
    }
    assert sorted(o for p in main.params for o in p.opts) == ["--version"]


if __name__ == "__main__":
    for case, words in CASES.items():
        (GOLDEN / case).parent.mkdir(exist_ok=True)
        (GOLDEN / case).write_text(printed(words))


@pytest.mark.parametrize("name", ["preflight", "data stage", "explain"])
def test_a_retired_command_is_unknown_and_help_says_what_to_type(name: str) -> None:
    said = printed(["help", *name.split()])
    assert said.startswith(f"{name}: It was retired: `stagerun ")
    assert CliRunner().invoke(main, name.split()).exit_code == 64
