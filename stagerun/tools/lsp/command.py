"""`stagerun lsp`: the command."""

from stagerun.base.errors import UsageError
from stagerun.command.options import command


@command()
def lsp() -> None:
    """Serves an editor over stdin and stdout: mistakes as you type, the manual under the cursor, completion, renaming, formatting.

    An editor starts it by itself; `stagerun help editor` says how VS Code, Neovim, Helix and Emacs are set up.
    """
    try:
        import pygls.lsp.server  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the language server needs the package {(error.name or 'pygls').partition('.')[0]}",
            "pip install 'stagerun[lsp]'",
        ) from None
    from stagerun.tools.lsp.server import serve

    serve()
