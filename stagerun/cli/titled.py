"""--help of a command with many options: in groups, each under a title."""

from collections.abc import Mapping, Sequence
from typing import Any

import click


class Titled(click.Command):
    """`titles`: the options under each title, in their order there; what stands under none comes first."""

    def __init__(self, *args: Any, titles: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.titles = titles

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                records[param.opts[-1]] = record
        titled = {title: [records.pop(name) for name in names] for title, names in self.titles.items()}
        for title, rows in {"Options": list(records.values()), **titled}.items():
            with formatter.section(title):
                formatter.write_dl(rows)
