"""Text of events: the tables of finished stages and ensembles, and the lines that all screens share."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from stagerun.base import events
from stagerun.base.recipe import Method, OnNan
from stagerun.base.text import MOST_LISTED, columns, count, duration, listed, percent, size, terminal
from stagerun.plan.ensembles import in_words as members_in_words

# Columns that a narrow terminal omits, in this order: `plan` has them.
_LEFT_OUT = ("augmentation", "decay", "LR first -> last", "iterations")

Before = str | float | None  # the base of a gain: a stage or ensemble by its name, or a top-1


def results_table(
    results: Sequence[events.StageFinished],
    parents: Mapping[str, Before],
    ensembles: Iterable[events.EnsembleTested] = (),
    shown: Sequence[events.StageFinished] | None = None,
    few: Collection[str] = (),
) -> str:
    """Return a line per stage of `shown` (default: all `results`), and a total if there are several.

    `gain`: top-1 against the stage or average it started from, in percentage points. `EMA top-1`: of averaged weights; `mAP`: of images
    with several labels. `few`: stages without top-5 (`Schedule.few_classes`).
    """
    top1 = {e.name: e.top1 for e in ensembles} | {r.stage: r.top1 for r in results}
    results = results if shown is None else shown

    def gain(result: events.StageFinished) -> str:
        before = parents.get(result.stage)
        before = top1.get(before) if isinstance(before, str) else before
        return "" if before is None or result.top1 is None else f"{100 * (result.top1 - before):+.2f}"

    cells: dict[str, Callable[[events.StageFinished], str]] = {
        "stage": lambda r: r.stage,
        "iterations": lambda r: str(r.iterations),
        "epochs": lambda r: f"{r.epochs:.2f}",
        "LR first -> last": lambda r: f"{r.first_lr:.4g} -> {r.last_lr:.4g}",
        "decay": lambda r: f"{r.weight_decay:g}",
        "augmentation": lambda r: r.augmentation,
        "train loss": lambda r: f"{r.loss:.4f}",
        "top-1": lambda r: percent(r.top1),
        "gain": gain,
        "top-5": lambda r: "" if r.stage in few else percent(r.top5),
        "mAP": lambda r: percent(r.mean_ap),
        "EMA top-1": lambda r: percent(r.ema_top1),
        "time": lambda r: duration(r.train_seconds),
    }
    for name in ("mAP", "EMA top-1", *(["top-5"] if few else [])):
        if not any(map(cells[name], results)):
            del cells[name]
    table = {name: [name, *map(cell, results)] for name, cell in cells.items()}
    if len(results) != 1:
        total = {
            "stage": "total",
            "iterations": str(sum(r.iterations for r in results)),
            "epochs": f"{sum(r.epochs for r in results):.2f}",
            "time": duration(sum(r.train_seconds for r in results)),
        }
        for name, column in table.items():
            column.append(total.get(name, ""))
    width = terminal()
    for name in _LEFT_OUT:
        if width is not None and sum(max(map(len, column)) + 2 for column in table.values()) - 2 > width:
            del table[name]
    rows = [*zip(*table.values(), strict=True)]
    others = [line for result in results for line in other_sets(result, few)]
    return "\n".join([*columns(rows), *others, *(_not_finite(r) for r in results if r.skips or r.rollbacks)])


def other_sets(result: events.StageFinished, few: Collection[str]) -> Iterator[str]:
    """Yield the scores of a stage on its second and further validation sets."""
    for val, top1, top5, loss, ema in result.beside:
        scores = f"{'EMA ' if ema else ''}top-1 {percent(top1)}{_top5(result.stage, top5, few)}"
        yield f"{result.stage} on {val}: {scores}, loss {'not finite' if loss is None else f'{loss:.4f}'}"


def _top5(stage: str, top5: float, few: Collection[str]) -> str:
    return "" if stage in few else f", top-5 {percent(top5)}"


def _not_finite(result: events.StageFinished) -> str:
    """Return what `on_nan` has done in a stage."""
    done = [f"{count(result.skips, 'iteration')} skipped"] if result.skips else []
    done += [count(result.rollbacks, "rollback")] if result.rollbacks else []
    return f"note: {result.stage}: {', '.join(done)}, since loss or gradients were not finite"


def ensembles_table(results: Sequence[events.EnsembleTested], few: Collection[str] = ()) -> str:
    """Return a line per ensemble. Gains in top-1, in percentage points, against the best member and the mean of the members."""
    if not results:
        return ""
    rows: list[Sequence[str]] = [
        ("ensemble", "members", "rule", "top-1", "against the best", "against the mean", "top-5", "loss")
    ]
    for r in results:
        rows.append(
            (
                r.name,
                ", ".join(members_in_words(r.members)),
                f"{r.rule}, {r.shape}" if r.shape else r.rule,
                percent(r.top1),
                f"{100 * r.gain:+.2f} ({r.best})",
                f"{100 * r.gain_over_mean:+.2f}",
                "" if r.stages & {*few} else percent(r.top5),
                "" if r.loss is None else f"{r.loss:.4f}",
            )
        )
    if not any(row[-2] for row in rows[1:]):
        rows = [(*row[:-2], row[-1]) for row in rows]
    return "\n".join(columns(rows))


def warning_of(event: events.Event) -> str | None:
    """Return an event's warning, if it is one."""
    match event:
        case events.Note(text=text, warning=True):
            return text
        case events.NotFinite():
            return failed_line(event)
        case events.SnapshotFailed():
            return f"no snapshot of {event.stage} at {event.iter}: {event.message}"
    return None


