"""The first lines of a report: what came out, in words. Pure."""

import statistics
from collections.abc import Sequence

from stagerun.events import EnsembleTested
from stagerun.report.compare import Group, ensemble_groups, groups
from stagerun.report.runs import Run

# A title names so many runs.
MOST_NAMES = 8


def title(runs: Sequence[Run]) -> str:
    """`fashion_collapse: seed1, seed2, seed3`; `icons32` alone where both are the same."""
    names = ", ".join(dict.fromkeys(run.history.schedule or "unknown schedule" for run in runs))
    labels = f"{len(runs)} runs" if len(runs) > MOST_NAMES else ", ".join(run.label for run in runs)
    return names if names == labels else f"{names}: {labels}"


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
        text += f", {100 * abs(gain.mean):.2f} points {'below' if gain.mean < 0 else 'above'} the stage it starts from"
    if ema:
        text += f"; with averaged weights {100 * ema.mean:.2f} %"
    return text + ("." if len(group.runs) > 1 else f" ({group.runs[0]}).")


def _ensembles(runs: Sequence[Run]) -> list[str]:
    """A sentence for each ensemble, those of runs that differ by seed alone put together."""
    found = []
    together = ensemble_groups(runs)
    for group in together:
        name, labels = group[0][1].name, [run.label for run, _ in group]
        top1 = statistics.fmean(tested.top1 for _, tested in group)
        gain = statistics.fmean(tested.gain for _, tested in group)
        several = sum(other[0][1].name == name for other in together) > 1  # recipes of that name
        whose = f"mean of {', '.join(labels) if several else f'{len(labels)} runs'}" if len(labels) > 1 else labels[0]
        what = f"{name}{_earlier(group)}"
        difference = f"{100 * abs(gain):.2f} points {'below' if gain < 0 else 'above'}"
        found.append(f"Ensemble {what}: top-1 {100 * top1:.2f} %, {difference} its best member ({whose}).")
    return found


def _earlier(group: Sequence[tuple[Run, EnsembleTested]]) -> str:
    """That it was made of what its members were, where they, or what they follow from, have been trained on since."""
    labels = [run.label for run, tested in group if not run.stale.isdisjoint(tested.members)]
    if not labels:
        return ""
    return " of earlier members" if len(labels) == len(group) else f" of earlier members in {', '.join(labels)}"
