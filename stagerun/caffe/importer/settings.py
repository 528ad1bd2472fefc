"""Settings of a stage from Caffe's solver file, its net and its start. Pure."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from stagerun import schedule
from stagerun.base.errors import nearest
from stagerun.base.recipe import Solver
from stagerun.caffe.importer.folder import (
    GAP,
    CaffeFolder,
    CaffeNet,
    Findings,
    Images,
    Settings,
    SolverText,
    message,
    of_type,
    setting,
    value_of,
    with_comment,
)
from stagerun.caffe.importer.order import Step, Workers
from stagerun.language.rules.stage import CAFFES_TYPES
from stagerun.language.tree import Block, Doubtful, View, quoted

POLICIES = ("fixed", "step", "exp", "inv", "multistep", "poly", "poly_cyc", "sigmoid", "plateau")
# Fields that a policy may read; left out if it doesn't.
OF_POLICY = ("gamma", "power", "stepsize", "stepvalue", "lr_iter", "plateau_winsize", "average_loss")
# Fields with the same name and meaning, in the order of writing; OF_STAGE always in the stage's file.
OF_STAGE = ("base_lr", "lr_policy", *OF_POLICY, "max_iter", "warmup_iter", "warmup_start_lr")
UPDATE = (
    "momentum", "momentum2", "rms_decay", "delta", "weight_decay", "regularization_type", "local_lr_auto", "local_gw_ratio",
)  # fmt: skip
LOOKING = ("display", "test_interval", "snapshot")
NETS = ("test_net", "net_param", "train_net_param", "test_net_param", "train_state", "test_state")
NOT_CARRIED = {"disabled_update": "stagerun always updates", "eval_type": "stagerun classifies images"}
# Stages that continue from another begin at the first image, as Caffe does, if the order isn't random or uses the solver's seed.
RESTART = with_comment("carry { data: RESTART }", "as Caffe: from the first image")

LONGEST, MOST_KNOTS = 1_000_000, 15_000  # iterations, and knots of a file


@dataclass(frozen=True, slots=True)
class CaffeStage:
    """A stage to import. `layers`: of training; `val`: None if no layer reads images in TEST. `file`: the name of the
    net's copy."""

    step: Step
    solver: SolverText
    net: CaffeNet
    layers: list[Block]
    train: Images
    val: Images | None
    file: str

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def passes(self) -> int:
        return self.solver.whole("iter_size")

    @property
    def seed(self) -> str:
        """Return the solver's seed; '' if Caffe seeds by the clock."""
        entry = self.solver.block.entries.get("random_seed")
        return value_of(entry) if entry is not None and self.solver.whole("random_seed") >= 0 else ""

    @property
    def device_batch(self) -> int:
        """Return the number of images over which BatchNorm normalises."""
        part = View(self.net.file).whole("bn_stats_batch_size") or 0
        return part if part > 0 and self.train.batch % part == 0 else self.train.batch


def check_solver(solver: SolverText, findings: Findings) -> None:
    """Report fields of a solver that can't be imported or are missing; `check` finds other mistakes in the written files."""
    view, block, mistakes = solver.view, solver.block, findings.mistakes
    net = ("train_net" if "train_net" in block.entries else "net", '"train_val.prototxt"')
    for name, example in (net, ("base_lr", "0.1"), ("lr_policy", '"fixed"'), ("max_iter", "1000")):
        with suppress(Doubtful):
            if view.scalar(name) in (None, ""):
                mistakes.add(view.place(name), f"the solver has no `{name}`", f"write `{name}: {example}`")
    for name in block.entries.keys() & {*NETS}:
        hint = "write one net, of the layers of both phases, and name it as `net`"
        mistakes.add(block.entries[name].name, f"`{name}` is not imported", hint)
    with suppress(Doubtful):
        for name in ("iter_size", "max_iter"):
            if view.has(name) and solver.whole(name) < 1:
                mistakes.add(view.place(name), f"`{name}` must be at least 1")
        policy, kind = view.text("lr_policy") or "fixed", view.text("type") or ""
        for name, value, values in (("lr_policy", policy, POLICIES), ("type", kind, CAFFES_TYPES)):
            if value not in values:
                hint = nearest(value, values) or "values: " + ", ".join(values)
                mistakes.add(view.place(name), f"`{name}` has no value `{value}`", hint)
        for one, other in (("solver_type", "type"), ("train_net", "net")):
            if view.has(one) and view.has(other):
                mistakes.add(view.place(one), f"`{one}` and `{other}`, which Caffe refuses", f"take `{one}` out")


