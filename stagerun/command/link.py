"""Speed and latency of a network link on the command line."""

import click

from stagerun.base import units


class Bandwidth(click.ParamType):  # generic in a newer click alone
    """`10Gbit/s`, in bytes per second."""

    name = "rate"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else units.bandwidth(str(value))
        except ValueError:
            self.fail(f"{value!r} is no speed of a link: write 10Gbit/s, 100Mbit/s or 1.2GB/s.", param, ctx)


class Latency(click.ParamType):
    """`50us`, in seconds."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else units.short_seconds(str(value))
        except ValueError:
            self.fail(f"{value!r} is no latency: write 50us or 0.2ms.", param, ctx)
