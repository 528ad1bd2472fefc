"""`stagerun help`: the manual of the solver files."""

import sys

import click

from stagerun.cli.ending import show, width_of
from stagerun.cli.options import argument, command
from stagerun.errors import UsageError
from stagerun.manual.pages import page_name, page_text, print_page
from stagerun.spec.manual import help_text


@command("help")
def help_command(words: tuple[str, ...] = argument("[PAGE|TOPIC|FIELD]", default=())) -> None:
    """Shows a page of the manual (`designing`, `many-machines`), or what a word means: a field, a message or an enum of the solver
    files, a topic (`own images`, `resume`, `freeze`). `lint` lists what the linter looks for. Without a word: an overview."""
    name = " ".join(words)
    if page := page_name(name):
        if width_of(sys.stdout) is None:
            show(page_text(page))
        else:
            print_page(page)
        return
    if name == "lint":
        from stagerun.plan.lint import rules_text

        show(rules_text())
        return
    try:
        show(help_text(name))
    except UsageError as error:
        known = next((path for path in click.get_current_context().obj if name in (path, path.split()[-1])), None)
        if known is None:
            raise
        raise UsageError(error.message, f"for the command, `stagerun {known} --help`") from error
