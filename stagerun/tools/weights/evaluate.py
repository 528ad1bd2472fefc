"""`stagerun eval`: evaluates snapshots and prints the numbers. Torch is imported once it is clear what to evaluate."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stagerun.base.errors import DataError, StagerunError, UsageError
from stagerun.base.text import duration
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, flag, option
from stagerun.command.shared import Json, TrustCode
from stagerun.store.layout import snapshots_folder
from stagerun.system.image_folder import is_class_folder, small
from stagerun.system.imports import import_of, is_there
from stagerun.system.world import World, default_threads
from stagerun.tools.weights.selection import SETS, Chosen, Ema, ForwardBatch, OwnThreads, Views, choose, ensemble_of

if TYPE_CHECKING:
    from stagerun.engine.images import Batch
    from stagerun.tools.weights.stored import Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    data: str | None = option("--data LMDB", "Evaluate on these images, all of them, in place of the recipe's.")
    weights: str | None = option(
        "--weights FILE", "Weights of a net (NET.prototxt), or of a stage of DIR, that no run here has trained."
    )
    iterations: int | None = option(
        "--iterations N", "With --weights: the first N test batches.", type=click.IntRange(1)
    )
    views: Views = "one"
    device_batch: ForwardBatch = None
    threads: OwnThreads = None
    ema: Ema = False
    per_class: bool = flag(
        "--per-class", "Also the accuracy of each class, and what it is taken for; --json has all counts."
    )
    trust_code: TrustCode = False
    as_json: Json = False


@command("eval")
def evaluate(
    what: str = argument("SNAPSHOT|DIR|NET"),
    out: str | None = option(
        "--out FOLDER", "Output folder of DIR, or of a SNAPSHOT's name.  [default of DIR: ./out/NAME]"
    ),
    stage: str | None = option("--stage STAGE", "With DIR: only the end of this stage."),
    overrides: tuple[str, ...] = option(
        "--set STAGE.FIELD=VALUE", "Change a field of DIR for this command.", default=()
    ),
    *,
    options: EvalOptions,
) -> None:
    """Evaluates a snapshot: top-1, top-5 and loss over the validation images.

    SNAPSHOT is a snapshot's directory, or its name with --out, or that of a stage, or of an ensemble that averages weights. Images and
    transform are those of the recipe inside of it. With DIR, a schedule's folder or an output folder, the end of every finished stage is
    evaluated; images and transform are then those that the schedule names now.

    With --views the softmax outputs of the views are averaged, and the loss is that of the average. The ten crops are
    taken from the image as it is before the centre crop. Without views, with as many threads and the same device batch,
    the numbers are those that `run` printed; a stage with `compile` may differ in the last digits. Rectangles are those of
    batches of test_batch_size with any --device-batch.

    With --weights a file of weights (.caffemodel, .safetensors, .pth) is evaluated, as `caffe test` does: the argument is a net's
    NET.prototxt, whose data layer of TEST says images and transform, or DIR, of which --stage says them.

    With --per-class the names of classes are those of the side file of the images.
    """
    if options.weights is not None:
        if out is not None or options.ema:
            raise UsageError("--weights with --out or --ema: a file of weights is in no output folder", "leave it out")
        evaluate_weights(what, overrides, stage, options)
        return
    if options.iterations is not None:
        raise UsageError("--iterations without --weights", "a snapshot is evaluated on all images")
    chosen = choose(what, overrides, out, stage)
    for note in chosen.notes:
        tell(f"note: {note}")
    evaluate_all(chosen, options)


def evaluate_weights(what: str, overrides: Sequence[str], stage: str | None, options: EvalOptions) -> None:
    """As `caffe test --model --weights`. UsageError, RecipeError, DataError."""
    from stagerun.tools.weights.untrained import stored_weights

    assert options.weights is not None
    device = _device(options)
    stored = stored_weights(what, overrides, stage, options.weights, options.data)
    row, lines = _on_set(stored, stored.stage.name, None, 0, options, device)
    show(json.dumps({"evaluations": [row], "failed": []}, indent=1) if options.as_json else "\n".join(lines))


def _device(options: EvalOptions) -> Any:
    import torch

    from stagerun.engine.device import choose_device

    torch.set_num_threads(options.threads or default_threads(1))
    return choose_device(World())


def evaluate_all(chosen: Chosen, options: EvalOptions) -> None:
    """One line for each snapshot, as soon as it is known; with --json one object at the end.

    A snapshot that can't be evaluated doesn't hide the numbers of the others: its error is shown, and the command ends with
    the code of the first such error.
    """
    device = _device(options)
    rows: list[dict[str, Any]] = []
    errors: dict[str, StagerunError] = {}  # by snapshot
    for folder in chosen.folders:
        try:
            found = _evaluate(folder, chosen, options, device)
        except StagerunError as error:
            if error.render() not in [e.render() for e in errors.values()]:  # images that are gone are gone for all
                tell(error.render())
            errors[folder.name] = error
            continue
        for row, lines in found:
            rows.append(row)
            if not options.as_json:
                show("\n".join(lines))
    if options.as_json and rows:
        failed = [{"snapshot": name, "error": error.message} for name, error in errors.items()]
        show(json.dumps({"evaluations": rows, "failed": failed}, indent=1))
    if errors:
        sys.exit(next(iter(errors.values())).exit_code)


def _evaluate(
    folder: Path, chosen: Chosen, options: EvalOptions, device: Any
) -> list[tuple[dict[str, Any], list[str]]]:
    """An object for JSON, and the lines for people, of each validation set; of --data alone where it is given."""
    from stagerun.tools.weights.scoring import use_schedule
    from stagerun.tools.weights.stored import Trust, open_snapshot

    named = chosen.stages.get(folder.name, "")
    stored = open_snapshot(folder, Trust(options.trust_code, chosen.schedule, named))
    stage = named or stored.ref.stage
    if chosen.schedule is not None:
        as_run, stored = stored, use_schedule(stored, chosen.schedule, stage)
        if changes := _changes(as_run, stored):
            tell(
                f"note: {stage} is evaluated as the schedule says now, not as in the run: {', '.join(changes)}; {SETS}"
            )
    if options.data is None:
        stored = _with_images(stored, folder, chosen.schedule.data.scratch if chosen.schedule is not None else None)
    sets = 1 if options.data is not None else max(1, len(stored.stage.data.val))
    return [_on_set(stored, stage, ensemble_of(folder), number, options, device) for number in range(sets)]


def _with_images(stored: "Stored", folder: Path, scratch: str | None) -> "Stored":
    """Imports the validation sets that are folders of class folders, where their LMDBs are gone, or files have another time than in the
    run. `folder`: of the snapshot. `scratch`: of a schedule that the user names; nothing is written to the recipe's. DataError for one that
    can't be used, or has no place."""
    from stagerun.data.importing.first_use import have
    from stagerun.tools.data.progress import Shown

    out, schedule = folder.resolve().parent.parent, stored.schedule
    imports = dict(schedule.imports)
    for path in (val.path for val in stored.stage.data.val if is_class_folder(val.path)):
        run, own = (import_of(small(path), place, out) for place in (schedule.data.scratch, scratch))
        made = imports[path] = run if is_there(run) else own
        if is_there(made):
            continue
        if not made.in_scratch and snapshots_folder(out) != folder.resolve().parent:
            text = f"{path}: a folder of class folders, which is not imported, and the snapshot is in no output folder"
            raise DataError(text, f"`stagerun data import {path} LMDB`, then name it with --data")
        with Shown("import") as shown:
            have(path, made, schedule.data, lambda: False, lambda done: shown.progress(done.done, done.total)).close()
    return replace(stored, schedule=replace(schedule, imports=imports))