def line_of(event: events.Event, few: Collection[str] = ()) -> str | None:
    """Return the line of an event that needs no earlier event; None without one. `few`: as in `results_table`."""
    match event:
        case events.RunStarted():
            return (
                f"{event.schedule}: {event.iterations_left} of {event.iterations} iterations to do, "
                f"{count(event.workers, 'worker')} on {event.device}, {count(event.threads, 'thread')} each, output in {event.out}"
            )
        case events.Note():
            return f"note: {event.text}"
        case events.CompressionChosen():
            return _choice_text(event)
        case events.PieceStarted():
            of = f"iterations {event.iter} to {event.until}, for {', '.join(event.children)}, from {event.start}"
            return f"{event.stage} again: {of}"
        case events.Tested() | events.TestedBeside():
            which = ("EMA test" if event.ema else "test") + (f" on {event.val}:" if event.val else "")
            mean_ap = "" if event.mean_ap is None else f", mAP {percent(event.mean_ap)}"
            return (
                f"{event.stage} {event.iter}: {which} top-1 {percent(event.top1)}{_top5(event.stage, event.top5, few)}{mean_ap}, "
                f"loss {event.loss:.4f} on {event.images} images in {duration(event.seconds)}"
            )
        case events.SnapshotWritten():
            return f"{event.stage} {event.iter}: snapshot {event.name}, {size(event.bytes)} in {event.seconds:.2f} s"
        case events.EnsembleTested():
            of = count(len(event.members), "snapshot" if any("@" in member for member in event.members) else "stage")
            scores = _top5(next(iter(event.stages & {*few}), ""), event.top5, few)
            scores += "" if event.loss is None else f", loss {event.loss:.4f}"
            return (
                f"ensemble {event.name}: {event.rule} of {of}, top-1 {percent(event.top1)} "
                f"({100 * event.gain:+.2f} against {event.best}){scores} on {event.images} images in "
                f"{duration(event.seconds)}"
            )
        case events.Stopped():
            return (
                f"stopped in {event.stage} after iteration {event.iter} ({event.reason}), everything is saved: "
                "run the same command again to resume"
            )
    return None


def stage_line(event: events.StageStarted, stages: int) -> str:
    start = "its .solverstate" if 0 < event.iter == event.begins else event.weights or event.start
    return (
        f"stage {event.number}/{stages} {event.stage}: iterations {event.iter} to {event.max_iter}, batch "
        f"{event.batch_size}, from {start}"
    )


_MOST_KEYS = 3


def failed_line(event: events.NotFinite) -> str:
    """Return what was not finite, the reaction, and the first images; log.jsonl names all."""
    keys = ", ".join(f"`{key}`" for key in event.keys[:_MOST_KEYS])
    more = f" and {event.images - _MOST_KEYS} more" if event.images > _MOST_KEYS else ""
    images = f"; its images: {keys}{more}" if keys else ""
    done = "the run ends"
    if event.done == OnNan.SKIP.value:
        done = f"skipped, {event.number} of at most {event.most} in a row"
    elif event.done == OnNan.ROLLBACK.value and event.back_to is not None:
        left_out = count((event.iter + 1 - event.back_to) * event.images, "image")
        done = (
            f"back to {event.back_to} ({event.snapshot}), from where on {left_out} are left out; rollback "
            f"{event.number} of at most {event.most}"
        )
    return f"{event.stage}: {event.what} at iteration {event.iter}, LR {event.lr:.4g}: {done}{images}"


def left_out(not_chosen: Sequence[str]) -> str:
    """Return the stages that were not chosen, for the end of the last line."""
    return f"; not chosen, and still to be trained: {listed(not_chosen, MOST_LISTED)}" if not_chosen else ""


def finished_line(event: events.RunFinished) -> str:
    """Return the last line of a finished run, with the stages that it left out."""
    left = left_out(event.not_chosen)
    if event.trained:
        return f"done in {duration(event.seconds)}{left}"
    return f"nothing to do: every stage{' that was chosen' if left else ''} is done{left}"


def _method(name: str) -> str:
    return "dense" if name == Method.NONE.value else name


def _choice_text(event: events.CompressionChosen) -> str:
    """Return a line on how a stage's gradients are compressed, with a table if methods differ or were tried."""
    head = f"{event.stage}: gradients {event.words}: {event.why}"
    if len(event.methods) == 1 and not event.tried:
        return head
    rows: list[Sequence[str]] = [("method", "tensors", "numbers", "which")]
    rows += [(_method(method), str(tensors), str(size), which) for method, tensors, size, which in event.methods]
    tried: list[Sequence[str]] = [("tried", "ms per iteration")]
    tried += [(name, f"{1000 * seconds:.1f}") for name, seconds in event.tried]
    return "\n".join([head, "", *columns(rows, 2), "", *(columns(tried, 2) if event.tried else []), ""])
