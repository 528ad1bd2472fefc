"""`stagerun eval`: the numbers that trained networks reach. Torch is imported once the arguments hold."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from stagerun.base.errors import StagerunError, UsageError
from stagerun.base.text import columns, duration
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, flag, option
from stagerun.command.shared import Json
from stagerun.tools.weights import Chosen, Forward, Where, choose

if TYPE_CHECKING:
    from stagerun.tools.weights.snapshot import Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    data: str | None = option("--data LMDB", "Evaluate on all images of LMDB, instead of the recipe's.")
    weights: str | None = option(
        "--weights FILE", "Evaluate these weights, in the network of NET or of a stage of DIR."
    )
    forward: Forward
    per_class: bool = flag(
        "--per-class", "Also the accuracy of each class, and what it is taken for; --json has all counts."
    )
    as_json: Json = False


@command("eval")
def evaluate(what: str = argument("SNAPSHOT|DIR|NET"), *, where: Where, options: EvalOptions) -> None:
    """Evaluates a snapshot: top-1, top-5, balanced accuracy, macro F1 and loss over the validation images.

    SNAPSHOT is a snapshot's directory, or with --out the name of a snapshot, of a stage (`trunk`; `trunk@best`, `trunk@ema`) or of an
    ensemble; its recipe names images and transform. DIR, a schedule's folder or an output folder, stands for the end of every finished
    stage, or with --stage for one stage or ensemble; the schedule names images and transform.

    With --views the softmax outputs of the views are averaged, and the loss is the average's. The ten crops are taken from the image
    as it is before the centre crop. Without views, and with as many threads and the same device batch, the numbers are `run`'s; a stage
    with `compile` may differ in the last digits. Rectangles don't depend on --device-batch: they belong to batches of test_batch_size.

    With --weights a .caffemodel, .safetensors or .pth is evaluated without a run, as `caffe test` does: in the network of DIR's --stage, or
    of NET, a prototxt of Caffe's, whose data layers name images and transform.
    """
    if options.weights is not None:
        if where.out is not None or options.forward.ema:
            raise UsageError("--weights with --out or --ema: a file of weights is in no output folder", "leave it out")
        from stagerun.tools.weights.untrained import stored_weights

        stored = stored_weights(what, where.overrides, where.stage, options.weights, options.data)
        evaluations = _shown([stored], Chosen(()), options)
        return show(json.dumps({"evaluations": evaluations, "failed": []}, indent=1)) if options.as_json else None
    options = replace(options, forward=replace(options.forward, ema=options.forward.ema or where.means_ema(what)))
    networks, schedule = choose(what, where)

    from stagerun.tools.weights.snapshot import open_chosen

    rows: list[dict[str, Any]] = []
    errors: dict[str, StagerunError] = {}  # by snapshot; a failure doesn't hide the others' numbers
    for chosen in networks:
        try:
            rows += _shown(open_chosen(chosen, schedule, options.forward.trust_code), chosen, options)
        except StagerunError as error:
            # The same images may be missing for all.
            if error.render() not in [other.render() for other in errors.values()]:
                tell(error.render())
            errors[chosen.ensemble or chosen.folders[0].name] = error
    if options.as_json and rows:
        failed = [{"snapshot": name, "error": error.message} for name, error in errors.items()]
        show(json.dumps({"evaluations": rows, "failed": failed}, indent=1))
    if errors:
        sys.exit(next(iter(errors.values())).exit_code)


def _shown(members: Sequence["Stored"], chosen: Chosen, options: EvalOptions) -> list[dict[str, Any]]:
    """Return an object for JSON for each validation set, or for --data alone; without --json print them, once all are evaluated."""
    evaluated = list(_evaluated(members, chosen, options))
    if not options.as_json:
        show("\n".join(line for _, lines in evaluated for line in lines))
    return [row for row, _ in evaluated]


def _evaluated(
    members: Sequence["Stored"], chosen: Chosen, options: EvalOptions
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    from stagerun.tools.data.records import classes_of
    from stagerun.tools.weights.scoring import Network, sets_of

    network, stored = None, members[0]
    for val, records in sets_of(stored, options.data):
        started = time.monotonic()
        network = network or Network(members, options.forward, chosen.rule)
        result, counts = network.score(records, val, options.per_class)
        row = {
            "ensemble": chosen.ensemble,
            "snapshot": ", ".join(one.ref.name for one in members),
            "id": ", ".join(one.ref.id for one in members),
            "stage": stored.stage.name,
            "iter": stored.ref.iter,
            "data": val.path if val else options.data,
            "val": val.name if val else "",
            "views": options.forward.views,
            "ema": options.forward.ema,
            **asdict(result),
            "mean_ap": result.mean_ap,
            "seconds": time.monotonic() - started,
        }
        classes = stored.stage.model.num_classes
        lines = [_line(row, classes)]
        if options.per_class:
            names = dict(enumerate(classes_of(records)))
            if result.class_ap:
                shown = ("no image" if ap is None else f"average precision {100 * ap:.2f} %" for ap in result.class_ap)
                lines += [f"  {names.get(n) or f'class {n}'}: {text}" for n, text in enumerate(shown)]
            else:
                row["classes"] = [_class(n, label, names.get(label, "")) for label, n in enumerate(counts.tolist())]
                lines += _table(row["classes"])
        yield row, lines


def _line(row: dict[str, Any], classes: int) -> str:
    """`NAME: top-1 91.20 %, ...`, without top-5 for a network of up to five classes."""
    views = {"one": "", "flip": ", image and mirror", "10crop": ", 10 crops"}[row["views"]]
    kind = (", averaged weights" if row["ema"] else "") + (f", on {row['val']}" if row["val"] else "")
    top5 = f"top-5 {100 * row['top5']:.2f} %, " if classes > 5 else ""
    mean_ap = f"mAP {100 * row['mean_ap']:.2f} %, " if row["class_ap"] else ""
    f1, balanced = row["macro_f1"], row["balanced_accuracy"]
    balanced = "" if f1 is None or balanced is None else f"balanced {100 * balanced:.2f} %, macro F1 {f1:.4f}, "
    return (
        f"{row['ensemble'] or row['snapshot']}{kind}{views}: top-1 {100 * row['top1']:.2f} %, {top5}{mean_ap}{balanced}"
        f"loss {row['loss']:.4f} on {row['images']} images in {duration(row['seconds'])}"
    )


def _class(row: list[int], label: int, name: str) -> dict[str, Any]:
    """Return a class for JSON. `row`: the images by answer; `answers` without zeros."""
    images = sum(row)
    answers = {str(answer): n for answer, n in enumerate(row) if n}
    return {
        "label": label,
        "name": name,
        "images": images,
        "top1": row[label] / images if images else None,
        "answers": answers,
    }


def _table(classes: Sequence[dict[str, Any]]) -> list[str]:
    """Return the accuracy of each class with its commonest mistakes."""
    cells = [("  class", "images", "top-1", "taken for")]
    for one in classes:
        images = one["images"]
        wrong = [(n, int(answer)) for answer, n in one["answers"].items() if int(answer) != one["label"]]
        common = sorted(wrong, key=lambda pair: -pair[0])[:3]
        taken = (f"{classes[answer]['name'] or f'class {answer}'} {100 * n / images:.1f} %" for n, answer in common)
        top1 = f"{100 * one['top1']:.2f} %" if images else "-"
        cells.append((f"  {one['label']} {one['name']}".rstrip(), str(images), top1, ", ".join(taken)))
    return columns(cells)
