"""The first lines of a report: what came out, in words. Pure."""

import statistics
from collections.abc import Sequence

from stagerun.report.compare import Group, groups
from stagerun.report.runs import Run


def title(runs: Sequence[Run]) -> str:
    """`fashion_collapse: seed1, seed2, seed3`."""
    names = dict.fromkeys(run.history.schedule or "unknown schedule" for run in runs)
    return f"{', '.join(names)}: {', '.join(run.label for run in runs)}"


def lead(runs: Sequence[Run]) -> list[str]:
    """A sentence for each end of the schedule that was reached, and one for the runs that are not finished."""
    found = [_sentence(group) for group in groups(runs) if group.last and group.top1]
    found += _ensembles(runs)
    found += [f"{run.label} is not finished: {run.state_in_words}." for run in runs if run.state_in_words != "finished"]
    return found


def _sentence(group: Group) -> str:
    top1, gain, ema = group.top1, group.gain, group.ema_top1
    assert top1 is not None
    text = f"Top-1 {100 * top1.mean:.2f} %"
    if top1.sd is not None:
        text += f" (sd {100 * top1.sd:.2f} over {top1.n} runs, seeds {', '.join(group.seeds)})"
    text += f" at the end of {group.stage}"
    if gain:
        text += f", of which {group.stage} gains {100 * gain.mean:+.2f}"
    if ema:
        text += f"; with averaged weights {100 * ema.mean:.2f} %"
    return text + ("." if len(group.runs) > 1 else f" ({group.runs[0]}).")


def _ensembles(runs: Sequence[Run]) -> list[str]:
    """One sentence for each name of an ensemble."""
    found = []
    for name in dict.fromkeys(tested.name for run in runs for tested in run.history.ensembles):
        of_name = [(run, tested) for run in runs for tested in run.history.ensembles if tested.name == name]
        top1 = statistics.fmean(tested.top1 for _, tested in of_name)
        gain = statistics.fmean(tested.gain for _, tested in of_name)
        whose = of_name[0][0].label if len(of_name) == 1 else f"mean of {len(of_name)} runs"
        found.append(f"Ensemble {name}: top-1 {100 * top1:.2f} %, {100 * gain:+.2f} against its best member ({whose}).")
    return found
