"""What `import caffe` does: reads, checks what it made before it writes it, and shows the plan."""

import os
import re
import sys
from contextlib import suppress
from dataclasses import replace

from stagerun.caffe_import.convert import Wanted, convert
from stagerun.caffe_import.disk import CaffeFolder
from stagerun.caffe_import.write import check_lines, folder_lines, left_text, text_of_lines
from stagerun.cli.ending import show, tell
from stagerun.errors import ExitCode, StagerunError, UsageError, nearest
from stagerun.plan import make_plan
from stagerun.plan.render import render_text
from stagerun.snapshots import Inventory
from stagerun.spec import load
from stagerun.spec.folder import refuse_existing, write_folder
from stagerun.spec.networks import NETWORKS


def import_caffe(folder: str, out: str, root: str | None, told: Wanted) -> None:
    """`told` has sources as they are written on the command line."""
    if told.model is not None and told.model not in NETWORKS:
        hint = nearest(told.model, NETWORKS) or "`stagerun help Model.name` lists them"
        raise UsageError(f"there is no network `{told.model}`", hint)
    _refuse_mixed(told, root)
    refuse_existing(out)
    train, val = (_source(name, getattr(told, name)) for name in ("train_source", "val_source"))
    wanted = replace(told, train_source=train, val_source=val)
    converted = convert(CaffeFolder(folder, root, _count), wanted)
    out = os.path.normpath(out)
    files = folder_lines(converted, _name(out), folder)
    asked = check_lines(files, converted.found, os.path.abspath(out), out)
    write_folder(out, {name: text_of_lines(lines) for name, lines in files.items()})
    if left := left_text(converted.found):
        show(left + "\n")
    if asked:
        tell("\n\n".join(problem.render() for problem in asked))
        tell(f"\n{out} is written but for that: fill it in, then `stagerun check {out}`")
        sys.exit(ExitCode.RECIPE)
    show(render_text(make_plan(load(out), Inventory())))
    show(f"\n{out}: written; read it, then `stagerun plan {out}`")


def _refuse_mixed(told: Wanted, root: str | None) -> None:
    """UsageError for options that the others leave nothing to do, or that contradict each other."""
    if not told.nets:
        if told.workers is not None:
            raise UsageError("`--workers` with `--no-nets`", "`--batch-size` is that of all workers together")
        if root is not None:
            raise UsageError("`--root` with `--no-nets`", "no path in Caffe's files is followed; leave it out")
    for option, value, said in (
        ("--batch-size", told.batch_size, "the nets say it, and `--workers` how many such there are"),
        ("--device-batch-size", told.device_batch_size, "the nets say it"),
        ("--classes", told.classes, "the last layer of the net says it"),
        ("--train-source", told.train_source, "the net's data layers say it"),
        ("--val-source", told.val_source, "the net's data layers say it"),
    ):
        if value is not None and told.nets:
            raise UsageError(f"`{option}` without `--no-nets`: {said}", "leave it out, and change what is written")
    batch, device = told.batch_size, told.device_batch_size
    if batch and device and batch % device:
        hint = "an update is made of whole passes of the devices"
        raise UsageError(f"`--device-batch-size` {device} does not divide `--batch-size` {batch}", hint)


def _source(name: str, path: str | None) -> str | None:
    """The absolute path of an LMDB, as the written files stand in another folder than the command. UsageError."""
    if path is None:
        return None
    if not path or not path.isprintable():
        raise UsageError(f"`--{name.replace('_', '-')}` is no path: {path!r}", "give the folder that the LMDB is")
    return os.path.abspath(path)


def _name(out: str) -> str:
    """The folder's name, as far as a schedule may have it."""
    return (
        re.sub(r"[^A-Za-z0-9_.-]", "_", os.path.basename(os.path.abspath(out)), flags=re.ASCII).lstrip(".") or "caffe"
    )


def _count(path: str) -> tuple[int, int | None] | None:
    """Records of an LMDB, and the channels of the first one; None where it can't be told, which `run` will say why."""
    from stagerun.data import datum
    from stagerun.data.records import LmdbSource

    with suppress(StagerunError):
        source = LmdbSource(path, side_file=False)
        fields = datum.parse(source.get(0)[1])
        return len(source), fields.channels if fields.channels in (1, 3) and not fields.encoded else None
    return None
