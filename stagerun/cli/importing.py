"""What `import caffe` does: reads, checks what it made before it writes it, and shows the plan."""

import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass

import click

from stagerun import caffe_import
from stagerun.cli.ending import tell
from stagerun.errors import ExitCode, StagerunError, UsageError, nearest
from stagerun.plan import make_plan
from stagerun.plan.render import render_text
from stagerun.snapshots import Inventory
from stagerun.spec import load
from stagerun.spec.networks import NETWORKS


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """The arguments of the command."""

    folder: str
    out: str
    order: tuple[str, ...]
    workers: int | None
    root: str | None
    model: str | None
    images: int | None
    val_images: int | None
    no_nets: bool
    batch_size: int | None
    device_batch_size: int | None
    classes: int | None
    train_source: str | None
    val_source: str | None


def import_caffe(options: ImportOptions) -> None:
    if options.model is not None and options.model not in NETWORKS:
        hint = nearest(options.model, NETWORKS) or "`stagerun help Model.name` lists them"
        raise UsageError(f"there is no network `{options.model}`", hint)
    _refuse_mixed(options)
    caffe_import.refuse_existing(options.out)
    folder = caffe_import.CaffeFolder(options.folder, options.root, _count)
    wanted = caffe_import.Wanted(
        order=options.order,
        workers=options.workers,
        model=options.model,
        images=options.images,
        val_images=options.val_images,
        nets=not options.no_nets,
        batch_size=options.batch_size,
        device_batch_size=options.device_batch_size,
        classes=options.classes,
        train_source=_source("--train-source", options.train_source),
        val_source=_source("--val-source", options.val_source),
    )
    converted = caffe_import.convert(folder, wanted)
    out = os.path.normpath(options.out)
    files = caffe_import.folder_lines(converted, _name(out), options.folder)
    asked = caffe_import.check_lines(files, converted.found, os.path.abspath(out), out)
    caffe_import.write_folder(out, {name: caffe_import.text_of_lines(lines) for name, lines in files.items()})
    if left := caffe_import.left_text(converted.found):
        click.echo(left + "\n")
    if asked:
        tell("\n\n".join(problem.render() for problem in asked))
        tell(f"\n{out} is written but for that: fill it in, then `stagerun check {out}`")
        sys.exit(ExitCode.RECIPE)
    click.echo(render_text(make_plan(load(out), Inventory())))
    click.echo(f"\n{out}: written; read it, then `stagerun plan {out}`")


def _refuse_mixed(options: ImportOptions) -> None:
    """UsageError for options that the others leave nothing to do, or that contradict each other."""
    if options.no_nets:
        if options.workers is not None:
            raise UsageError("`--workers` with `--no-nets`", "`--batch-size` is that of all workers together")
        if options.root is not None:
            raise UsageError("`--root` with `--no-nets`", "no path in Caffe's files is followed; leave it out")
    for option, value, said in (
        ("--batch-size", options.batch_size, "the nets say it, and `--workers` how many such there are"),
        ("--device-batch-size", options.device_batch_size, "the nets say it"),
        ("--classes", options.classes, "the last layer of the net says it"),
        ("--train-source", options.train_source, "the net's data layers say it"),
        ("--val-source", options.val_source, "the net's data layers say it"),
    ):
        if value is not None and not options.no_nets:
            raise UsageError(f"`{option}` without `--no-nets`: {said}", "leave it out, and change what is written")
    batch, device = options.batch_size, options.device_batch_size
    if batch and device and batch % device:
        hint = "an update is made of whole passes of the devices"
        raise UsageError(f"`--device-batch-size` {device} does not divide `--batch-size` {batch}", hint)


def _source(option: str, path: str | None) -> str | None:
    """The absolute path of an LMDB, as the written files stand in another folder than the command. UsageError."""
    if path is None:
        return None
    if not path or not path.isprintable():
        raise UsageError(f"`{option}` is no path: {path!r}", "give the folder that the LMDB is")
    return os.path.abspath(path)


def _name(out: str) -> str:
    """The folder's name, as far as a schedule may have it."""
    return (
        re.sub(r"[^A-Za-z0-9_.-]", "_", os.path.basename(os.path.abspath(out)), flags=re.ASCII).lstrip(".") or "caffe"
    )


def _count(path: str) -> tuple[int, int | None] | None:
    """Records of an LMDB, and the channels of the first one; None where it can't be told, which `run` will say why."""
    from stagerun.data import datum
    from stagerun.data.lmdb_source import LmdbSource

    with suppress(StagerunError):
        source = LmdbSource(path, side_file=False)
        fields = datum.parse(source.get(0)[1])
        return len(source), fields.channels if fields.channels in (1, 3) and not fields.encoded else None
    return None
