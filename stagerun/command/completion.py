"""`stagerun completion`: what a shell needs in order to complete stagerun's words; and what it completes where a stage or a field of one is
meant: `--only STAGE`, `--set STAGE.FIELD=VALUE`."""

from collections.abc import Iterable, Iterator

import click
from click.shell_completion import ShellComplete, get_completion_class
from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import RecipeError
from stagerun.command.options import argument, command
from stagerun.language import files_in, stage_nodes, tree
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.stages import Node
from stagerun.language.tree import SCHEDULE, SOLVER, is_message

SHELLS = ("bash", "zsh", "fish")
# What click's scripts lack: no space behind a word that goes on, `cyc2.` or `cyc2.base_lr=`. fish does so by itself.
_OPEN = {
    "bash": (
        "            COMPREPLY+=($value)\n",
        "            COMPREPLY+=($value)\n            [[ $value == *[.=] ]] && compopt -o nospace\n",
    ),
    "zsh": (
        "        compadd -U -V unsorted -a completions\n",
        "        compadd -U -V unsorted -- ${completions:#*[.=]}\n"
        "        compadd -U -V unsorted -S '' -- ${(M)completions:#*[.=]}\n",
    ),
}


@command()
def completion(shell: str = argument("SHELL", type=click.Choice(SHELLS))) -> None:
    """Prints the script with which bash, zsh or fish completes commands, options, their values, folders and files.

    \b
    bash  stagerun completion bash > ~/.local/share/bash-completion/completions/stagerun
    zsh   stagerun completion zsh > ~/.zfunc/_stagerun   (with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc)
    fish  stagerun completion fish > ~/.config/fish/completions/stagerun.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    main = click.get_current_context().find_root().command
    # Not the shell's own `source`, which starts bash to look at its version.
    script = ShellComplete.source(found(main, {}, "stagerun", "_STAGERUN_COMPLETE"))
    click.echo(script.replace(*_OPEN.get(shell, ("", ""))), nl=False)


def stage_names(folder: str) -> list[str]:
    """The stages of a schedule, as far as it can be read, and the names that stand for several."""
    try:
        text = files_in(folder)[SCHEDULE_FILE]
    except RecipeError:
        return []
    return names_of(stage_nodes(text))


def names_of(nodes: Iterable[Node]) -> list[str]:
    return list(dict.fromkeys(name for node in nodes for name in (node.name, node.group) if name))


def settings(folder: str, word: str, end: str) -> list[str]:
    """What `word`, the beginning of a setting, may become: a stage or a field of the schedule, with a `.` where more has to follow, and
    `end` behind a whole name."""
    *path, last = word.split(".")
    before = "".join(f"{one}." for one in path)
    if not path:
        names = [f"{name}." for name in stage_names(folder)] + list(_fields(SCHEDULE, end))
    else:
        kind: Descriptor | None = SCHEDULE if path[0] in SCHEDULE.fields_by_name else SOLVER
        for one in path if kind is SCHEDULE else path[1:]:
            field = kind.fields_by_name.get(one) if kind is not None else None
            kind = field.message_type if field is not None and is_message(field) else None
        names = list(_fields(kind, end)) if kind is not None else []
    return [before + name for name in names if name.startswith(last)]


def _fields(kind: Descriptor, end: str) -> Iterator[str]:
    """Those inside a list of messages can't be set one by one."""
    for field in tree.fields(kind):
        yield field.name + (end if not is_message(field) or field.is_repeated else ".")
