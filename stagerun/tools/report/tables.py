"""The tables of single runs. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stagerun.base.events import EnsembleTested, Tested
from stagerun.tools.report.history import History, Life, Run, Span, StageHistory, epoch_number, start_in_words
from stagerun.tools.report.table import RUN, Cells, Column, Table, Value, table_of


def _end(name: str) -> Callable[[Run, StageHistory], Value]:
    """Returns a field of a stage's result; None before it has one."""
    return lambda run, stage: getattr(stage.finished, name, None)


def _now(name: str) -> Callable[[Run, StageHistory], Value]:
    """Returns a field of a stage's result; before it has one, of what was trained so far."""
    return lambda run, stage: getattr(stage.finished or stage.trained, name, None)


def _workers(run: Run, stage: StageHistory) -> str:
    return ", ".join(dict.fromkeys(str(life.workers) for life in run.history.lives if life.workers))


# Of images with several labels.
_MEAN_AP = (Column("mean_ap", "mAP", "percent", optional=True), _end("mean_ap"))

_RUNS: Cells = (
    (RUN, lambda run, end: run.label),
    (Column("schedule", "schedule", "text"), lambda run, end: run.history.schedule),
    (Column("seed", "seed", "text"), lambda run, end: run.seed(end)),
    (Column("workers", "workers", "text"), _workers),
    (Column("end", "end", "text"), lambda run, end: end.name),
    (Column("epochs", "epochs", "epochs"), lambda run, end: end.epoch(end.iter) if end.trained else None),
    (Column("top1", "top-1", "percent"), _end("top1")),
    _MEAN_AP,
    (Column("test_loss", "validation loss", "loss"), _end("test_loss")),
    (Column("ema_top1", "EMA top-1", "percent"), _end("ema_top1")),
    (Column("train_seconds", "training", "time"), lambda run, end: run.seconds(end) if end.name else None),
    (Column("wall_seconds", "wall", "time"), lambda run, end: run.history.wall_seconds),
    (Column("lives", "lives", "count"), lambda run, end: len(run.history.lives)),
    (Column("state", "state", "text"), lambda run, end: run.state_in_words),
)


def runs_table(runs: Sequence[Run]) -> Table:
    """One row per run, or per end where the schedule has branches. A run that has done nothing has a row too."""
    ends = [(run, end) for run in runs for end in run.leaves() or [StageHistory(name="")]]
    note = (
        "training: of the end and the stages before it on its path; "
        "wall: over all process lives, with evaluations and what was done again, without the time between them"
    )
    return table_of("Runs", _RUNS, ends, note)


def _begun(value: Callable[[Run, StageHistory], Value]) -> Callable[[Run, StageHistory], Value]:
    """Empty for a stage that has not started."""
    return lambda run, stage: value(run, stage) if stage.finished or stage.trained else None


def _sent(name: str) -> Callable[[Run, StageHistory], Value]:
    """Returns what a stage sent, if it doesn't add up all gradients as they are at every iteration."""

    def value(run: Run, stage: StageHistory) -> Value:
        special = stage.trained is not None and (stage.gradients or stage.trained.of_dense is not None)
        return getattr(stage.trained, name) if special else None

    return value


def _stale(name: str) -> Callable[[Run, StageHistory], Value]:
    """Returns a figure of a stage whose iterations are pushes."""
    return lambda run, stage: getattr(stage.trained and stage.trained.staleness, name, None)


_SENT = "sent: by rank 0 in an iteration, on average, for gradients or replicas and all that travels with them; of dense: of what plain gradients at every iteration take"
_STALE = "staleness: updates between the pull of an iteration's weights and its own, the mean and the largest"

_STAGES: Cells = (
    (RUN, lambda run, stage: run.label),
    (Column("stage", "stage", "text"), lambda run, stage: stage.name),
    (Column("from", "from", "text"), _begun(start_in_words)),
    (Column("iterations", "iterations", "count"), _begun(lambda run, stage: getattr(stage.finished, "iterations", stage.iter))),
    (Column("epochs", "epochs", "epochs"), _begun(lambda run, stage: (stage.finished or stage).epochs)),
    (Column("first_lr", "LR first", "rate"), _now("first_lr")),
    (Column("last_lr", "LR last", "rate"), _now("last_lr")),
    (Column("weight_decay", "decay", "rate"), _now("weight_decay")),
    (Column("augmentation", "", "text"), _end("augmentation")),
    (Column("loss", "train loss", "loss"), _now("loss")),
    (Column("top1", "top-1", "percent"), _end("top1")),
    _MEAN_AP,
    (Column("gain", "gain", "points"), Run.gain),
    (Column("top5", "top-5", "percent"), _end("top5")),
    (Column("test_loss", "validation loss", "loss"), _end("test_loss")),
    (Column("ema_top1", "EMA top-1", "percent"), _end("ema_top1")),
    (Column("ema_top5", "", "percent"), _end("ema_top5")),
    (Column("gradients", "gradients", "text", optional=True), lambda run, stage: stage.gradients),
    (Column("synchronisations", "synchronised", "count", 0, True), lambda run, stage: stage.synchronisations),
    (Column("sent_bytes", "sent", "bytes", optional=True, note=_SENT), _sent("sent")),
    (Column("of_dense", "of dense", "share", optional=True), _sent("of_dense")),
    (Column("staleness_mean", "staleness", "speed", optional=True, note=_STALE), _stale("mean")),
    (Column("staleness_max", "at most", "count", optional=True), _stale("largest")),
    (Column("images_per_second", "images/s", "speed"), lambda run, stage: stage.images_per_second),
    (Column("train_seconds", "time", "time"), _begun(lambda run, stage: stage.seconds)),
    (Column("resumes", "resumes", "count", dull=0), _begun(lambda run, stage: len(stage.resumes))),
    (Column("skips", "skips", "count", dull=0), _begun(lambda run, stage: stage.skips)),
    (Column("rollbacks", "rollbacks", "count", dull=0), _begun(lambda run, stage: stage.rollbacks)),
    (Column("state", "state", "text", dull="done"), Run.state),
)  # fmt: skip


