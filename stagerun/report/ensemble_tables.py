"""The table of ensembles beside their members. Pure."""

from collections.abc import Iterator, Sequence

from stagerun.events import EnsembleTested
from stagerun.report.runs import Run
from stagerun.report.tables import RUN, Column, Table, Value

COLUMNS = (
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
    rows = tuple(row for run in runs for tested in run.history.ensembles for row in _rows(run, tested))
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
    return Table("Ensembles", COLUMNS, rows, tuple(notes) if rows else ("no ensemble was evaluated",))


def _rows(run: Run, tested: EnsembleTested) -> Iterator[tuple[Value, ...]]:
    for name, result in zip(tested.members, run.alone(tested), strict=True):
        top1, top5, loss = (result.top1, result.top5, result.test_loss) if result else (None, None, None)
        yield run.label, tested.name, name, "", top1, None, None, top5, loss, None
    gains = tested.gain, tested.gain_over_mean
    yield run.label, tested.name, "", tested.rule, tested.top1, *gains, tested.top5, tested.loss, tested.seconds
