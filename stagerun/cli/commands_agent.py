"""`stagerun agent`: what `run --hosts` starts on each host. Not for people."""

import click

from stagerun.cli.ending import guarded


@click.command(hidden=True)
@guarded
def agent() -> None:
    """Serves a launcher on another host, which speaks to it over stdin and stdout."""
    from stagerun.cli.answering import ANSWERS
    from stagerun.launch.agent import Agent

    Agent(ANSWERS).run()
