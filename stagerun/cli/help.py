"""`stagerun help`: the manual of the solver files."""

import click

from stagerun.cli.ending import show
from stagerun.cli.options import argument, command
from stagerun.errors import UsageError
from stagerun.spec.manual import help_text


@command("help")
def help_command(words: tuple[str, ...] = argument("[FIELD|TOPIC]", default=())) -> None:
    """Prints the manual of a field, a message or an enum of the solver files, or of a topic (`own images`, `resume`, `freeze`); of
    `lint`, what it looks for; of nothing, an overview."""
    name = " ".join(words)
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
