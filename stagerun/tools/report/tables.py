"""The tables of single runs. Pure."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stagerun.base.events import EnsembleTested, Tested
from stagerun.base.staleness import Staleness
from stagerun.tools.report.history import History, Life, Run, Span, StageHistory, start_in_words
from stagerun.tools.report.read_log import epoch_number
from stagerun.tools.report.table import RUN, Cells, Column, Table, Value, table_of


def _end(name: str) -> Callable[[Run, StageHistory], Value]:
    """Returns a field of a stage's result; None before it has one."""
    return lambda run, stage: getattr(stage.finished, name, None)


def _now(name: str) -> Callable[[Run, StageHistory], Value]:
    """Returns a field of a stage's result; before it has one, of what was trained so far."""
    return lambda run, stage: getattr(stage.finished or stage.trained, name, None)


def _workers(run: Run, stage: StageHistory) -> str:
    return ", ".join(dict.fromkeys(str(life.workers) for life in run.history.lives if life.workers))


_RUNS: Cells = (
    (RUN, lambda run, end: run.label),
    (Column("schedule", "schedule", "text"), lambda run, end: run.history.schedule),
    (Column("seed", "seed", "text"), lambda run, end: run.seed(end)),
    (Column("workers", "workers", "text"), _workers),
    (Column("end", "end", "text"), lambda run, end: end.name),
    (Column("epochs", "epochs", "epochs"), lambda run, end: end.trained.epoch if end.trained else None),
    (Column("top1", "top-1", "percent"), _end("top1")),
    (Column("test_loss", "validation loss", "loss"), _end("test_loss")),
    (Column("ema_top1", "EMA top-1", "percent"), _end("ema_top1")),
    (Column("train_seconds", "training", "time"), lambda run, end: run.seconds(end) if end.name else None),
    (Column("wall_seconds", "wall", "time"), lambda run, end: run.history.wall_seconds),
    (Column("lives", "lives", "count"), lambda run, end: len(run.history.lives)),
    (Column("state", "state", "text"), lambda run, end: run.state_in_words),
)


# Where images have several labels, which are learnt with BINARY: behind top-1.
_MEAN_AP = (Column("mean_ap", "mAP", "percent"), _end("mean_ap"))


def _with_mean_ap(runs: Sequence[Run], cells: Cells) -> Cells:
    if not any(stage.finished and stage.finished.class_ap for run in runs for stage in run.history.stages):
        return cells
    at = next(i for i, (column, _) in enumerate(cells) if column.key == "top1") + 1
    return (*cells[:at], _MEAN_AP, *cells[at:])


def runs_table(runs: Sequence[Run]) -> Table:
    """One row per run, or per end where the schedule has branches. A run that has done nothing has a row too."""
    ends = [(run, end) for run in runs for end in run.leaves() or [StageHistory(name="")]]
    note = (
        "training: of the end and the stages before it on its path; "
        "wall: over all process lives, with evaluations and what was done again, without the time between them"
    )
    return table_of("Runs", _with_mean_ap(runs, _RUNS), ends, note)


# For a stage that has not started the columns between its name and its state are empty.
_STAGES: Cells = (
    (RUN, lambda run, stage: run.label),
    (Column("stage", "stage", "text"), lambda run, stage: stage.name),
    (Column("from", "from", "text"), start_in_words),
    (
        Column("iterations", "iterations", "count"),
        lambda run, stage: stage.finished.iterations if stage.finished else stage.iter,
    ),
    (Column("epochs", "epochs", "epochs"), lambda run, stage: (stage.finished or stage).epochs),
    (Column("first_lr", "LR first", "rate"), _now("first_lr")),
    (Column("last_lr", "LR last", "rate"), _now("last_lr")),
    (Column("weight_decay", "decay", "rate"), _now("weight_decay")),
    (Column("augmentation", "", "text"), _end("augmentation")),
    (Column("loss", "train loss", "loss"), _now("loss")),
    (Column("top1", "top-1", "percent"), _end("top1")),
    (Column("gain", "gain", "points"), Run.gain),
    (Column("top5", "top-5", "percent"), _end("top5")),
    (Column("test_loss", "validation loss", "loss"), _end("test_loss")),
    (Column("ema_top1", "EMA top-1", "percent"), _end("ema_top1")),
    (Column("ema_top5", "", "percent"), _end("ema_top5")),
    (Column("images_per_second", "images/s", "speed"), lambda run, stage: stage.images_per_second),
    (Column("train_seconds", "time", "time"), lambda run, stage: stage.seconds),
    (Column("resumes", "resumes", "count", dull=0), lambda run, stage: len(stage.resumes)),
    (Column("skips", "skips", "count", dull=0), lambda run, stage: stage.skips),
    (Column("rollbacks", "rollbacks", "count", dull=0), lambda run, stage: stage.rollbacks),
    (Column("state", "state", "text", dull="done"), Run.state),
)


