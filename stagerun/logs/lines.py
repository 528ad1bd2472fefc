"""Events in words: the tables of finished stages and of ensembles, and the lines that all screens share."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from stagerun.base.events import (
    CompressionChosen,
    EnsembleTested,
    Event,
    Note,
    NotFinite,
    PieceStarted,
    RunFinished,
    SnapshotFailed,
    StageFinished,
)
from stagerun.base.recipe import Method, OnNan
from stagerun.base.text import MOST_LISTED, columns, count, duration, listed, percent
from stagerun.plan.ensembles import in_words as members_in_words

Before = str | float | None  # what a stage is compared with: a stage or ensemble by its name, or a top-1


def results_table(
    results: Sequence[StageFinished],
    parents: Mapping[str, Before],
    ensembles: Iterable[EnsembleTested] = (),
    shown: Sequence[StageFinished] | None = None,
) -> str:
    """One line per stage of `shown` (default: all `results`), and a total where there are several.

    `gain`: top-1 against the stage or average it started from, in percentage points. `EMA top-1`: of the averaged weights, where a stage
    has them; `mAP`: where images have several labels.
    """
    top1 = {e.name: e.top1 for e in ensembles} | {r.stage: r.top1 for r in results}
    results = results if shown is None else shown

    def gain(result: StageFinished) -> str:
        before = parents.get(result.stage)
        before = top1.get(before) if isinstance(before, str) else before
        return "" if before is None or result.top1 is None else f"{100 * (result.top1 - before):+.2f}"

    cells: dict[str, Callable[[StageFinished], str]] = {
        "stage": lambda r: r.stage,
        "iterations": lambda r: str(r.iterations),
        "epochs": lambda r: f"{r.epochs:.2f}",
        "LR first -> last": lambda r: f"{r.first_lr:.4g} -> {r.last_lr:.4g}",
        "decay": lambda r: f"{r.weight_decay:g}",
        "augmentation": lambda r: r.augmentation,
        "train loss": lambda r: f"{r.loss:.4f}",
        "top-1": lambda r: percent(r.top1),
        "gain": gain,
        "top-5": lambda r: percent(r.top5),
        "mAP": lambda r: percent(r.mean_ap),
        "EMA top-1": lambda r: percent(r.ema_top1),
        "time": lambda r: duration(r.train_seconds),
    }
    for name, figures in (("mAP", [r.mean_ap for r in results]), ("EMA top-1", [r.ema_top1 for r in results])):
        if all(figure is None for figure in figures):
            del cells[name]
    rows: list[Sequence[str]] = [list(cells), *([cell(r) for cell in cells.values()] for r in results)]
    if len(results) != 1:
        total = {
            "stage": "total",
            "iterations": str(sum(r.iterations for r in results)),
            "epochs": f"{sum(r.epochs for r in results):.2f}",
            "time": duration(sum(r.train_seconds for r in results)),
        }
        rows.append([total.get(name, "") for name in cells])
    beside = [line for r in results for line in _other_sets(r)]
    return "\n".join([*columns(rows), *beside, *(_not_finite(r) for r in results if r.skips or r.rollbacks)])


def _other_sets(result: StageFinished) -> list[str]:
    """A line for each further validation set of the stage."""
    lines = []
    for val, top1, top5, loss, ema in result.beside:
        shown = "not finite" if loss is None else f"{loss:.4f}"
        weights = "EMA " if ema else ""
        lines.append(f"{result.stage} on {val}: {weights}top-1 {percent(top1)}, top-5 {percent(top5)}, loss {shown}")
    return lines


def _not_finite(result: StageFinished) -> str:
    """What `on_nan` has done in a stage."""
    done = [f"{count(result.skips, 'iteration')} skipped"] if result.skips else []
    done += [count(result.rollbacks, "rollback")] if result.rollbacks else []
    return f"note: {result.stage}: {', '.join(done)}, since loss or gradients were not finite"


def ensembles_table(results: Sequence[EnsembleTested]) -> str:
    """One line per ensemble; '' without any. Gains are of top-1, in percentage points, against the member that is best by
    itself and against the mean of the members."""
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
                percent(r.top5),
                "" if r.loss is None else f"{r.loss:.4f}",
            )
        )
    return "\n".join(columns(rows))


def warning_of(event: Event) -> str | None:
    """What an event warns of; None if it is no warning."""
    match event:
        case Note(text=text, warning=True):
            return text
        case NotFinite():
            return failed_line(event)
        case SnapshotFailed():
            return f"no snapshot of {event.stage} at {event.iter}: {event.message}"
    return None


_MOST_KEYS = 3


def failed_line(event: NotFinite) -> str:
    """Which it was, what is done about it, and its first images; log.jsonl names all of them."""
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


def piece_line(event: PieceStarted) -> str:
    children = ", ".join(event.children)
    return f"{event.stage} again: iterations {event.iter} to {event.until}, for {children}, from {event.start}"


def left_out(not_chosen: Sequence[str]) -> str:
    """Behind how a run has ended."""
    return f"; not chosen, and still to be trained: {listed(not_chosen, MOST_LISTED)}" if not_chosen else ""


def finished_line(event: RunFinished) -> str:
    """What a run that came to its end has done, and what it has left out."""
    left = left_out(event.not_chosen)
    if event.trained:
        return f"done in {duration(event.seconds)}{left}"
    return f"nothing to do: every stage{' that was chosen' if left else ''} is done{left}"


def ensemble_line(event: EnsembleTested) -> str:
    loss = "" if event.loss is None else f", loss {event.loss:.4f}"
    members = count(len(event.members), "snapshot" if any("@" in member for member in event.members) else "stage")
    return (
        f"ensemble {event.name}: {event.rule} of {members}, top-1 {percent(event.top1)} "
        f"({100 * event.gain:+.2f} against {event.best}), top-5 {percent(event.top5)}{loss} on {event.images} images in "
        f"{duration(event.seconds)}"
    )


def _method(name: str) -> str:
    return "dense" if name == Method.NONE.value else name


def choice_text(event: CompressionChosen) -> str:
    """How a stage's gradients are compressed: a line, and a table where they aren't all the same way or anything was tried."""
    head = f"{event.stage}: gradients {event.words}: {event.why}"
    if len(event.methods) == 1 and not event.tried:
        return head
    rows: list[Sequence[str]] = [("method", "tensors", "numbers", "which")]
    rows += [(_method(method), str(tensors), str(size), which) for method, tensors, size, which in event.methods]
    tried: list[Sequence[str]] = [("tried", "ms per iteration")]
    tried += [(name, f"{1000 * seconds:.1f}") for name, seconds in event.tried]
    return "\n".join([head, "", *columns(rows, 2), "", *(columns(tried, 2) if event.tried else []), ""])
