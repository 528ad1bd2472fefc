"""OUT/log.jsonl, back to events. Reads only, takes no lock: a run may be appending meanwhile."""

import math
import os
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from stagerun.errors import PermissionDenied, StorageError, UsageError
from stagerun.events import Event, Iterated
from stagerun.logged import event_of
from stagerun.report.thin import Updates

LOG = "log.jsonl"
_BLOCK = 1 << 20  # bytes read at a time

# An Iterated as `jsonl` writes it, which nearly all lines are: a fifth of what a JSON parser takes. What is written in any other
# way is left to that parser, as are all other lines.
_NUMBER = r"-?[0-9][-+.0-9e]{0,30}"
_LINE = re.compile(
    rf'\{{"time": ({_NUMBER}), "event": "Iterated", "stage": "([ !#-\[\]-~]+)", "iter": ([0-9]{{1,15}}), "epoch": ({_NUMBER}), '
    rf'"lr": ({_NUMBER}), "momentum": {_NUMBER}, "weight_decay": ({_NUMBER}), "loss": ({_NUMBER}), "images": ([0-9]{{1,15}}), '
    rf'"seconds": ({_NUMBER})(?:, "update_seconds": {_NUMBER})?\}}\n|([^\n]*)\n'
)


@dataclass(slots=True)
class Log:
    """(time, event) in the order of writing, to be read once, consecutive `Iterated` of a stage together as `Updates`; and how many
    lines can't be read, and how many are of an event that this version doesn't know, of those that were read so far."""

    events: Iterable[tuple[float, Event | Updates]]
    damaged: int = 0
    unknown: int = 0


def read_log(out: Path) -> Log:
    """The events of an output folder. A line that is not what a run writes is counted: the last one of a killed run may
    be cut short. Reading them raises UsageError if there is no log, PermissionDenied or StorageError if it can't be read.
    """
    log = Log(())
    log.events = _events(out, log)
    return log


def _events(out: Path, log: Log) -> Iterator[tuple[float, Event | Updates]]:
    path, found = out / LOG, False
    try:
        with open(path, "rb") as file:
            for block in _blocks(file):
                for event in _parsed(block, log):
                    found = True
                    yield event
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(*_no_log(out)) from error
    except PermissionError as error:
        raise PermissionDenied(f"{path} may not be read", "ask its owner for permission") from error
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror}", "check the disk") from error
    if not found:
        raise UsageError(f"{path} holds no event of a run", "wait until the run has begun, or name another folder")


def _blocks(file: BinaryIO) -> Iterator[str]:
    """Whole lines, a character for each byte."""
    rest = b""
    while data := file.read(max(_BLOCK, len(rest))):  # a line without an end is not copied more than once or twice
        whole, end, rest = (rest + data).rpartition(b"\n")
        yield (whole + end).decode("latin-1")
    if rest:
        yield rest.decode("latin-1") + "\n"


def _parsed(block: str, log: Log) -> Iterator[tuple[float, Event | Updates]]:
    groups = groupby(_LINE.findall(block), itemgetter(1))
    try:
        made = [_updates(stage, rows) if stage else [row[-1] for row in rows] for stage, rows in groups]
    except ValueError:  # what looked like a number is none
        made = [block.split("\n")]
    for group in made:
        if isinstance(group, Updates):
            yield group.time[0], group
        else:
            yield from _others(group, log)


def _updates(stage: str, rows: Iterable[tuple[str, ...]]) -> Updates:
    """ValueError for what is not a finite number."""
    times, _, iters, epochs, rates, decays, losses, images, seconds, _ = zip(*rows, strict=True)
    floats = [array("d", map(float, column)) for column in (times, epochs, rates, decays, losses, seconds)]
    if not all(math.isfinite(sum(column)) for column in floats):
        raise ValueError("not a finite number")
    time, epoch, lr, decay, loss, long = floats
    whole = [array("q", map(int, column)) for column in (iters, images)]
    return Updates(stage, time, whole[0], epoch, lr, decay, loss, whole[1], long)


def _others(lines: Iterable[str], log: Log) -> Iterator[tuple[float, Event]]:
    for line in lines:
        if not line.strip():
            continue
        try:
            event = event_of(line.encode("latin-1"))
            if event and isinstance(event[1], Iterated) and max(event[1].iter, event[1].images) >> 63:
                raise ValueError("more than 64 bits")
        except ValueError:
            log.damaged += 1
            continue
        if event is None:
            log.unknown += 1
        else:
            yield event


def is_schedule(folder: Path) -> bool:
    return os.path.isfile(folder / "schedule.prototxt")


def _no_log(out: Path) -> tuple[str, str]:
    """Message and hint."""
    if os.path.isfile(out):
        return (
            f"{out} is a file",
            f"name the output folder: {out.parent}" if out.name == LOG else "name an output folder",
        )
    if not os.path.exists(out):
        return f"there is no folder {out}", "name the output folder of a run: ./out/NAME, or what --out named"
    if is_schedule(out):
        return (
            f"{out} is the folder of a schedule",
            "name the output folder of its run: ./out/NAME, or what --out named",
        )
    return f"{out} has no {LOG}", "name the output folder of a run that has begun: ./out/NAME, or what --out named"
