"""What several nodes of Intel's Caffe do otherwise than one: gradients that wait, and BatchNorm's statistics. Pure."""

import ast
from collections.abc import Mapping, Sequence

from stagerun.base.recipe import Solver
from stagerun.language.tree import Block
from stagerun.language.view import View
from stagerun.schedule import make_knobs
from stagerun.tools.caffe.order import Step, Workers
from stagerun.tools.caffe.settings import OF_POLICY, OF_STAGE, CaffeStage, SolverStage, passes_of
from stagerun.tools.caffe.text import Findings, Line, Setting, of_type, setting

LONGEST, MOST_KNOTS = 1_000_000, 15_000  # iterations, and knots of a file


def norm_lines(stage: CaffeStage, workers: Workers, found: Findings) -> tuple[Line, ...]:
    """Caffe's workers each move their own statistics once a pass, and average them: so one pass moves them for all workers."""
    if workers.number == 1 or not any(of_type(stage.layers, "BatchNorm")):
        return ()
    if not stage.train.shuffle:
        why = "with BatchNorm, records in a row share a device batch here; Caffe deals them out, worker r of R takes every R-th"
        found.leave(stage.train.source_place, "source", why)
    text = f"batch_norm_param {{ moving_average_passes: {passes_of(stage)} }}"
    return (Line(text, stage.net.place, "once a pass, whatever the number of workers"),)


def note_norms(step: Step, trained: Sequence[Block], tested: Sequence[Block], found: Findings) -> None:
    """List BatchNorm layers with another `use_global_stats` than their phase has."""
    fresh = "the stage starts from fresh weights, and no pass has moved them"
    own = "an evaluation normalises by its own batch, and depends on which images share one"
    for layers, value, why in ((() if step.parents or step.start else trained, True, fresh), (tested, False, own)):
        for view in (View(layer).inside("batch_norm_param") for layer in of_type(layers, "BatchNorm")):
            if view.has("use_global_stats") and view.flag("use_global_stats") is value:
                found.leave(view.place("use_global_stats"), "use_global_stats", why, "carried over; is it meant?")


def overlapped_rates(
    stage: CaffeStage, made: Mapping[str, Setting], wanted: bool, found: Findings
) -> Mapping[str, Setting]:
    """The settings with the rates of a build that overlaps gradients with the next forward pass: that of iteration i is applied in
    iteration i + 1, with its rate, but at once at the end and before an evaluation. Knots of base_lr 1 are these rates. Without
    `wanted` they are listed."""
    view = View(stage.text.block)
    place, policy = view.place("lr_policy"), view.text("lr_policy")
    if not wanted or policy == "plateau":
        why = "Caffe's usual build for several nodes applies the gradient of iteration i with the rate of i + 1"
        todo = "`--overlap` writes these rates" if not wanted else "those of plateau depend on the loss, and stay"
        if all(left.todo != todo for left in found.left):
            found.leave(place, "lr_policy", f"{why}, and a snapshot in mid-training lacks one update", todo)
        return made
    names = [name for name in (*OF_STAGE, "policy_start_iter") if name in made]
    try:
        said = {name: ast.literal_eval(made[name].value[0].partition(": ")[2].rstrip("fF")) for name in names}
        said = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
        knobs = make_knobs(Solver(batch_size=1, device_batch_size=1, test_batch_size=1, random_seed=0, **said))
        end, every = said["max_iter"], view.whole("test_interval") or 0
        at_once = {end - 1, *(range(every - 1 - stage.step.begins % every, end, every) if every else ())}
        rates = [knobs(i if i in at_once else i + 1).lr for i in range(min(end, LONGEST))]
    except (ValueError, SyntaxError, ArithmeticError):
        return made  # `check` names what is out of range
    rates.append(rates[-1])
    last = len(rates) - 1
    # Of a stretch with one rate the first and last are enough.
    kept = [i for i in range(last + 1) if i in (0, last) or not rates[i - 1] == rates[i] == rates[i + 1]]
    if len(kept) > MOST_KNOTS or end > LONGEST:
        found.mistakes.add(place, f"`--overlap` has one knot for each of {end} iterations, too many", "leave it out")
    knots = tuple(Line(f"knot {{ iter: {i} factor: {rates[i]!r} }}", place) for i in kept)
    base = setting("base_lr", "1", made["base_lr"].lines[0].span, f"Caffe's {said['base_lr']}, in the knots")
    kind = setting("lr_policy", '"piecewise_linear"', place, f"Caffe's {policy}, each gradient one iteration later")
    gone = {*OF_POLICY, "warmup_iter", "warmup_start_lr", "policy_start_iter"}
    new = {"base_lr": base, "lr_policy": kind, "knot": Setting("knot", knots)}
    return {name: s for name, s in made.items() if name not in gone} | new


def overlapped_start(stage: SolverStage, before: SolverStage, nodes: bool) -> Step:
    """The step with the start that an overlapping build's snapshot is: one update less, but where it was applied at once. `nodes`:
    whether `before`, the parent, had several."""
    every = View(before.text.block).whole("test_interval") or 0

    def start(parent: str) -> str:
        name, mark, iteration = parent.partition("@")
        done = int(iteration or 0)
        late = nodes and done > 1 and not (every and (before.step.begins + done) % every == 0)
        return f"{name}{mark}{done - late}" if mark else parent

    return stage.step._replace(parents=tuple(map(start, stage.step.parents)))