def stages_table(runs: Sequence[Run]) -> Table:
    """One row per run and stage. What only a finished stage has is empty for one in training."""
    note = (
        "train loss: mean over the last iterations, 100 at most; gain: top-1 against the stage or average it started from, in "
        "percentage points; time: of training, without evaluation and without what was done again"
    )
    return table_of("Stages", _STAGES, ((run, stage) for run in runs for stage in run.history.stages), note)


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
    return Table("Further validation sets", _SETS, rows, (note,))


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
    return Table("Ensembles", _ENSEMBLES, rows, tuple(notes) if rows else ("no ensemble was evaluated",))


def _ensemble_rows(run: Run, tested: EnsembleTested) -> Iterator[tuple[Value, ...]]:
    known = dict(zip(tested.members, tested.alone, strict=False))
    for name, result in zip(tested.members, run.alone(tested), strict=True):
        top1, top5, loss = (result.top1, result.top5, result.test_loss) if result else (known.get(name), None, None)
        yield run.label, tested.name, name, "", top1, None, None, top5, loss, None
    gains = tested.gain, tested.gain_over_mean
    rule = tested.rule + (f", {kind}" if (kind := tested.shape) else "")
    yield run.label, tested.name, "", rule, tested.top1, *gains, tested.top5, tested.loss, tested.seconds


# -- by epochs


@dataclass(frozen=True, slots=True)
class _Epoch:
    """`number` is 1-based, along the path of ancestors; an update that straddles two epochs counts to the later one. Where one stage alone
    follows from another, an epoch may hold parts of both. `tests`: the last ones."""

    number: int
    stages: list[str]
    spans: list[Span]
    tests: dict[bool, Tested]

    @property
    def seconds(self) -> float:
        return sum(span.seconds for span in self.spans)


def _epochs(history: History) -> list[_Epoch]:
    """Branch after branch: a stage alone in starting from another, at its end, goes on with its branch."""
    started = [s for s in history.stages if s.trained]
    parents = [parent.name for s in started if (parent := history.follows(s)) is not None]
    branches: dict[str, str] = {}  # by stage its branch's first one
    found: dict[tuple[str, int], _Epoch] = {}
    for stage in started:
        parent = history.follows(stage)
        alone = parent is not None and parents.count(parent.name) == 1
        branches[stage.name] = branches.get(parent.name, stage.name) if parent is not None and alone else stage.name
        for number, span in (stage.trained.epochs if stage.trained else {}).items():
            epoch = found.setdefault((branches[stage.name], number), _Epoch(number, [], [], {}))
            epoch.stages.append(stage.name)
            epoch.spans.append(span)
            epoch.tests.update(
                {test.ema: test for test in stage.tests if epoch_number(stage.epoch(test.iter)) == number}
            )
    return [*found.values()]


_EPOCHS: Cells = (
    (RUN, lambda run, e: run.label),
    (Column("epoch", "epoch", "count"), lambda run, e: e.number),
    (Column("stage", "stage", "text"), lambda run, e: ", ".join(e.stages)),
    (Column("lr", "LR", "rate"), lambda run, e: e.spans[-1].lr),
    (
        Column("train_loss", "train loss", "loss"),
        lambda run, e: sum(span.loss for span in e.spans) / sum(span.updates for span in e.spans),
    ),
    (Column("valid_accuracy", "valid accuracy", "percent"), lambda run, e: getattr(e.tests.get(False), "top1", None)),
    (Column("valid_loss", "valid loss", "loss"), lambda run, e: getattr(e.tests.get(False), "loss", None)),
    (
        Column("ema_valid_accuracy", "EMA valid accuracy", "percent"),
        lambda run, e: getattr(e.tests.get(True), "top1", None),
    ),
    (
        Column("images_per_second", "images/s", "speed"),
        lambda run, e: sum(span.images for span in e.spans) / e.seconds if e.seconds else None,
    ),
    (Column("seconds", "time", "time"), lambda run, e: e.seconds),
)


def epochs_table(runs: Sequence[Run]) -> Table:
    """One row per run and epoch."""
    note = (
        "epochs count along the path of ancestors; train loss: mean over the epoch's iterations, each before its update; LR: "
        "of its last iteration; valid accuracy, valid loss: top-1 and loss of the last evaluation in it; time: of training"
    )
    return table_of("Epochs", _EPOCHS, ((run, epoch) for run in runs for epoch in _epochs(run.history)), note)