def solver_settings(solver: SolverText, findings: Findings) -> Settings:
    """Return the settings of the solver's fields. The text has no mistakes."""
    view, entries, made = solver.view, solver.block.entries, Settings()
    policy = view.text("lr_policy") or ""
    if policy == "multistep" and not view.numbers("stepvalue"):
        policy = "fixed"
    unread = {*OF_POLICY} - {*schedule.policy_fields(policy)}
    for name, entry in entries.items():
        if name in (*OF_STAGE, *UPDATE, *LOOKING, "type", "clip_gradients") and name not in unread and entry.values:
            made[name] = setting(name, value_of(entry), solver.comment(name))
        elif name in NOT_CARRIED:
            findings.leave(entry.place, name, NOT_CARRIED[name])
    if policy != view.text("lr_policy"):
        made["lr_policy"] = setting("lr_policy", quoted(policy), "multistep without a `stepvalue`")
    if "power" not in unread:
        made.setdefault("power", setting("power", "0", "Caffe's default"))
    if "solver_type" in entries:  # SGD, NESTEROV, ...
        kind = next(one for one in CAFFES_TYPES if one.upper() == view.text("solver_type"))
        made["type"] = setting("type", quoted(kind), solver.comment("solver_type"))
    # Caffe clips and fits layer-wise rates by the sum over iter_size, stagerun by the mean.
    passes, limit = solver.whole("iter_size"), view.number("clip_gradients") or 0.0
    if limit < 0:  # no clipping
        made.pop("clip_gradients", None)
    elif "clip_gradients" in made and passes > 1:
        comment = f"{value_of(entries['clip_gradients'])} of Caffe's, over iter_size {passes}"
        made["clip_gradients"] = setting("clip_gradients", repr(limit / passes), comment)
    if view.flag("local_lr_auto") and passes > 1:
        made["local_lr_passes"] = setting("local_lr_passes", str(passes), "Caffe's iter_size")
    # A stage must not end within its warm-up: for such a solver, a shorter ramp with the same rates.
    warm_up, end = solver.whole("warmup_iter"), solver.whole("max_iter")
    if 0 < end < warm_up:
        base_lr, start = view.number("base_lr") or 0.0, view.number("warmup_start_lr") or 0.0
        comment = f"reached by the warm-up of {warm_up} iterations to {base_lr:g}"
        _change(made, "base_lr", repr(start + (base_lr - start) * end / warm_up), comment)
        _change(made, "warmup_iter", str(end), f"Caffe's {warm_up}, but the stage ends earlier")
    return made


def _change(made: Settings, name: str, value: str, comment: str) -> None:
    """Change a setting's value; keep the comments of Caffe's file."""
    before = made[name].partition(f"{GAP}# ")[2]
    made[name] = setting(name, value, f"{comment}; {before}" if before else comment)


