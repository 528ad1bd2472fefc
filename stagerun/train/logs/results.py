"""What is printed of results: the tables of finished stages and of ensembles, and the lines that all screens share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from stagerun.base.events import (
    CompressionChosen,
    EnsembleTested,
    NotFinite,
    PieceStarted,
    RunFinished,
    RunStarted,
    StageFinished,
)
from stagerun.base.recipe import OnNan
from stagerun.base.text import MOST_LISTED, columns, count, duration, listed
from stagerun.plan.ensembles import in_words as members_in_words
from stagerun.train.choices import DENSE, in_words
from stagerun.train.results import Before

HEADER = (
    "stage",
    "iterations",
    "epochs",
    "LR first -> last",
    "decay",
    "augmentation",
    "train loss",
    "top-1",
    "gain",
    "top-5",
    "time",
)


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
    averaged = any(r.ema_top1 is not None for r in results)
    several = any(r.mean_ap is not None for r in results)  # labels
    rows: list[Sequence[str]] = [(*HEADER[:-1], *["mAP"] * several, *["EMA top-1"] * averaged, HEADER[-1])]
    for r in results:
        before = parents.get(r.stage)
        before = top1.get(before) if isinstance(before, str) else before
        gain = "" if before is None or r.top1 is None else f"{100 * (r.top1 - before):+.2f}"
        rows.append(
            (
                r.stage,
                str(r.iterations),
                f"{r.epochs:.2f}",
                f"{r.first_lr:.4g} -> {r.last_lr:.4g}",
                f"{r.weight_decay:g}",
                r.augmentation,
                f"{r.loss:.4f}",
                _percent(r.top1),
                gain,
                _percent(r.top5),
                *[_percent(r.mean_ap)] * several,
                *[_percent(r.ema_top1)] * averaged,
                duration(r.train_seconds),
            )
        )
    if len(results) == 1:
        return "\n".join([*columns(rows), *_beside(results), *map(not_finite, filter(_failed, results))])
    iterations, seconds = sum(r.iterations for r in results), sum(r.train_seconds for r in results)
    total = [
        "total",
        str(iterations),
        f"{sum(r.epochs for r in results):.2f}",
        *[""] * (7 + several + averaged),
        duration(seconds),
    ]
    return "\n".join([*columns([*rows, total]), *_beside(results), *map(not_finite, filter(_failed, results))])


def _beside(results: Sequence[StageFinished]) -> Iterator[str]:
    """A line for each further validation set of a stage."""
    for result in results:
        for val, top1, top5, loss, ema in result.beside:
            shown = "not finite" if loss is None else f"{loss:.4f}"
            weights = "EMA " * ema
            yield f"{result.stage} on {val}: {weights}top-1 {_percent(top1)}, top-5 {_percent(top5)}, loss {shown}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"


def _failed(result: StageFinished) -> bool:
    return bool(result.skips or result.rollbacks)


def not_finite(result: StageFinished) -> str:
    """What `on_nan` has done in a stage."""
    skips = f"{count(result.skips, 'iteration')} skipped" if result.skips else ""
    rollbacks = f"{count(result.rollbacks, 'rollback')}" if result.rollbacks else ""
    return (
        f"note: {result.stage}: {', '.join(filter(None, (skips, rollbacks)))}, since loss or gradients were not finite"
    )


def ordered(ensembles: Mapping[str, EnsembleTested], run: RunStarted | None) -> list[EnsembleTested]:
    """By name -> in the order of the schedule, where that is known."""
    names = run.ensembles if run is not None else ()
    return [ensembles[name] for name in dict.fromkeys((*names, *ensembles)) if name in ensembles]


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
                r.rule + (f", {kind}" if (kind := r.shape) else ""),
                f"{100 * r.top1:.2f} %",
                f"{100 * r.gain:+.2f} ({r.best})",
                f"{100 * r.gain_over_mean:+.2f}",
                f"{100 * r.top5:.2f} %",
                "" if r.loss is None else f"{r.loss:.4f}",
            )
        )
    return "\n".join(columns(rows))


MOST_KEYS = 3


def failed_line(event: NotFinite) -> str:
    """Which it was, what is done about it, and its first images; log.jsonl names all of them."""
    keys = ", ".join(f"`{key}`" for key in event.keys[:MOST_KEYS])
    more = f" and {event.images - MOST_KEYS} more" if event.images > MOST_KEYS else ""
    images = f"; its images: {keys}{more}" if keys else ""
    return f"{event.stage}: {event.what} at iteration {event.iter}, LR {event.lr:.4g}: {_done(event)}{images}"


def _done(event: NotFinite) -> str:
    if event.done == OnNan.SKIP.value:
        return f"skipped, {event.number} of at most {event.most} in a row"
    if event.done == OnNan.ROLLBACK.value and event.back_to is not None:
        left_out = (event.iter + 1 - event.back_to) * event.images
        return (
            f"back to {event.back_to} ({event.snapshot}), from where on {count(left_out, 'image')} are left out; rollback "
            f"{event.number} of at most {event.most}"
        )
    return "the run ends"


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
    return "nothing to do: every stage that was chosen is done" + left if left else "nothing to do: every stage is done"


def ensemble_line(event: EnsembleTested) -> str:
    loss = "" if event.loss is None else f", loss {event.loss:.4f}"
    return (
        f"ensemble {event.name}: {event.rule} of {len(event.members)} {'snapshots' if '@' in ''.join(event.members) else 'stages'}, top-1 {100 * event.top1:.2f} % "
        f"({100 * event.gain:+.2f} against {event.best}), top-5 {100 * event.top5:.2f} %{loss} on {event.images} images in "
        f"{duration(event.seconds)}"
    )


def choice_text(event: CompressionChosen) -> str:
    """How a stage's gradients are compressed: a line, and a table where they aren't all the same way or anything was tried."""
    head = (
        f"{event.stage}: gradients {in_words((method, tensors) for method, tensors, *_ in event.methods)}: {event.why}"
    )
    if len(event.methods) == 1 and not event.tried:
        return head
    names = ["dense" if method == DENSE else method for method, *_ in event.methods]
    rows: list[Sequence[str]] = [("method", "tensors", "numbers", "which")]
    rows += [(n, str(t), str(size), which) for n, (_, t, size, which) in zip(names, event.methods, strict=True)]
    tried: list[Sequence[str]] = [
        ("tried", "ms per iteration"),
        *((name, f"{1000 * s:.1f}") for name, s in event.tried),
    ]
    return "\n".join([head, "", *columns(rows, 2), "", *(columns(tried, 2) if event.tried else []), ""])
