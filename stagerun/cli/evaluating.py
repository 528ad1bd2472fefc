"""`stagerun eval`: what is printed. Torch is imported once it is clear what to evaluate."""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagerun.cli.choosing import Chosen
from stagerun.cli.ending import tell
from stagerun.errors import StagerunError
from stagerun.world import World, default_threads

if TYPE_CHECKING:
    from stagerun.engine.images import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    data: str | None
    views: str
    device_batch: int | None
    threads: int | None
    ema: bool
    as_json: bool


def evaluate_all(chosen: Chosen, options: EvalOptions) -> None:
    """One line for each snapshot, as soon as it is known; with --json one object at the end.

    Of several, one that can't be evaluated keeps nobody from the numbers of the others: what is wrong with it is shown, and
    the command ends with the code of the first such error.
    """
    import torch

    from stagerun.engine.device import choose_device

    torch.set_num_threads(options.threads or default_threads(1))
    device = choose_device(World())
    rows: list[dict[str, Any]] = []
    errors: dict[str, StagerunError] = {}  # by snapshot
    for folder in chosen.folders:
        try:
            row = _evaluate(folder, chosen, options, device)
        except StagerunError as error:
            if error.render() not in [e.render() for e in errors.values()]:  # images that are gone are gone for all
                tell(error.render())
            errors[folder.name] = error
            continue
        rows.append(row)
        if not options.as_json:
            click.echo(_line(row))
    if options.as_json and rows:
        failed = [{"snapshot": name, "error": error.message} for name, error in errors.items()]
        click.echo(json.dumps({"evaluations": rows, "failed": failed}, indent=1))
    if errors:
        sys.exit(next(iter(errors.values())).exit_code)


def _evaluate(folder: Path, chosen: Chosen, options: EvalOptions, device: Any) -> dict[str, Any]:
    from stagerun.engine.views import Views
    from stagerun.runner.evaluating import Wanted, score, use_schedule
    from stagerun.runner.stored import open_snapshot

    begun = time.monotonic()
    stored = open_snapshot(folder)
    stage = chosen.stages.get(folder.name, stored.ref.stage)
    if chosen.schedule is not None:
        stored = use_schedule(stored, chosen.schedule, stage)
    val = stored.schedule.data.val
    wanted = Wanted(views=Views(options.views), data=options.data, batch=options.device_batch, ema=options.ema)
    found = score(stored, wanted, device, lambda batches, n: _shown(batches, n, stored.ref.name))
    return {
        "snapshot": stored.ref.name,
        "id": stored.ref.id,
        "stage": stage,
        "iter": stored.ref.iter,
        "data": options.data if options.data is not None else val.path if val else "",
        "views": options.views,
        "ema": options.ema,
        **asdict(found),
        "seconds": time.monotonic() - begun,
    }


def _shown(batches: "Iterable[Batch]", count: int, name: str) -> "Iterable[Batch]":
    """The batches, and on a terminal a bar while they are computed."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        yield from bar.track(batches, total=count, description=name)


def _line(row: dict[str, Any]) -> str:
    from stagerun.text import duration

    how = {"one": "", "flip": ", image and mirror", "10crop": ", 10 crops"}[row["views"]]
    weights = ", averaged weights" if row["ema"] else ""
    return (
        f"{row['snapshot']}{weights}{how}: top-1 {100 * row['top1']:.2f} %, top-5 {100 * row['top5']:.2f} %, "
        f"loss {row['loss']:.4f} on {row['images']} images in {duration(row['seconds'])}"
    )
