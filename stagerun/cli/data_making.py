"""`stagerun data import` and `prepare`: what is asked for is checked, the engine does it, and what came out is told."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from stagerun.cli.data_progress import Shown, threads_here
from stagerun.cli.ending import show, tell
from stagerun.errors import ExitCode, UsageError
from stagerun.launch import StopRequest
from stagerun.text import count
from stagerun.tools.data.engine import Job, Result, Work, run
from stagerun.tools.data.images import ImportOptions, ImportWork
from stagerun.tools.data.inspect import schedule_line
from stagerun.tools.data.partial import REPORT
from stagerun.tools.data.prepare import PrepareWork
from stagerun.tools.data.report import ignored_text, transparency_of
from stagerun.tools.data.sources import SourceOptions, detect, open_source


def import_images(source: str, out: str, *, threads: int | None, max_bad: int, restart: bool, **given: Any) -> None:
    options = _options(
        **{name: given.pop(name) for name in list(given) if name not in SourceOptions.__dataclass_fields__}
    )
    of_source = SourceOptions(**given)
    _require_outside(source, out, of_source)
    tell(f"looking through {source}")
    work = ImportWork(open_source(source, of_source), source, options)
    tell(f"{count(len(work), 'image')} for {out}")
    if work.ignored:
        tell(ignored_text(work.ignored))
    _make(work, out, "import", threads, max_bad, restart)


def _require_outside(source: str, out: str, options: SourceOptions) -> None:
    """UsageError if OUT would lie in a folder of class folders: there it, and OUT.partial, would be a class, or part of one."""
    # The name itself is not followed: where OUT is a link, OUT.partial lies beside it.
    parent = os.path.realpath(Path(out).parent)
    folder = os.path.realpath(source)
    if not os.path.isdir(folder) or os.path.commonpath([folder, parent]) != folder:
        return
    if (options.format or detect(source, options)) == "folder":
        raise UsageError(
            f"{out}: lies in {source}, whose folders are the classes, and would be taken for one",
            f"give a folder outside of {source}",
        )


def prepare_lmdb(source: str, out: str, threads: int | None, restart: bool) -> None:
    _make(PrepareWork(source), out, "prepare", threads, 0, restart)


def _options(
    *,
    raw: bool,
    resize_shorter: int | None,
    resize_height: int | None,
    resize_width: int | None,
    quality: int | None,
    seed: int | None,
    no_shuffle: bool,
    limit: int | None,
    background: str | None,
) -> ImportOptions:
    """UsageError for options that exclude each other."""
    resize = resizing(resize_shorter, resize_height, resize_width, background)
    if raw and quality is not None:
        raise UsageError("--quality is for encoded images, --raw stores pixels", "leave one of them out")
    if no_shuffle and seed is not None:
        raise UsageError("--seed is for the shuffle, which --no-shuffle turns off", "leave one of them out")
    if seed is None and not no_shuffle:
        seed = 1
    return replace(resize, seed=seed, limit=limit, raw=raw, quality=quality)


def resizing(shorter: int | None, height: int | None, width: int | None, background: str | None) -> ImportOptions:
    """In the source's order. UsageError for options that exclude each other."""
    if (height is None) != (width is None):
        raise UsageError(
            "--resize-height and --resize-width go together",
            "give both, or --resize-shorter, which keeps the picture's shape",
        )
    exact = (height, width) if height is not None and width is not None else None
    if exact is not None and shorter is not None:
        raise UsageError("--resize-shorter, and an exact size too", "give one of them")
    return ImportOptions(seed=None, shorter=shorter, exact=exact, background=background)


def _make(work: Work, out: str, what: str, threads: int | None, max_bad: int, restart: bool) -> None:
    stop = StopRequest("what is on disk stays", "this commit")
    stop.install()
    with Shown(what) as shown:
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
    show(_text(result, work.ignored, out, shown))


def _text(result: Result, ignored: tuple[str, ...], out: str, shown: Shown) -> str:
    line = f"  {schedule_line(out, result.records)}"
    if result.already:
        return f"nothing to do: {out} is complete\n{line}"
    kinds = ", ".join(f"{n} {kind}" for kind, n in result.kinds)
    lines = [f"{out}: {count(result.records, 'record')} ({kinds}){shown.rate(result.position)}"]
    if result.counts:
        lines.append(f"{out}/{REPORT} lists what was odd:")
        lines += [f"  {n} {what}" for what, n in result.counts]
    if said := transparency_of(out):
        lines.append(f"{said}; --background takes another colour")
    if result.bad:
        lines.append(f"left out: {count(result.bad, 'image')}")
    if ignored:
        lines.append(f"{ignored_text(ignored)}; {out}/{REPORT} lists them")
    return "\n".join([*lines, "in schedule.prototxt, under `data`:", line])
