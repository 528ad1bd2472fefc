"""`stagerun data import`: what is asked for is checked, the engine does it, and what came out is shown."""

import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from stagerun.base.errors import ExitCode, UsageError
from stagerun.base.text import count
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, flag, option
from stagerun.data.importing.engine import Job, Result, Work, run
from stagerun.data.importing.partial import ignored_text
from stagerun.launch import StopRequest
from stagerun.system.imports import REPORT
from stagerun.tools.data.images import ImportWork
from stagerun.tools.data.index import schedule_line
from stagerun.tools.data.pictures import ResizeOptions
from stagerun.tools.data.prepare import LmdbRecords, Prepared
from stagerun.tools.data.progress import DataThreads, Shown, threads_here
from stagerun.tools.data.sources import BY_NAME, SPLITS, SourceOptions, format_of, open_source, readers
from stagerun.tools.data.sources.csv_table import LabelledFiles


def _of_some(usage: str, text: str, **settings: Any) -> Any:
    """An option that only some formats read, whose names begin its line of help."""
    return option(usage, f"{', '.join(readers(usage.split()[0][2:].replace('-', '_')))}: {text}", **settings)


@dataclass(frozen=True, slots=True)
class SourceArguments:
    """What SOURCE itself doesn't show: `SourceOptions`."""

    format: str | None = option(
        "--format",
        f"Of SOURCE.  [default: by its content]  {'; '.join(f'{name}: {format.about}' for name, format in BY_NAME.items())}.",
        type=click.Choice(list(BY_NAME)),
    )
    root: str | None = _of_some("--root DIR", "where its paths begin.  [default: the list's folder]")
    ground_truth: str | None = _of_some("--ground-truth FILE", "the labels of the validation images.")
    synsets: str | None = _of_some("--synsets FILE", "the classes in the order of their labels.")
    split: str | None = _of_some(
        "--split", "which part, where SOURCE holds several.  [default: train]", type=click.Choice(SPLITS)
    )
    labels: str | None = _of_some("--labels FILE", "the labels, where their name isn't that of the images.")


@command("import")
def import_images(
    source: str = argument("SOURCE"),
    out: str = argument("OUT"),
    *,
    kind: SourceArguments,
    raw: bool = flag("--raw", "Store pixels (channels x height x width, B, G, R) in place of encoded images."),
    resize: ResizeOptions,
    quality: int | None = option(
        "--quality Q",
        "Encode every image anew, as JPEG of this quality.  [default: only those that are resized, with 95]",
        type=click.IntRange(1, 100),
    ),
    seed: int | None = option("--seed N", "Of the shuffle.  [default: 1]", type=click.IntRange(0, 2**64 - 1)),
    no_shuffle: bool = flag("--no-shuffle", "Keep the source's order."),
    limit: int | None = option(
        "--limit N", "Only the first N images after the shuffle, as a trial.", type=click.IntRange(1)
    ),
    max_bad: int = option(
        "--max-bad N",
        "Images that can't be used are left out and listed; above so many nothing is made.",
        type=click.IntRange(0),
        default=0,
    ),
    prepare: bool = flag(
        "--prepare", "Arrange the JPEGs anew, losslessly, so that they decode faster; SOURCE may be an LMDB."
    ),
    threads: DataThreads = None,
    restart: bool = flag("--restart", "Begin anew, whatever an interrupted command has made."),
) -> None:
    """Makes an LMDB of Caffe's Datum records from a set of labelled images.

    SOURCE is a folder of class folders, or of another format: --format lists them. OUT is a new folder, which Caffe reads too:
    keys are as convert_imageset makes them, 00000000_RELATIVE/PATH.JPEG, numbered after one shuffle of all images, so that every
    stretch of the LMDB holds a mixture of classes.

    In class folders, at any depth, files named .jpg .jpeg .jpe .jfif .png .ppm .bmp .pgm .tif .tiff .webp .gif are taken, in small
    or capital letters; others are counted and listed, but for hidden ones.

    JPEGs and PNGs of 8 bits keep their bytes unless they are resized. Resizing uses area interpolation to shrink and linear to grow. What
    is odd is taken by rule, counted, and listed in OUT/stagerun-import.txt: CMYK becomes JPEG in B, G, R; palettes, 16 bits, alpha channels
    (composited on white, or --background), GIF, BMP, TIFF, WebP and PPM become PNG of 8 bits; a JPEG or PNG that EXIF turns is turned, and
    encoded again. What can't be used is left out: empty, cut off, damaged, not an image, above 100 million pixels. What holds pixels, as
    CIFAR does, is stored as pixels.

    With --prepare JPEGs become baseline JPEGs with a restart marker every 4 blocks, or as near to that as divides a row; so a
    training's random crop is decoded without the rest. Every image is decoded before and after and compared. Where SOURCE is an
    LMDB's folder, its records are copied so, in their order.

    Interrupted, by whatever means, the same command goes on where it was, and the result is the same.
    """
    if raw and quality is not None:
        raise UsageError("--quality is for encoded images, --raw stores pixels", "leave one of them out")
    if raw and prepare:
        raise UsageError("--prepare is for JPEGs, --raw stores pixels", "leave one of them out")
    if prepare and os.path.isfile(os.path.join(source, "data.mdb")):
        _require_alone()
        _make(Prepared(LmdbRecords(source)), out, threads, max_bad, restart)
        return
    if no_shuffle and seed is not None:
        raise UsageError("--seed is for the shuffle, which --no-shuffle turns off", "leave one of them out")
    seed = 1 if seed is None and not no_shuffle else seed
    options = replace(resize.checked(), seed=seed, limit=limit, raw=raw, quality=quality)
    of_source = SourceOptions(**asdict(kind))
    _require_outside(source, out, of_source)
    tell(f"looking through {source}")
    opened = open_source(source, of_source)
    work = ImportWork(opened, source, options, BY_NAME[opened.kind].pixels)
    tell(f"{count(len(work), 'image')} for {out}")
    if work.ignored:
        tell(ignored_text(work.ignored))
    several = isinstance(opened, LabelledFiles)
    made = Prepared(work) if prepare else work
    _make(made, out, threads, max_bad, restart, ' labels: "float_data"' if several else "")


