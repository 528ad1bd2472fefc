"""`stagerun help`: the manual of the solver files."""

import sys
from importlib import import_module

import click

from stagerun.base.errors import UsageError
from stagerun.command.ending import show, width_of
from stagerun.command.options import argument, command
from stagerun.manual.fields import help_text
from stagerun.manual.pages import page_name, page_text, print_page

# What a tool says of itself: module:function, imported when it is asked for.
TOPICS = {"lint": "stagerun.tools.lint:rules_text"}


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
    if name in TOPICS:
        module, function = TOPICS[name].split(":")
        show(getattr(import_module(module), function)())
        return
    try:
        show(help_text(name))
    except UsageError:
        commands = click.get_current_context().obj
        known = next((path for path in commands if name in (path, path.split()[-1])), None)
        if known is None:
            raise
        show(f"{known}: {commands[known] or f'a command; `stagerun {known} --help` says what it does'}")
