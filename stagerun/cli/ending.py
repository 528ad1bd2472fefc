"""How a command ends: one message for the user, and the exit code."""

import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

import stagerun
from stagerun.errors import ExitCode, StagerunError


def show(error: StagerunError) -> None:
    if text := error.render():
        click.echo(text, err=True)


def end_with(error: BaseException) -> NoReturn:
    """Shows an error the way a user should see it, and exits with its code. Our own bugs keep their traceback in a file."""
    if isinstance(error, StagerunError):
        show(error)
        sys.exit(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(ExitCode.INTERRUPTED_TWICE)
    if isinstance(error, BrokenPipeError):  # `stagerun plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.DONE)
    click.echo(bug_report(error), err=True)
    sys.exit(ExitCode.BUG)


def bug_report(error: BaseException) -> str:
    """One message for an exception that no user should ever meet; the traceback goes to a file beside it."""
    path = Path(f"stagerun-bug-{os.getpid()}.txt")
    text = "".join(traceback.format_exception(error))
    try:
        path.write_text(f"stagerun {stagerun.__version__}, Python {sys.version}\n{' '.join(sys.argv)}\n\n{text}")
        where = f"please report it with {path.absolute()}"
    except OSError:
        where = f"please report it with these lines:\n{text}"
    return f"this is a bug of stagerun: {type(error).__name__}: {error}\n  hint: {where}"


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (click.exceptions.Exit, click.ClickException, click.Abort, SystemExit):
            raise
        except BaseException as error:
            end_with(error)

    return wrapper