def _require_alone() -> None:
    """UsageError for options that say what becomes of images: the records of an LMDB are copied."""
    context = click.get_current_context()
    given = [n for n in context.params if context.get_parameter_source(n) is ParameterSource.COMMANDLINE]
    if others := set(given) - {"source", "out", "prepare", "threads", "restart"}:
        name = min(others).replace("_", "-")
        raise UsageError(f"--{name} is for images; the records of an LMDB are copied", f"leave --{name} out")


def _require_outside(source: str, out: str, options: SourceOptions) -> None:
    """UsageError if OUT would lie in a folder of class folders: there it, and OUT.partial, would be a class, or part of one."""
    # The name itself is not followed: where OUT is a link, OUT.partial lies beside it.
    parent = os.path.realpath(Path(out).parent)
    folder = os.path.realpath(source)
    if not os.path.isdir(folder) or os.path.commonpath([folder, parent]) != folder:
        return
    if format_of(source, options).name == "folder":
        raise UsageError(
            f"{out}: lies in {source}, whose folders are the classes, and would be taken for one",
            f"give a folder outside of {source}",
        )


def _make(work: Work, out: str, threads: int | None, max_bad: int, restart: bool, more: str = "") -> None:
    """`more`: what the schedule has to say of the images besides."""
    stop = StopRequest("what is on disk stays", "this commit")
    stop.install()
    with Shown("import") as shown:
        job = Job(
            threads=threads_here(threads),
            max_bad=max_bad,
            restart=restart,
            progress=shown.progress,
            stop=stop,
            tell=shown.say,
        )
        result = run(work, out, job)
    if not result.complete:
        tell(f"stopped: {count(result.records, 'record')} are in {out}.partial; the same command goes on")
        sys.exit(ExitCode.SAVED)
    show(_text(result, work.ignored, out, shown, more))


def _text(result: Result, ignored: tuple[str, ...], out: str, shown: Shown, more: str) -> str:
    line = f"  {schedule_line(out, result.records)}{more}"
    if result.already:
        return f"nothing to do: {out} is complete\n{line}"
    kinds = ", ".join(f"{n} {kind}" for kind, n in result.kinds)
    lines = [f"{out}: {count(result.records, 'record')} ({kinds}){shown.rate(result.position)}"]
    if result.counts:
        lines.append(f"{out}/{REPORT} lists what was odd:")
        lines += [f"  {n} {what}" for what, n in result.counts]
    if result.bad:
        lines.append(f"left out: {count(result.bad, 'image')}")
    if ignored:
        lines.append(f"{ignored_text(ignored)}; {out}/{REPORT} lists them")
    return "\n".join([*lines, "in schedule.prototxt, under `data`:", line])