def model_of(stage: CaffeStage, channels: int | None, workers: Workers, findings: Findings) -> str:
    """Return the inside of `model`."""
    lines = [f"caffe_net: {quoted(stage.file)}"]
    lines += [f"channels: {channels}"] if channels is not None else []
    # Several workers each move the statistics of BatchNorm once a pass, and average them.
    if workers.number != 1 and any(of_type(stage.layers, "BatchNorm")):
        if not stage.train.shuffle:
            why = "with BatchNorm, consecutive records share a device batch here; in Caffe, worker r of R takes every R-th record"
            findings.leave(stage.train.settings.place("source"), "source", why)
        passes = stage.passes * (stage.train.batch // stage.device_batch)
        moves = f"batch_norm_param {{ moving_average_passes: {passes} }}"
        lines.append(with_comment(moves, "once a pass, whatever the number of workers"))
    return "\n".join(lines)


def add_start(stage: CaffeStage, seed: str, folder: CaffeFolder, made: Settings, findings: Findings) -> None:
    """Add a seed other than the schedule's, and weights or a solverstate that no stage makes."""
    if stage.seed not in ("", seed):
        made["random_seed"] = setting("random_seed", stage.seed, stage.solver.comment("random_seed"))
    if (word := stage.step.start) is None or stage.step.parents:
        return
    if not (file := folder.file(word.text)):
        findings.leave(word.span, word.text, "it is missing", "write its path: it starts at the schedule's folder")
    path = quoted(file or word.text)
    if ".solverstate" in word.text:
        made["solverstate"] = setting("solverstate", path, "as Caffe's `--snapshot`")
    else:
        made["weights"] = with_comment(f"weights {{ file: {path} strict: false }}", "as Caffe's `--weights`")


def note_sources(stages: Sequence[CaffeStage], val: Images | None, findings: Findings) -> None:
    """List stages with other images than the first: a schedule has one `data`, and the user must write the others."""
    for stage in stages:
        train, test, first = stage.train, stage.val or val, stages[0].train
        other_val = test is not None and val is not None and test.source != val.source
        if (train.source, train.shuffle) != (first.source, first.shuffle) or other_val:
            why = f"stage {stage.name} reads other images than {stages[0].name}, or in another order"
            findings.leave(train.settings.place("source"), "source", why, "write `data { ... }` in its file")


def add_batch(stage: CaffeStage, workers: Workers, made: Settings, findings: Findings) -> None:
    """Add batch_size over the whole job, and device_batch_size. Several nodes don't clip."""
    batch = stage.train.batch
    if workers.nodes and made.pop("clip_gradients", ""):
        why = "left out: Intel's Caffe on several nodes ignores it"
        findings.leave(stage.solver.view.place("clip_gradients"), "clip_gradients", why)
    factors = [f"{workers.number} workers"] if workers.number > 1 else []
    factors += [f"iter_size {stage.passes}"] if stage.passes > 1 else []
    comment = " x ".join([str(batch), *factors]) if factors else ""
    made["batch_size"] = setting("batch_size", str(batch * stage.passes * workers.number), comment)
    made["device_batch_size"] = setting("device_batch_size", str(stage.device_batch))


def add_images(stage: CaffeStage, val: Images | None, total: int, made: Settings, findings: Findings) -> None:
    """Add the transforms, and test_iter unless it covers all of `total` (0: unknown). `val`: for a net without a TEST layer."""
    if stage.train.transform:
        made["transform_param"] = message("transform_param", stage.train.transform)
    entry = stage.solver.block.entries.get("test_iter")
    if (test := stage.val or val) is None:
        if made.pop("test_interval", ""):
            why = "no net has a layer that reads images in TEST"
            findings.leave(stage.solver.view.place("test_interval"), "test_interval", why, "add `val` to `data`")
        return
    whole = with_comment("test_transform_param { }", "the whole image, unchanged")
    made["test_transform_param"] = message("test_transform_param", test.transform) if test.transform else whole
    made["test_batch_size"] = setting("test_batch_size", str(test.batch))
    if entry is None or not entry.values or "test_interval" not in made:
        return
    passes = int(str(entry.values[0].value))
    if not total or passes * test.batch < total:
        made["test_iter"] = setting("test_iter", str(passes), stage.solver.comment("test_iter"))


def start_from_snapshot(stage: CaffeStage, made: Settings, findings: Findings) -> None:
    """Adapt the settings of a stage that starts from another solver's snapshot. Caffe inherits its count of iterations for the policy,
    the end, evaluations and snapshots (`Restore` of solver.cpp in sara-nl/caffe). A stage starts counting at 0."""
    begins, start = stage.step.begins, stage.step.start
    if not begins or start is None:
        return
    end, policy = stage.solver.whole("max_iter"), stage.solver.view.text("lr_policy") or ""
    _change(made, "max_iter", str(end - begins), f"Caffe's {end}, from {begins} on")
    if stage.solver.whole("warmup_iter") <= begins:
        made.pop("warmup_iter", None)
        made.pop("warmup_start_lr", None)
    if policy != "fixed" or "warmup_iter" in made:
        made["policy_start_iter"] = setting("policy_start_iter", str(begins), "as Caffe counts")
    if policy == "poly":  # ends with the stage
        _change(made, "lr_policy", '"poly_cyc"', "the rest of Caffe's poly")
        made["lr_iter"] = setting("lr_iter", str(end))
    if any(stage.solver.whole(name) for name in LOOKING if name in made) or policy in ("plateau", "multistep"):
        why = f"intervals count from the start of the stage, Caffe's iteration {begins}, and the previous solver's drops of the rate are not inherited"
        findings.leave(start.span, f"stage {stage.name}", why, "compare its rates with Caffe's log")
    data = " data: RESTART" if made.get("carry") == RESTART else ""
    made["carry"] = with_comment(f"carry {{ momentum: KEEP{data} }}", "as Caffe's `--snapshot`")


def note_norms(step: Step, trained: Sequence[Block], tested: Sequence[Block], findings: Findings) -> None:
    """List BatchNorm layers whose `use_global_stats` is unusual for their phase."""
    fresh = "the stage starts from fresh weights, whose statistics no pass has moved"
    batch = "an evaluation normalises by the batch, and depends on which images share one"
    for layers, value, why in ((() if step.parents or step.start else trained, True, fresh), (tested, False, batch)):
        for view in (View(layer).inside("batch_norm_param") for layer in of_type(layers, "BatchNorm")):
            if view.has("use_global_stats") and view.flag("use_global_stats") is value:
                findings.leave(view.place("use_global_stats"), "use_global_stats", why, "kept; is it intended?")


def overlapped_rates(stage: CaffeStage, made: Settings, wanted: bool, findings: Findings) -> Settings:
    """Return the settings with the rates of a build that applies the gradient of iteration i with the rate of i + 1, except at the end
    and before an evaluation: knots of base_lr 1. Without `wanted`, only list the difference."""
    view = stage.solver.view
    span, policy = view.place("lr_policy"), view.text("lr_policy")
    if not wanted or policy == "plateau":
        why = "Caffe's usual build for several nodes applies the gradient of iteration i with the rate of i + 1"
        todo = "`--overlap` writes these rates, except for plateau"
        if not any(left.endswith(todo) for left in findings.left):
            findings.leave(span, "lr_policy", f"{why}, and a snapshot in mid-training lacks one update", todo)
        return made
    values: dict[str, Any] = dict.fromkeys(("batch_size", "device_batch_size", "test_batch_size", "random_seed"), 1)
    values["power"] = 0.0
    values |= {name: view.scalar(name) for name in OF_STAGE if name in view.block.entries and name != "stepvalue"}
    begins, end, every = stage.step.begins, stage.solver.whole("max_iter"), stage.solver.whole("test_interval")
    try:
        steps = tuple(map(int, view.numbers("stepvalue")))
        knobs = schedule.make_knobs(Solver(stepvalue=steps, **values))
        at_once = [i == end - 1 or (every > 0 and (i + 1) % every == 0) for i in range(begins, min(end, LONGEST))]
        rates = [knobs(i if now else i + 1).lr for i, now in enumerate(at_once, begins)]
    except (ValueError, ArithmeticError):
        return made  # `check` names what is out of range
    rates.append(rates[-1])
    last = len(rates) - 1
    # Of a stretch with one rate, keep the first and last.
    kept = [i for i in range(last + 1) if i in (0, last) or not rates[i - 1] == rates[i] == rates[i + 1]]
    if len(kept) > MOST_KNOTS or end > LONGEST:
        findings.mistakes.add(span, f"`--overlap` has one knot for each of {end} iterations, too many", "leave it out")
    base = setting("base_lr", "1", f"Caffe's {values['base_lr']}, in the knots")
    kind = setting("lr_policy", '"piecewise_linear"', f"Caffe's {policy}, each gradient one iteration later")
    knots = "\n".join(f"knot {{ iter: {i} factor: {rates[i]!r} }}" for i in kept)
    gone = {*OF_POLICY, "warmup_iter", "warmup_start_lr", "policy_start_iter"}
    rest = {name: text for name, text in made.items() if name not in gone}
    return rest | {"base_lr": base, "lr_policy": kind, "knot": knots}


def overlapped_start(stage: CaffeStage, stages: Sequence[CaffeStage], workers: Mapping[str, Workers]) -> CaffeStage:
    """Return the stage with the start of an overlapping build's snapshot: one update less, unless it was applied at once."""
    starts = []
    for parent in stage.step.parents:
        name, mark, iteration = parent.partition("@")
        before = next(other for other in stages if other.name == name)
        every, done = before.solver.whole("test_interval"), int(iteration or 0)
        late = workers[name].nodes and done > 1 and not (every and (before.step.begins + done) % every == 0)
        starts.append(f"{name}@{done - late}" if mark else parent)
    return replace(stage, step=stage.step._replace(parents=tuple(starts)))