def _on_set(
    stored: "Stored", stage: str, ensemble: str | None, number: int, options: EvalOptions, device: Any
) -> tuple[dict[str, Any], list[str]]:
    import torch

    from stagerun.engine import evaluate as evaluation
    from stagerun.tools.weights import confusion
    from stagerun.tools.weights.scoring import Wanted, score

    started = time.monotonic()
    views = evaluation.Views(options.views)
    most = options.iterations and options.iterations * stored.stage.solver.test_batch_size
    wanted = Wanted(views=views, data=options.data, val=number, batch=options.device_batch, ema=options.ema, most=most)
    parts: list[tuple[Any, Any]] = []

    def answered(labels: Any, logits: Any) -> None:
        """Tensors of torch's. Answers are those that top-1 counts."""
        parts.append((labels.cpu(), evaluation.best_of(logits)[:, 0].cpu()))

    name = ensemble or stored.ref.name
    found = score(
        stored, wanted, device, lambda batches, n: _shown(batches, n, name), answered if options.per_class else None
    )
    vals = stored.stage.data.val if options.data is None else ()
    data = vals[number].path if vals else options.data or ""
    row = {
        **({"ensemble": ensemble} if ensemble else {}),
        "snapshot": stored.ref.name,
        "id": stored.ref.id,
        "stage": stage,
        "iter": stored.ref.iter,
        "data": data,
        **({"val": vals[number].name} if vals and vals[number].name else {}),
        "views": options.views,
        "ema": options.ema,
        **{name: value for name, value in asdict(found).items() if name != "class_ap"},
        **({"mean_ap": found.mean_ap, "class_ap": found.class_ap} if found.class_ap else {}),
        "seconds": time.monotonic() - started,
    }
    classes = stored.stage.model.num_classes
    line = _line(row, classes)
    if not options.per_class:
        return row, [line]
    if found.class_ap:
        return row, [line, *_precision(data, found.class_ap)]
    lmdb = stored.schedule.lmdb(vals[number]) if vals else data
    labels, best = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
    counts = confusion.confusion_of(labels, best, classes, _names(lmdb))
    return row | {"classes": counts.rows()}, [line, *confusion.lines(counts)]


