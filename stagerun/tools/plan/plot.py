"""`stagerun plan --plot`: the picture of a schedule, in the terminal or as a file, once or whenever a file is saved."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from stagerun.base.errors import PermissionDenied, RecipeError, StagerunError, StorageError, UsageError
from stagerun.base.recipe import Schedule
from stagerun.command.ending import tell
from stagerun.command.shared import output_folder
from stagerun.command.terminal import Terminal
from stagerun.drawing.picture import Picture, Unit, make_picture
from stagerun.drawing.scale import make_scale
from stagerun.language import load
from stagerun.language.resolve import SCHEDULE_FILE, stage_files
from stagerun.plan import make_plan
from stagerun.plan.hours import seconds_at
from stagerun.store import LocalDisk, inventory, write_atomic
from stagerun.train.hours import HINT, find_hours

ENDINGS = (".svg", ".png", ".html")
TERMINAL = "-"  # in place of a file
INTERVAL = 0.4  # seconds between two looks
# An editor may empty a file, fill it and rename it: a change counts once two looks so far apart see the same.
SETTLED = 0.1

Seen = Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotOptions:
    """`file` is TERMINAL or a path; `log` is None where the rates decide."""

    file: str
    unit: Unit = Unit.EPOCHS
    log: bool | None = None
    folder: str = ""
    overrides: tuple[str, ...] = ()
    out: str | None = None
    images_per_second: float | None = None

    @property
    def in_terminal(self) -> bool:
        return self.file == TERMINAL


def asked(
    *,
    file: str | None,
    x: str | None,
    scale: str | None,
    watched: bool = False,
    others: Sequence[str] = (),
    **about: Any,
) -> PlotOptions:
    """What --plot, --x, --scale and --watch ask for, one of them at least. `others`: options of the text beside it that were given.
    `about`: the folder and what follows, for `plot` and `watch`, which read a schedule themselves.

    UsageError for what is wrong whatever the schedule is, StorageError for a file in no folder, before anything is drawn.
    """
    if file is None:
        name = "--x" if x else "--scale" if scale else "--watch"
        raise UsageError(f"{name} is for a picture, and there is none", "add --plot, or leave it out")
    if watched and others:
        raise UsageError(
            f"{others[0]} is for the plan as text, and --watch shows the picture alone", "leave one of them out"
        )
    if file == TERMINAL and "--json" in others:
        raise UsageError(
            "--json and a picture in the terminal are both for stdout", "give --plot a file, or leave --json out"
        )
    log = None if scale is None else scale == "log"
    options = PlotOptions(file=file, unit=Unit(x or "epochs"), log=log, **about)
    _check_file(options)
    return options


def _check_file(options: PlotOptions) -> None:
    if options.in_terminal:
        return
    if _ending(options.file) not in ENDINGS:
        raise UsageError(
            f"--plot {options.file}: its ending names no format",
            f"end it in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}",
        )
    _require_folder(options.file)
    from stagerun.drawing.figure import drawing

    with drawing():
        pass


def plot(options: PlotOptions, schedule: Schedule) -> None:
    """Draws it once. UsageError for hours that are not known, StorageError and PermissionDenied for the file."""
    draw_once(_picture(options, schedule), options)


def draw_once(picture: Picture, options: PlotOptions) -> None:
    """StorageError and PermissionDenied for the file."""
    if options.in_terminal:
        click.echo()  # below the text
        _show(_text(picture, options))
    else:
        _write(options.file, _file(picture, options, watched=False))
        tell(f"written to {options.file}")


def watch(options: PlotOptions, wait: Callable[[float], None] = time.sleep) -> None:
    """Draws it again each time a file is saved, until it is interrupted. Mistakes take the picture's place."""
    folder = Path(options.folder)
    if not folder.is_dir():
        load(options.folder)  # says what is wrong
    try:
        for _ in changes(lambda: look_at(folder), wait):
            _redraw(options)
    finally:
        if _ending(options.file) == ".html":
            _settle(options.file)


def _settle(file: str) -> None:
    """No one draws the page again, so it need not look. Where it can't be written, that is why watching ended."""
    from stagerun.drawing.html import still

    with contextlib.suppress(OSError, UnicodeDecodeError, StagerunError):
        page = Path(file).read_bytes().decode()
        if page != still(page):
            _write(file, still(page).encode())


def _redraw(options: PlotOptions) -> None:
    problem: StagerunError | None = None
    drawn: Text | bytes
    try:
        picture = _picture(options, load(options.folder, options.overrides))
        drawn = _text(picture, options) if options.in_terminal else _file(picture, options, watched=True)
    except (RecipeError, UsageError) as error:  # an edit mends it
        problem = error
        drawn = Text(error.render()) if options.in_terminal else _problem(error.render(), _ending(options.file))
    if isinstance(drawn, bytes):
        _write(options.file, drawn)
        tell(f"{problem.render()}\n" if problem else f"{time.strftime('%H:%M:%S')} written to {options.file}")
    else:
        _show(drawn, f"{time.strftime('%H:%M:%S')} watching {options.folder}; Ctrl-C ends")


