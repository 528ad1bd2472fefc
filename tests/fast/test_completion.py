"""Completion in a shell, by click's own way: the shell calls `stagerun` with its words in the environment."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from stagerun.cli import COMMANDS, main


def completed(words: str, incomplete: str = "") -> dict[str, str]:
    """What the shell is answered: values and their types (`plain`, `dir`, `file`)."""
    env = {
        "_STAGERUN_COMPLETE": "bash_complete",
        "COMP_WORDS": f"stagerun {words} {incomplete}".strip(),
        "COMP_CWORD": str(len(words.split()) + 1),
    }
    done = CliRunner().invoke(main, [], env=env, prog_name="stagerun")
    assert done.exit_code == 0 and not done.stderr, done.output
    pairs = (line.partition(",") for line in done.stdout.splitlines() if line)
    return {value: kind for kind, _, value in pairs}


def test_commands_are_completed_without_importing_them():
    before = set(sys.modules)
    assert list(completed("")) == [usage.split()[0] for usage, _, _ in COMMANDS], "and not what is hidden"
    assert completed("", "re") == {"rehearse": "plain", "retry": "plain", "report": "plain"}
    assert completed("data", "in") == {"info": "plain"}
    assert not {name for name in set(sys.modules) - before if name.startswith("stagerun.tools")}


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        ("run", "--re", ["--redo", "--replay", "--retry", "--require-bit-exact"]),
        ("run d", "--stop", ["--stop-after"]),
        ("run d --log", "", ["tensorboard", "wandb"]),
        ("data import", "--syn", ["--synsets"]),
        ("import caffe", "--val", ["--val-images"]),
        ("data", "sho", ["show"]),
        ("", "--v", ["--version"]),
        ("run solvers/resnet50_72ep --only", "c", ["cyc1", "cyc2", "cyc3", "collapse"]),
        ("rehearse solvers/resnet50_72ep --find-lr", "in", ["init"]),
        ("plan solvers/resnet50_72ep --set", "cyc2.momentum_", ["cyc2.momentum_form="]),
        ("plan solvers/resnet50_72ep --set", "cyc2.transform_param.mi", ["cyc2.transform_param.mirror="]),
        ("plan solvers/resnet50_72ep --set", "data.tr", ["data.train."]),
        ("plan solvers/resnet50_72ep --why", "cyc2.base_lr", ["cyc2.base_lr", "cyc2.base_lr_batch"]),
        ("plan solvers/resnet50_72ep --set", "cyc2.base_lr.x", []),
        ("plan nowhere --only", "c", []),
        ("plan --only", "c", []),
    ],
)
def test_options_and_their_values(words, incomplete, expected, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert sorted(set(completed(words, incomplete))) == sorted(expected)


FOLDERS = "run", "plan", "run solvers/x --out", "report out/a", "export", "diff a"
FILES = "run solvers/x --profile", "predict snapshot", "data import", "data show lmdb --output"


@pytest.mark.parametrize("words", FOLDERS + FILES)
def test_folders_and_files_are_left_to_the_shell(words):
    assert completed(words, "so") == {"so": "dir" if words in FOLDERS else "file"}


def test_a_mistake_before_the_cursor_is_not_reported():
    assert set(completed("rum")) == {usage.split()[0] for usage, _, _ in COMMANDS}
    assert "--out" in completed("run solvers/x --grace never", "--o")


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("bash", "complete -o nosort -F _stagerun_completion stagerun"),
        ("bash", "[[ $value == *[.=] ]] && compopt -o nospace"),
        ("zsh", "#compdef stagerun"),
        ("zsh", "compadd -U -V unsorted -S '' -- ${(M)completions:#*[.=]}"),
        ("fish", "complete --no-files --command stagerun"),
    ],
)
def test_the_script_for_a_shell(shell, line):
    done = CliRunner().invoke(main, ["completion", shell], prog_name="stagerun")
    assert done.exit_code == 0 and line in done.stdout
    assert f"_STAGERUN_COMPLETE={shell}_complete" in done.stdout, "it asks what the tests above ask"