def _of_dense(run: Run, stage: StageHistory) -> Value:
    """All of it for a stage that adds up all gradients as they are."""
    if stage.trained is None or stage.trained.sent is None:
        return None
    return 1.0 if stage.trained.of_dense is None else stage.trained.of_dense


def _gradients(run: Run, stage: StageHistory) -> Value:
    """Nothing of a log of before, which doesn't say how."""
    plain = stage.trained is not None and stage.trained.of_dense is None
    return stage.gradients or ("dense" if plain else None)


# Where a stage compresses its gradients, or has replicas. Before the speed.
_SENT: Cells = (
    (Column("gradients", "gradients", "text", dull="dense"), _gradients),
    (Column("synchronisations", "synchronised", "count", dull=0), lambda run, stage: stage.synchronisations),
    (Column("sent_bytes", "sent", "bytes"), lambda run, stage: stage.trained.sent if stage.trained else None),
    (Column("of_dense", "of dense", "share"), _of_dense),
)
_SENT_NOTE = (
    "sent: by rank 0 in an iteration, on average, for gradients or replicas and all that travels with them; of dense: of what plain gradients "
    "at every iteration take"
)


# Where an iteration of a stage is a push. Before the speed, too.
_STALE: Cells = (
    (Column("staleness_mean", "staleness", "speed"), lambda run, stage: s.mean if (s := _staleness(stage)) else None),
    (Column("staleness_max", "at most", "count"), lambda run, stage: s.largest if (s := _staleness(stage)) else None),
)
_STALE_NOTE = "staleness: updates between the pull of an iteration's weights and its own, the mean and the largest"


def _staleness(stage: StageHistory) -> Staleness | None:
    return stage.trained.staleness if stage.trained else None


def stages_table(runs: Sequence[Run]) -> Table:
    """One row per run and stage. What only a finished stage has is empty for one in training."""

    def row(run: Run, stage: StageHistory) -> tuple[Value, ...]:
        if stage.finished or stage.trained:
            return tuple(value(run, stage) for _, value in cells)
        return run.label, stage.name, *[None] * (len(cells) - 3), run.state(stage)

    stages = [stage for run in runs for stage in run.history.stages]
    compressed = any(stage.gradients or (stage.trained and stage.trained.of_dense is not None) for stage in stages)
    at = next(i for i, (column, _) in enumerate(_STAGES) if column.key == "images_per_second")
    pushed = any(_staleness(stage) for run in runs for stage in run.history.stages)
    cells = (*_STAGES[:at], *(_SENT if compressed else ()), *(_STALE if pushed else ()), *_STAGES[at:])
    cells = tuple(_with_mean_ap(runs, cells))
    rows = tuple(row(run, stage) for run in runs for stage in run.history.stages)
    note = (
        "train loss: mean over the last iterations, 100 at most; gain: top-1 against the stage or average it started from, in "
        "percentage points; time: of training, without evaluation and without what was done again"
    )
    notes = (note, *[_SENT_NOTE] * compressed, *[_STALE_NOTE] * pushed)
    return Table("Stages", _with_top5(runs, [column for column, _ in cells]), rows, notes)