def _ending(file: str) -> str:
    return Path(file).suffix.lower()


def _picture(options: PlotOptions, schedule: Schedule) -> Picture:
    if options.unit is not Unit.HOURS:
        return make_picture(schedule)
    target = output_folder(schedule.name, options.out)
    hours = find_hours(
        make_plan(schedule, inventory(LocalDisk(), target, looking=True)), target, options.images_per_second
    )
    if hours is None:
        raise UsageError("--x hours needs to know how fast training is, and nothing was measured here", HINT)
    unknown = [stage.name for stage in schedule.stages if stage.name not in hours.speeds]
    if unknown:
        raise UsageError(f"--x hours: stage {', '.join(unknown)} {hours.unknown}", HINT)
    known = hours

    def seconds(stage: str, iter: int) -> float:
        found = seconds_at(schedule, known, stage, iter)
        assert found is not None  # every speed is known
        return found

    return make_picture(schedule, seconds)


# -- the terminal


def _text(picture: Picture, options: PlotOptions) -> Text:
    from stagerun.drawing.terminal import draw

    width = shutil.get_terminal_size((80, 24)).columns
    return draw(picture, options.unit, make_scale(picture, options.log), width)


def _show(text: Text, foot: str = "") -> None:
    """Colours where the terminal has them. `foot`: drawn again and again, so a terminal is cleared first."""
    from stagerun.drawing.terminal import ascii_only

    console = Terminal(highlight=False, soft_wrap=True)
    try:
        "┊⣿─→".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        text = Text(ascii_only(text.plain))
    if foot and console.is_terminal:
        console.clear()
    console.print(text)
    if foot:
        console.print(Text("\n" + foot, style="dim"))


# -- a file


def _file(picture: Picture, options: PlotOptions, watched: bool) -> bytes:
    from stagerun.drawing import figure, html

    scale, ending = make_scale(picture, options.log), _ending(options.file)
    if ending == ".png":
        return figure.png(picture, options.unit, scale)
    if ending == ".svg":
        return figure.svg(picture, options.unit, scale).encode()
    return html.html(picture, options.unit, scale, watched).encode()


def _problem(text: str, ending: str) -> bytes:
    """What is wrong, in the form of the file, so that whoever looks at it alone knows that it is not the picture."""
    from stagerun.drawing import figure, html

    if ending == ".html":
        return html.problem_html(text, watched=True).encode()
    with figure.drawing():
        drawn = figure.problem(text)
        return figure.saved_png(drawn) if ending == ".png" else figure.saved_svg(drawn, "mistakes").encode()


def _write(file: str, data: bytes) -> None:
    """Whole or not at all."""
    _require_folder(file)
    try:
        write_atomic(LocalDisk(), Path(file), data)
    except (StorageError, PermissionDenied) as error:
        raise type(error)(error.message, "give --plot another file") from error


def _require_folder(file: str) -> None:
    """A folder with a name that is misspelt is not made."""
    folder = os.path.dirname(file) or "."
    if not os.path.isdir(folder):
        raise StorageError(
            f"can't write {file}: there is no folder {folder}", "make it first, or give --plot another file"
        )


# -- noticing that a file of a schedule's folder was saved: by looking, which works on every file system, network ones too


def changes(look: Callable[[], Seen], wait: Callable[[float], None]) -> Iterator[None]:
    """Yields at once, and then after each change of what `look` sees.

    What is changed while the caller draws is seen by the next look, since the last one was before.
    """
    seen = look()
    yield
    while True:
        wait(INTERVAL)
        now = look()
        if now == seen:
            continue
        while True:
            wait(SETTLED)
            before, now = now, look()
            if now == before:
                break
        if now != seen:
            seen = now
            yield


def look_at(folder: Path) -> Seen:
    """The files that a schedule is made of: its *.prototxt, and the stages' files, wherever and whatever they are. Those that
    can't be seen are left out, so that their coming is a change."""
    names = set()
    try:
        names |= {name for name in os.listdir(folder) if name.endswith(".prototxt")}
        names |= set(stage_files((folder / SCHEDULE_FILE).read_bytes()))
    except (OSError, ValueError):  # gone for the moment, or not a text: reading it says so
        pass
    seen = {}
    for name in sorted(names):
        try:
            stat = os.stat(folder / name)
        except (OSError, ValueError):
            continue
        seen[name] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    return seen
