"""Options of several commands, and the types of their values."""

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

# Plausible images per second: one in a quarter of an hour, and more than all machines together.
SLOWEST, FASTEST = 1e-3, 10**9


class FiniteRange(click.FloatRange):
    """click's FloatRange without `nan` and `inf`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not math.isfinite(click.FLOAT.convert(value, param, ctx)):
            self.fail(f"{value} is not a number.", param, ctx)
        return float(super().convert(value, param, ctx))


class Duration(click.ParamType):  # generic in a newer click alone
    """A duration on the command line, in seconds, at least `least`."""

    name = "time"

    def __init__(self, least: float = 0.0) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = units.seconds(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a duration: write 4h, 90m, 3h30m, 2d or 1:30:00.", param, ctx)
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
    """The schedule, its output folder, and which stages to train."""

    folder: Folder
    overrides: Overrides = ()
    out: Out = None
    redo: tuple[str, ...] = option(
        "--redo STAGE", "Retrain a stale stage, and the stages that follow from it.", title=TRAINED, default=()
    )
    only: tuple[str, ...] = option(
        "--only STAGE",
        "Train this stage alone, from an existing snapshot. Repeatable.",
        title=TRAINED,
        default=(),
    )
    until: str | None = option("--until STAGE", "Train the stages up to this one, inclusive.", title=TRAINED)


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
    bool, option("--trust-code", "Run the Python that the snapshot's recipe names: DIR's, or the snapshot's copy.")
]
Synthetic = Annotated[bool, option("--synthetic", "Generate images of the right shape: no data needed.")]
Json = Annotated[bool, option("--json", "One JSON object on stdout.")]


def limits(words: Sequence[str]) -> Limits | None:
    """Read `--timeout SECTION=TIME ...`; return None for `off`. UsageError."""
    times: dict[Section, float] = {}
    names = [section.value for section in Section]
    for word in words:
        name, _, time = (part.strip() for part in word.partition("="))
        if word.strip() == "off" and len(words) == 1:
            return None
        if name not in names:
            hint = nearest(name, names) or f"write SECTION=TIME; the sections are {listing(names)}; or `off` for all"
            raise UsageError(f"--timeout {word}: unknown section `{name}`", hint)
        try:
            seconds = math.inf if time == "off" else units.seconds(time)
        except ValueError:
            hint = f"write `--timeout {name}=5m`: 90s, 5m, 2h, 1:30:00 or off"
            raise UsageError(f"--timeout {word}: `{time}` is not a duration", hint) from None
        if seconds < LEAST_S:
            raise UsageError(f"--timeout {word} is too short", "a process may wait that long for a busy processor")
        times[Section(name)] = seconds
    return Limits(times)


def output_folder(name: str, out: str | None) -> Path:
    return Path(out) if out is not None else Path("out") / name