def _with_top5(runs: Sequence[Run], columns: Sequence[Column]) -> tuple[Column, ...]:
    """The columns, that of top-5 for programs alone where the networks have no more than five classes to choose from."""
    found = {identity.get("model.num_classes", "") for run in runs for identity in run.identities.values()}
    if not found or not found <= {"1", "2", "3", "4", "5"}:
        return tuple(columns)
    return tuple(replace(column, title="") if column.key == "top5" else column for column in columns)


def _last_word(run: Run, life: Life) -> str:
    last = life is run.history.lives[-1]
    return life.end or (run.word or "at work, or broken off" if last else "broken off")


_LIVES: Cells = (
    (RUN, lambda run, life: run.label),
    (Column("life", "life", "count"), lambda run, life: life.number),
    (Column("begun", "started (UTC)", "moment"), lambda run, life: life.began),
    (Column("start", "at", "text"), lambda run, life: life.start),
    (Column("workers", "workers", "count"), lambda run, life: life.workers or None),
    (Column("threads", "threads", "count"), lambda run, life: life.threads or None),
    (Column("device", "device", "text"), lambda run, life: life.device),
    (Column("version", "", "text"), lambda run, life: life.version),
    (Column("iterations", "iterations", "count"), lambda run, life: life.updates),
    (Column("done_again", "done again", "count"), lambda run, life: life.again),
    (
        Column("images_per_second", "images/s", "speed"),
        lambda run, life: life.images / life.seconds if life.seconds else None,
    ),
    (Column("wall_seconds", "time", "time"), lambda run, life: life.ended - life.began),
    (Column("end", "end", "text"), _last_word),
)


def lives_table(runs: Sequence[Run]) -> Table:
    """One row per process life."""
    note = (
        "done again: iterations of it that a later life had to repeat, or that `--redo` started over, and those by which a branch got "
        "the snapshot that it starts from once more"
    )
    return table_of("Process lives", _LIVES, ((run, life) for run in runs for life in run.history.lives), note)


def replicas_table(runs: Sequence[Run]) -> Table:
    """One row per replica of each stage whose replicas push."""
    columns = (
        RUN,
        Column("stage", "stage", "text"),
        Column("replica", "replica", "count"),
        Column("pushes", "iterations", "count"),
        Column("share", "share", "share"),
        Column("staleness_mean", "staleness", "speed"),
        Column("staleness_max", "at most", "count"),
    )
    rows: list[tuple[Value, ...]] = []
    for run in runs:
        for stage in run.history.stages:
            found = _staleness(stage)
            if found is None:
                continue
            for rank, share in found.shares.items():
                own = found.of(rank)
                rows.append((run.label, stage.name, rank, own.pushes, share, own.mean, own.largest))
    note = "replica: the rank that computed an iteration; only those that count, and not what was done again"
    return Table("Replicas", columns, tuple(rows), (note,))


_MOST_CLASSES = 100  # of a stage


def classes_table(runs: Sequence[Run]) -> Table:
    """One row per stage and class of images with several labels; of many classes those that are known worst."""
    rows: list[tuple[Value, ...]] = []
    cut = False
    for run in runs:
        for stage in run.history.stages:
            found = list(enumerate(stage.finished.class_ap if stage.finished else ()))
            if len(found) > _MOST_CLASSES:
                cut, found = (
                    True,
                    sorted((one for one in found if one[1] is not None), key=lambda one: (one[1], one[0])),
                )
            rows += [(run.label, stage.name, label, ap) for label, ap in found[:_MOST_CLASSES]]
    columns = (
        RUN,
        Column("stage", "stage", "text"),
        Column("class", "class", "count"),
        Column("average_precision", "AP", "percent"),
    )
    notes = ["AP: average precision; mAP is its mean over the classes that an image of the evaluation has"]
    notes += [f"of each stage the {_MOST_CLASSES} classes with the lowest"] * cut
    return Table("Classes", columns, tuple(rows), tuple(notes))


