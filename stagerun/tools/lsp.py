"""`stagerun lsp` and `stagerun completion`: what an editor, and what a shell, completes."""

import click
from click.shell_completion import ShellComplete, get_completion_class

from stagerun.base.errors import UsageError
from stagerun.command.options import argument, command

# Lines for click's scripts, by shell: no space behind a word that continues, `cyc2.` or `cyc2.base_lr=`. fish needs none.
_NO_SPACE = {
    "bash": (
        "            COMPREPLY+=($value)\n",
        "            COMPREPLY+=($value)\n            [[ $value == *[.=] ]] && compopt -o nospace\n",
    ),
    "zsh": (
        "        compadd -U -V unsorted -a completions\n",
        "        compadd -U -V unsorted -- ${completions:#*[.=]}\n"
        "        compadd -U -V unsorted -S '' -- ${(M)completions:#*[.=]}\n",
    ),
    "fish": ("", ""),
}


@command()
def lsp() -> None:
    """Serves an editor over stdin and stdout: mistakes as you type, the manual under the cursor, completion, formatting.

    An editor starts it; `stagerun help editor` says how VS Code, Neovim, Helix and Emacs are set up.
    """
    try:
        import pygls.lsp.server  # noqa: F401
    except ModuleNotFoundError as error:
        package = (error.name or "pygls").partition(".")[0]
        raise UsageError(f"the language server needs the package {package}", "pip install 'stagerun[lsp]'") from None
    from stagerun.tools.language_server import serve

    serve()


@command()
def completion(shell: str = argument("SHELL", type=click.Choice(list(_NO_SPACE)))) -> None:
    """Prints the script with which bash, zsh or fish completes commands, options, their values, folders and files.

    \b
    bash  stagerun completion bash > ~/.local/share/bash-completion/completions/stagerun
    zsh   stagerun completion zsh > ~/.zfunc/_stagerun   (with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc)
    fish  stagerun completion fish > ~/.config/fish/completions/stagerun.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    main = click.get_current_context().find_root().command
    # Not click's `source` of the shell, which starts bash to look at its version.
    script = ShellComplete.source(kind(main, {}, "stagerun", "_STAGERUN_COMPLETE"))
    click.echo(script.replace(*_NO_SPACE[shell]), nl=False)
