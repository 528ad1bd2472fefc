"""Options that several commands have, and the types of their values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from stagerun.base import units
from stagerun.base.errors import UsageError, listing, nearest
from stagerun.command.options import argument, option
from stagerun.system.pulse import LEAST_S, Limits, Section

TRAINED = "What is trained"
WORKERS = "Workers"

# Images per second that someone may mean: one in a quarter of an hour, and more than all machines together train.
SLOWEST, FASTEST = 1e-3, 10**9


class FiniteRange(click.FloatRange):
    """Click's own lets `nan` through, which is neither below nor above, and `inf` where there is no upper end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not math.isfinite(click.FLOAT.convert(value, param, ctx)):
            self.fail(f"{value} is not a number.", param, ctx)
        return float(super().convert(value, param, ctx))


class Duration(click.ParamType):  # generic in a newer click alone
    """A length of time on the command line, in seconds; `least`: and no shorter."""

    name = "time"

    def __init__(self, least: float = 0.0) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = units.seconds(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a length of time: write 4h, 90m, 3h30m, 2d or 1:30:00.", param, ctx)
        if seconds < self.least:
            self.fail(f"{value} is too short: {self.least:g}s is the least.", param, ctx)
        return seconds


Folder = Annotated[str, argument("DIR")]
Overrides = Annotated[
    tuple[str, ...],
    option(
        "--set STAGE.FIELD=VALUE",
        "Change a field for this command: `cyc2.base_lr=0.5`, `seed=3`, `data.train.source=/x`. Repeatable.",
    ),
]
Out = Annotated[str | None, option("--out FOLDER", "Output folder.  [default: ./out/NAME]")]


@dataclass(frozen=True, slots=True)
class PlannedOptions:
    """Which schedule, its output folder, and what becomes of its stages."""

    folder: Folder
    overrides: Overrides = ()
    out: Out = None
    redo: tuple[str, ...] = option(
        "--redo STAGE", "Train a stale stage, and what follows from it, again.", title=TRAINED, default=()
    )
    only: tuple[str, ...] = option(
        "--only STAGE",
        "Train this stage alone; what it starts from must be there. Repeatable.",
        title=TRAINED,
        default=(),
    )
    until: str | None = option(
        "--until STAGE", "Train up to this stage, it included, and nothing after it.", title=TRAINED
    )


Nproc = Annotated[
    int | None,
    option(
        "--nproc N",
        "Workers on this machine, which end with this process, unsaved if it is killed; with --hosts on each.  [default: one per GPU, else one "
        "per NUMA node]",
        title=WORKERS,
        least=1,
        launcher=True,
    ),
]
Threads = Annotated[
    int | None,
    option(
        "--threads N",
        "Threads per worker.  [default: the processors shared evenly]",
        title=WORKERS,
        least=1,
        launcher=True,
    ),
]
DeviceBatch = Annotated[
    int | None, option("--device-batch N", "Images per forward pass, where the real batch does not fit.", least=1)
]
TrustCode = Annotated[
    bool, option("--trust-code", "Run the Python that the snapshot's recipe names: DIR's, or the snapshot's own copy.")
]
Synthetic = Annotated[bool, option("--synthetic", "Make up images of the right kind: no data needed.")]
Json = Annotated[bool, option("--json", "One JSON object on stdout.")]


def limits(words: Sequence[str]) -> Limits | None:
    """What `--timeout SECTION=TIME ...` says; None for `off`. UsageError."""
    given: dict[Section, float] = {}
    names = [section.value for section in Section]
    for word in words:
        name, equals, time = (part.strip() for part in word.partition("="))
        if word.strip() == "off":
            if len(words) > 1:
                raise UsageError(
                    "--timeout off, and another --timeout", "`off` is for all sections: leave the others out"
                )
            return None
        if not equals and name in names:
            raise UsageError(f"--timeout {word}: how long is not said", f"write `--timeout {name}=5m`")
        if name not in names:
            hint = nearest(name, names) or f"write SECTION=TIME; the sections are {listing(names)}; or `off`"
            raise UsageError(f"--timeout {word}: there is no section `{name}`", hint)
        section = Section(name)
        if section in given:
            raise UsageError(f"--timeout {name} is given twice")
        try:
            given[section] = math.inf if time == "off" else units.seconds(time)
        except ValueError:
            raise UsageError(
                f"--timeout {word}: `{time}` is not a length of time", "write 90s, 5m, 2h, 1:30:00 or off"
            ) from None
        if given[section] < LEAST_S:
            raise UsageError(
                f"--timeout {word} is too short", "on a busy machine, a process may wait for its turn that long"
            )
    return Limits(given)


def output_folder(name: str, out: str | None) -> Path:
    return Path(out) if out is not None else Path("out") / name