_ENSEMBLES = (
    RUN,
    Column("ensemble", "ensemble", "text"),
    Column("member", "member", "text"),
    Column("rule", "rule", "text"),
    Column("top1", "top-1", "percent"),
    Column("gain", "against the best", "points"),
    Column("gain_over_mean", "against the mean", "points"),
    Column("top5", "top-5", "percent"),
    Column("test_loss", "validation loss", "loss"),
    Column("seconds", "time", "time"),
)


_SETS = (
    RUN,
    Column("stage", "stage", "text"),
    Column("val", "validation set", "text"),
    Column("weights", "weights", "text"),
    Column("top1", "top-1", "percent"),
    Column("top5", "top-5", "percent"),
    Column("test_loss", "validation loss", "loss"),
)


def sets_table(runs: Sequence[Run]) -> Table:
    """One row for each further validation set of a finished stage; the other tables have the first."""
    rows = tuple(
        (run.label, stage.name, val, "averaged" if ema else "trained", top1, top5, loss)
        for run in runs
        for stage in run.history.stages
        if stage.finished is not None
        for val, top1, top5, loss, ema in stage.finished.beside
    )
    note = "of the first validation set of each stage, which decides, the other tables say more"
    return Table("Further validation sets", _with_top5(runs, _SETS), rows, (note,))


def ensembles_table(runs: Sequence[Run]) -> Table:
    """One row per member of each ensemble, and then one for the ensemble itself."""
    rows = tuple(row for run in runs for tested in run.history.ensembles for row in _ensemble_rows(run, tested))
    notes = [
        "against the best, against the mean: in top-1, the member that is best by itself, and the mean of the members, in "
        "percentage points"
    ]
    for run in runs:
        found = dict.fromkeys(result.snapshot for tested in run.history.ensembles for result in run.earlier(tested))
        if found:
            notes.append(
                f"{run.label}: evaluated with {', '.join(found)}; the other tables show what these stages were trained to later"
            )
    return Table(
        "Ensembles", _with_top5(runs, _ENSEMBLES), rows, tuple(notes) if rows else ("no ensemble was evaluated",)
    )


def _ensemble_rows(run: Run, tested: EnsembleTested) -> Iterator[tuple[Value, ...]]:
    known = dict(zip(tested.members, tested.alone, strict=False))
    for name, result in zip(tested.members, run.alone(tested), strict=True):
        top1, top5, loss = (result.top1, result.top5, result.test_loss) if result else (known.get(name), None, None)
        yield run.label, tested.name, name, "", top1, None, None, top5, loss, None
    gains = tested.gain, tested.gain_over_mean
    rule = tested.rule + (f", {kind}" if (kind := tested.shape or ", ".join(tested.taken)) else "")
    yield run.label, tested.name, "", rule, tested.top1, *gains, tested.top5, tested.loss, tested.seconds


# -- by epochs


@dataclass(frozen=True, slots=True)
class Epoch:
    """`number` is 1-based, along the path of ancestors; an update that straddles two epochs counts to the later one.
    `branch` is the first stage of its branch. `partial`: the stage was not trained to its end, and this is where it stopped.
    `numbers`: as _EPOCH_NUMBERS; the accuracies are of the last evaluation, None if there was none.
    """

    number: int
    branch: str
    stages: tuple[str, ...]
    partial: bool
    numbers: tuple[float | None, ...]


def epochs(history: History) -> list[Epoch]:
    """Branch after branch. Where one stage alone follows from another, an epoch may hold parts of both."""
    pieces: dict[tuple[str, int], list[tuple[StageHistory, Span]]] = {}
    branches = _branches(history)
    for stage in history.stages:
        for number, span in (stage.trained.epochs if stage.trained else {}).items():
            pieces.setdefault((branches[stage.name], number), []).append((stage, span))
    return [_epoch(number, branch, held) for (branch, number), held in pieces.items()]


