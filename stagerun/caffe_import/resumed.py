"""A stage that in Caffe went on from another solver's snapshot: what its fields say from there on. Pure.

Caffe takes over weights, momentum, and the count of iterations, by which it reads its policy, ends, evaluates and saves
(`Restore` of solver.cpp and sgd_solver.cpp in sara-nl/caffe). A stage counts from its own start.
"""

from collections.abc import Mapping, Sequence

from stagerun.caffe_import.left import Findings
from stagerun.caffe_import.lines import Line, Setting, setting
from stagerun.caffe_import.settings import AS_CAFFE, SolverStage
from stagerun.caffe_import.solver import LOOKING
from stagerun.spec.view import View

KEPT = Setting("carry", (Line("carry { momentum: KEEP }", None, "as Caffe's `--snapshot`"),))
BOTH = Setting("carry", (Line("carry { momentum: KEEP data: RESTART }", None, "as Caffe's `--snapshot`"),))
WARM_UP = ("warmup_iter", "warmup_start_lr")


def parent_of(stage: SolverStage, stages: Sequence[SolverStage]) -> SolverStage:
    """The stage it starts from; itself where that is none."""
    name = stage.step.parents[0].partition("@")[0] if stage.step.parents else ""
    return next((other for other in stages if other.step.name == name), stage)


def going_on(
    stage: SolverStage, before: SolverStage, made: Mapping[str, Setting], found: Findings
) -> dict[str, Setting]:
    """`made`, the settings of `stage`, with those that its start in the middle of things changes. `before` is its parent."""
    result = dict(made)
    resumed = stage.step.resumed
    if resumed is None:
        return result
    begins, view = resumed.iteration, View(stage.text.block)
    end, policy = view.whole("max_iter") or 0, view.text("lr_policy") or ""
    length = f"{end} of Caffe's, from {begins} on"
    result["max_iter"] = _said(made["max_iter"], str(end - begins), length)
    if (view.whole("warmup_iter") or 0) <= begins:
        for name in WARM_UP:
            if result.pop(name, None):
                found.idle[f"{name} of {stage.step.name}"] = f"the stage begins at iteration {begins}, after it"
    if policy != "fixed" or "warmup_iter" in result:
        place = view.place("lr_policy")
        result["policy_start_iter"] = setting("policy_start_iter", str(begins), place, "as Caffe counts")
    if policy == "poly":  # whose own end is that of the stage
        result["lr_policy"] = _said(made["lr_policy"], '"poly_cyc"', "Caffe's poly, of which this is the end")
        result["lr_iter"] = setting("lr_iter", str(end), view.place("max_iter"))
    _note_steps(stage, before, begins, found)
    _note_intervals(view, [n for n in LOOKING if n in made], begins, end, found)
    carry = BOTH if made.get("carry") == AS_CAFFE else KEPT
    result["carry"] = Setting("carry", tuple(Line(c.text, resumed.span, c.comment) for c in carry.lines))
    return result


def _said(before: Setting, value: str, comment: str) -> Setting:
    """A setting with another value; the comments of Caffe's file stay."""
    line = before.lines[0]
    both = f"{comment}; {line.comment}" if line.comment else comment
    return setting(before.name, value, line.span, both, before.above)


def _note_steps(stage: SolverStage, before: SolverStage, begins: int, found: Findings) -> None:
    """Policies that remember how often they have dropped the rate: Caffe takes that from the snapshot."""
    view, old = View(stage.text.block), View(before.text.block)
    place = view.place("lr_policy")
    if view.text("lr_policy") == "plateau":
        why = "Caffe goes on with the lowest loss and the drops of the snapshot; the stage begins with none"
        found.leave(place, "plateau", why, "write the base_lr that it had come to")
    elif view.text("lr_policy") == "multistep" and _steps(view, begins) != _steps(old, begins):
        why = (
            f"{_steps(view, begins)} steps are done at iteration {begins}, and Caffe goes on with those of the snapshot"
        )
        found.leave(place, "multistep", why, "compare the rates of the stage with Caffe's log")


def _steps(view: View, begins: int) -> int | None:
    """How many steps a solver has done at an iteration; None where that depends on the loss."""
    policy = view.text("lr_policy")
    if policy == "multistep":
        return sum(value < begins for value in view.numbers("stepvalue"))
    if policy == "step":
        return (begins - 1) // (view.whole("stepsize") or 1)
    return None if policy == "plateau" else 0


def _note_intervals(view: View, names: Sequence[str], begins: int, end: int, found: Findings) -> None:
    """What Caffe does at multiples of its own count, where the stage's are others and there are any."""
    for name in names:
        every = view.whole(name) or 0
        caffes = every and (end - 1) // every > begins // every
        if every and begins % every and (caffes or every < end - begins):
            why = f"it counts from the start of the stage, Caffe's iteration {begins}, and Caffe from the first one"
            found.leave(view.place(name), name, why)