def _precision(data: str, found: Sequence[float | None]) -> list[str]:
    """The average precision of each class, of images with several labels."""
    names = dict(enumerate(_names(data)))
    shown = ["no image" if ap is None else f"average precision {100 * ap:.2f} %" for ap in found]
    return [f"  {names.get(c, f'class {c}')}: {text}" for c, text in enumerate(shown)]


def _changes(as_run: "Stored", now: "Stored") -> list[str]:
    """In what an evaluation differs from the run's, of the snapshot's recipe and with the schedule of today."""
    from stagerun.language.values import differing, text

    found = [*differing(as_run.stage.solver, now.stage.solver, "")]
    images = differing(as_run.stage.data, now.stage.data, "data")
    found += [one for one in images if one[0].startswith("data.val")]
    # Where the images are may differ between machines.
    return [
        f"{key.lstrip('.')} {text(was)} -> {text(new)}"
        for key, was, new in found
        if not key.endswith((".path", ".source"))
    ]


def _names(data: str) -> Sequence[str]:
    """The classes by label, as the side file of the images has them; () without one."""
    from stagerun.data.records import LmdbSource
    from stagerun.tools.data.pictures import classes_of

    return classes_of(LmdbSource(data)) or ()


def _shown(batches: "Iterable[Batch]", count: int, name: str) -> "Iterable[Batch]":
    """The batches, and on a terminal a bar while they are computed."""
    from rich.progress import Progress

    from stagerun.command.terminal import Terminal

    console = Terminal(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        yield from bar.track(batches, total=count, description=name)


def _line(row: dict[str, Any], classes: int) -> str:
    """Without top-5 where a network has no more than five classes to choose from."""
    how = {"one": "", "flip": ", image and mirror", "10crop": ", 10 crops"}[row["views"]]
    weights = ", averaged weights" if row["ema"] else ""
    weights += f", on {row['val']}" if "val" in row else ""
    top5 = f"top-5 {100 * row['top5']:.2f} %, " if classes > 5 else ""
    top5 += f"mAP {100 * row['mean_ap']:.2f} %, " if "mean_ap" in row else ""
    return (
        f"{row.get('ensemble', row['snapshot'])}{weights}{how}: top-1 {100 * row['top1']:.2f} %, {top5}"
        f"loss {row['loss']:.4f} on {row['images']} images in {duration(row['seconds'])}"
    )