def _branches(history: History) -> dict[str, str]:
    """Stage -> the first stage of its branch: a stage alone in starting from another, at its end, goes on with its branch."""
    started = [s for s in history.stages if s.trained]
    parents = [parent.name for s in started if (parent := history.follows(s)) is not None]
    found: dict[str, str] = {}
    for stage in started:
        parent = history.follows(stage)
        alone = parent is not None and parents.count(parent.name) == 1
        found[stage.name] = found.get(parent.name, stage.name) if parent is not None and alone else stage.name
    return found


def _epoch(number: int, branch: str, held: list[tuple[StageHistory, Span]]) -> Epoch:
    spans = [span for _, span in held]
    seconds = sum(span.seconds for span in spans)
    tests: dict[bool, Tested] = {}
    for stage, _ in held:
        tests |= {test.ema: test for epoch, test in stage.tests if epoch_number(epoch) == number}
    own, averaged = tests.get(False), tests.get(True)
    last = held[-1][0]
    stopped = last.finished is None and last.iter < last.max_iter
    numbers = (
        spans[-1].lr,
        sum(span.loss for span in spans) / sum(span.updates for span in spans),
        own.top1 if own else None,
        own.loss if own else None,
        averaged.top1 if averaged else None,
        sum(span.images for span in spans) / seconds if seconds else None,
        seconds,
    )
    stages = tuple(stage.name for stage, _ in held)
    partial = stopped and last.trained is not None and number == max(last.trained.epochs)
    return Epoch(number, branch, stages, partial, numbers)


_EPOCH = (Column("epoch", "epoch", "count"), Column("stage", "stage", "text"))
_EPOCH_NUMBERS = (
    Column("lr", "LR", "rate"),
    Column("train_loss", "train loss", "loss"),
    Column("valid_accuracy", "valid accuracy", "percent"),
    Column("valid_loss", "valid loss", "loss"),
    Column("ema_valid_accuracy", "EMA valid accuracy", "percent"),
    Column("images_per_second", "images/s", "speed"),
    Column("seconds", "time", "time"),
)
_EPOCH_NOTE = (
    "epochs count along the path of ancestors; train loss: mean over the epoch's iterations, each before its update; LR: "
    "of its last iteration; valid accuracy, valid loss: top-1 and loss of the last evaluation in it; time: of training"
)


def epochs_table(runs: Sequence[Run]) -> Table:
    """One row per run and epoch."""
    rows = tuple((run.label, e.number, ", ".join(e.stages), *e.numbers) for run in runs for e in epochs(run.history))
    return Table("Epochs", (RUN, *_EPOCH, *_EPOCH_NUMBERS), rows, (_EPOCH_NOTE,))


OPERATIONS: dict[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "max": max}


def epochs_over_runs(runs: Sequence[Run], operation: str) -> Table:
    """One row per epoch: of each number the mean, or the largest, over the runs that have it. `operation`: a key of
    OPERATIONS. The epoch in which an unfinished run has stopped is left out."""
    together: dict[tuple[str, int], list[Epoch]] = {}
    for run in runs:
        for epoch in epochs(run.history):
            if not epoch.partial:
                together.setdefault((epoch.branch, epoch.number), []).append(epoch)
    combine = OPERATIONS[operation]
    rows: list[tuple[Value, ...]] = []
    for same in together.values():
        numbers = [
            [c for c in column if isinstance(c, float)]
            for column in zip(*(epoch.numbers for epoch in same), strict=True)
        ]
        stages = ", ".join(dict.fromkeys(name for epoch in same for name in epoch.stages))
        rows.append((same[0].number, stages, len(same), *(combine(n) if n else None for n in numbers)))
    columns = (*_EPOCH, Column("runs", "runs", "count"), *_EPOCH_NUMBERS)
    what = "the mean" if operation == "mean" else "the largest value"
    note = (
        f"each number is {what} over the runs, without the epoch in which an unfinished one has stopped; {_EPOCH_NOTE}"
    )
    return Table("Epochs", columns, tuple(rows), (note,))
