"""Settings of a stage from Caffe's solver file, its net and its start. Pure."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from stagerun import schedule
from stagerun.base.errors import nearest
from stagerun.base.recipe import Solver
from stagerun.caffe.importer.folder import (
    GAP,
    CaffeFolder,
    Images,
    Settings,
    SolverText,
    message,
    of_type,
    setting,
    value_of,
    with_comment,
)
from stagerun.caffe.importer.order import ALONE, Step, Workers
from stagerun.caffe.text import NetText
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


def check_solver(solver: SolverText, folder: CaffeFolder) -> None:
    """Report fields of a solver that can't be imported or are missing; `check` finds other mistakes in the written files."""
    entries, add = solver.block.entries, folder.mistakes.add
    net = ("train_net" if "train_net" in entries else "net", '"train_val.prototxt"')
    for name, example in (net, ("base_lr", "0.1"), ("lr_policy", '"fixed"'), ("max_iter", "1000")):
        with suppress(Doubtful):
            if solver.scalar(name) in (None, ""):
                add(solver.place(name), f"the solver has no `{name}`", f"write `{name}: {example}`")
    for name in entries.keys() & {*NETS}:
        hint = "write one net, of the layers of both phases, and name it as `net`"
        add(entries[name].name, f"`{name}` is not imported", hint)
    with suppress(Doubtful):
        for name in ("iter_size", "max_iter"):
            if solver.has(name) and solver.whole(name) < 1:
                add(solver.place(name), f"`{name}` must be at least 1")
        policy, kind = solver.text("lr_policy") or "fixed", solver.text("type") or ""
        for name, value, values in (("lr_policy", policy, POLICIES), ("type", kind, CAFFES_TYPES)):
            if value not in values:
                hint = nearest(value, values) or "values: " + ", ".join(values)
                add(solver.place(name), f"`{name}` has no value `{value}`", hint)
        for one, other in (("solver_type", "type"), ("train_net", "net")):
            if solver.has(one) and solver.has(other):
                add(solver.place(one), f"`{one}` and `{other}`, which Caffe refuses", f"take `{one}` out")


@dataclass(slots=True)
class CaffeStage:
    """A stage to import. `text`: of its net, and `file`: the name of the net's copy. `layers`: of training. `val`: None if no layer reads
    images in TEST. `made`: its settings so far."""

    folder: CaffeFolder
    step: Step
    solver: SolverText
    net: NetText
    text: str
    layers: list[Block]
    train: Images
    val: Images | None
    file: str
    workers: Workers = ALONE
    made: Settings = field(default_factory=dict)

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

    def model(self, channels: int | None) -> str:
        """Return the inside of `model`."""
        lines = [f"caffe_net: {quoted(self.file)}"]
        lines += [f"channels: {channels}"] if channels is not None else []
        # Several workers each move the statistics of BatchNorm once a pass, and average them.
        if self.workers.number != 1 and of_type(self.layers, "BatchNorm"):
            if not self.train.shuffle:
                why = "with BatchNorm, consecutive records share a device batch here; in Caffe, worker r of R takes every R-th record"
                self.folder.leave(self.train.settings.place("source"), "source", why)
            passes = self.passes * (self.train.batch // self.device_batch)
            moves = f"batch_norm_param {{ moving_average_passes: {passes} }}"
            lines.append(with_comment(moves, "once a pass, whatever the number of workers"))
        return "\n".join(lines)

    def add_solver(self) -> None:
        """Add the settings of the solver's fields. The text has no mistakes."""
        solver, entries, made = self.solver, self.solver.block.entries, self.made
        policy = solver.text("lr_policy") or ""
        if policy == "multistep" and not solver.numbers("stepvalue"):
            policy = "fixed"
        unread = {*OF_POLICY} - {*schedule.policy_fields(policy)}
        for name, entry in entries.items():
            if name in (*OF_STAGE, *UPDATE, *LOOKING, "type", "clip_gradients") and name not in unread and entry.values:
                self.put(name, value_of(entry), solver.comment(name))
            elif name in NOT_CARRIED:
                self.folder.leave(entry.place, name, NOT_CARRIED[name])
        if policy != solver.text("lr_policy"):
            self.put("lr_policy", quoted(policy), "multistep without a `stepvalue`")
        if "power" not in unread:
            made.setdefault("power", setting("power", "0", "Caffe's default"))
        if "solver_type" in entries:  # SGD, NESTEROV, ...
            kind = next(one for one in CAFFES_TYPES if one.upper() == solver.text("solver_type"))
            self.put("type", quoted(kind), solver.comment("solver_type"))
        # Caffe clips and fits layer-wise rates by the sum over iter_size, stagerun by the mean.
        limit = solver.number("clip_gradients") or 0.0
        if limit < 0:  # no clipping
            made.pop("clip_gradients", None)
        elif "clip_gradients" in made and self.passes > 1:
            comment = f"{value_of(entries['clip_gradients'])} of Caffe's, over iter_size {self.passes}"
            self.put("clip_gradients", repr(limit / self.passes), comment)
        if solver.flag("local_lr_auto") and self.passes > 1:
            self.put("local_lr_passes", str(self.passes), "Caffe's iter_size")
        # A stage must not end within its warm-up: for such a solver, a shorter ramp with the same rates.
        warm_up, end = solver.whole("warmup_iter"), solver.whole("max_iter")
        if 0 < end < warm_up:
            base_lr, start = solver.number("base_lr") or 0.0, solver.number("warmup_start_lr") or 0.0
            comment = f"reached by the warm-up of {warm_up} iterations to {base_lr:g}"
            self.change("base_lr", repr(start + (base_lr - start) * end / warm_up), comment)
            self.change("warmup_iter", str(end), f"Caffe's {warm_up}, but the stage ends earlier")

    def put(self, name: str, value: str, comment: str = "") -> None:
        self.made[name] = setting(name, value, comment)

    def change(self, name: str, value: str, comment: str) -> None:
        """Change a setting's value; keep the comments of Caffe's file."""
        before = self.made[name].partition(f"{GAP}# ")[2]
        self.put(name, value, f"{comment}; {before}" if before else comment)

    def add_batch(self) -> None:
        """Add batch_size over the whole job, and device_batch_size. Several nodes don't clip."""
        batch, number = self.train.batch, self.workers.number
        if self.workers.nodes and self.made.pop("clip_gradients", ""):
            why = "left out: Intel's Caffe on several nodes ignores it"
            self.folder.leave(self.solver.place("clip_gradients"), "clip_gradients", why)
        factors = [f"{number} workers"] if number > 1 else []
        factors += [f"iter_size {self.passes}"] if self.passes > 1 else []
        comment = " x ".join([str(batch), *factors]) if factors else ""
        self.put("batch_size", str(batch * self.passes * number), comment)
        self.put("device_batch_size", str(self.device_batch))

    def add_images(self, val: Images | None, total: int) -> None:
        """Add the transforms, and test_iter unless it covers all of `total` (0: unknown). `val`: for a net without a TEST layer."""
        solver, made = self.solver, self.made
        if self.train.transform:
            made["transform_param"] = message("transform_param", self.train.transform)
        if (test := self.val or val) is None:
            if made.pop("test_interval", ""):
                why = "no net has a layer that reads images in TEST"
                self.folder.leave(solver.place("test_interval"), "test_interval", why, "add `val` to `data`")
            return
        whole = with_comment("test_transform_param { }", "the whole image, unchanged")
        made["test_transform_param"] = message("test_transform_param", test.transform) if test.transform else whole
        self.put("test_batch_size", str(test.batch))
        passes = solver.numbers("test_iter")
        if passes and "test_interval" in made and (not total or passes[0] * test.batch < total):
            self.put("test_iter", str(passes[0]), solver.comment("test_iter"))

    def add_start(self, seed: str) -> None:
        """Add a seed other than the schedule's, and weights or a solverstate that no stage makes."""
        if self.seed not in ("", seed):
            self.put("random_seed", self.seed, self.solver.comment("random_seed"))
        if (word := self.step.start) is None or self.step.parents:
            return
        if not (file := self.folder.file(word.text)):
            self.folder.leave(
                word.span, word.text, "it is missing", "write its path: it starts at the schedule's folder"
            )
        path = quoted(file or word.text)
        if ".solverstate" in word.text:
            self.put("solverstate", path, "as Caffe's `--snapshot`")
        else:
            self.made["weights"] = with_comment(f"weights {{ file: {path} strict: false }}", "as Caffe's `--weights`")

    def start_from_snapshot(self) -> None:
        """Adapt the settings of a stage that starts from another solver's snapshot. Caffe inherits its count of iterations for the policy,
        the end, evaluations and snapshots (`Restore` of solver.cpp in sara-nl/caffe). A stage starts counting at 0."""
        begins, start, solver, made = self.step.begins, self.step.start, self.solver, self.made
        if not begins or start is None:
            return
        end, policy = solver.whole("max_iter"), solver.text("lr_policy") or ""
        self.change("max_iter", str(end - begins), f"Caffe's {end}, from {begins} on")
        if solver.whole("warmup_iter") <= begins:
            made.pop("warmup_iter", None)
            made.pop("warmup_start_lr", None)
        if policy != "fixed" or "warmup_iter" in made:
            self.put("policy_start_iter", str(begins), "as Caffe counts")
        if policy == "poly":  # ends with the stage
            self.change("lr_policy", '"poly_cyc"', "the rest of Caffe's poly")
            self.put("lr_iter", str(end))
        if any(solver.whole(name) for name in LOOKING if name in made) or policy in ("plateau", "multistep"):
            why = f"intervals count from the start of the stage, Caffe's iteration {begins}, and the previous solver's drops of the rate are not inherited"
            self.folder.leave(start.span, f"stage {self.name}", why, "compare its rates with Caffe's log")
        data = " data: RESTART" if made.get("carry") == RESTART else ""
        made["carry"] = with_comment(f"carry {{ momentum: KEEP{data} }}", "as Caffe's `--snapshot`")

    def overlap_rates(self, wanted: bool) -> None:
        """Write the rates of a build that applies the gradient of iteration i with the rate of i + 1, except at the end and before an
        evaluation: knots of base_lr 1. Without `wanted`, only list the difference."""
        solver, folder, made = self.solver, self.folder, self.made
        span, policy = solver.place("lr_policy"), solver.text("lr_policy")
        if not wanted or policy == "plateau":
            why = "Caffe's usual build for several nodes applies the gradient of iteration i with the rate of i + 1"
            todo = "`--overlap` writes these rates, except for plateau"
            if not any(left.endswith(todo) for left in folder.left):
                folder.leave(span, "lr_policy", f"{why}, and a snapshot in mid-training lacks one update", todo)
            return
        values: dict[str, Any] = dict.fromkeys(("batch_size", "device_batch_size", "test_batch_size", "random_seed"), 1)
        values["power"] = 0.0
        values |= {
            name: solver.scalar(name) for name in OF_STAGE if name in solver.block.entries and name != "stepvalue"
        }
        values["stepvalue"] = tuple(map(int, solver.numbers("stepvalue")))
        begins, end, every = self.step.begins, solver.whole("max_iter"), solver.whole("test_interval")
        try:
            knobs = schedule.make_knobs(Solver(**values))
            at_once = [i == end - 1 or (every > 0 and (i + 1) % every == 0) for i in range(begins, min(end, LONGEST))]
            rates = [knobs(i if now else i + 1).lr for i, now in enumerate(at_once, begins)]
        except (ValueError, ArithmeticError):
            return  # `check` names what is out of range
        rates.append(rates[-1])
        last = len(rates) - 1
        # Of a stretch with one rate, keep the first and last.
        kept = [i for i in range(last + 1) if i in (0, last) or not rates[i - 1] == rates[i] == rates[i + 1]]
        if len(kept) > MOST_KNOTS or end > LONGEST:
            folder.mistakes.add(
                span, f"`--overlap` has one knot for each of {end} iterations, too many", "leave it out"
            )
        for name in (*OF_POLICY, "warmup_iter", "warmup_start_lr", "policy_start_iter"):
            made.pop(name, None)
        self.put("base_lr", "1", f"Caffe's {values['base_lr']}, in the knots")
        self.put("lr_policy", '"piecewise_linear"', f"Caffe's {policy}, each gradient one iteration later")
        made["knot"] = "\n".join(f"knot {{ iter: {i} factor: {rates[i]!r} }}" for i in kept)


def note_sources(stages: Sequence[CaffeStage], val: Images | None) -> None:
    """List stages with other images than the first: a schedule has one `data`, and the user must write the others."""
    for stage in stages:
        train, test, first = stage.train, stage.val or val, stages[0].train
        other_val = test is not None and val is not None and test.source != val.source
        if (train.source, train.shuffle) != (first.source, first.shuffle) or other_val:
            why = f"stage {stage.name} reads other images than {stages[0].name}, or in another order"
            stage.folder.leave(train.settings.place("source"), "source", why, "write `data { ... }` in its file")


def note_norms(step: Step, trained: Sequence[Block], tested: Sequence[Block], folder: CaffeFolder) -> None:
    """List BatchNorm layers whose `use_global_stats` is unusual for their phase."""
    fresh = "the stage starts from fresh weights, whose statistics no pass has moved"
    batch = "an evaluation normalises by the batch, and depends on which images share one"
    for layers, value, why in ((() if step.parents or step.start else trained, True, fresh), (tested, False, batch)):
        for view in (View(layer).inside("batch_norm_param") for layer in of_type(layers, "BatchNorm")):
            if view.has("use_global_stats") and view.flag("use_global_stats") is value:
                folder.leave(view.place("use_global_stats"), "use_global_stats", why, "kept; is it intended?")


def overlap_starts(stages: Sequence[CaffeStage]) -> None:
    """Start stages from an overlapping build's snapshots: one update less, unless it was applied at once."""
    by_name = {stage.name: stage for stage in stages}
    for stage in stages:
        starts = []
        for parent in stage.step.parents:
            name, mark, iteration = parent.partition("@")
            before, done = by_name[name], int(iteration or 0)
            every = before.solver.whole("test_interval")
            late = before.workers.nodes and done > 1 and not (every and (before.step.begins + done) % every == 0)
            starts.append(f"{name}@{done - late}" if mark else parent)
        stage.step = stage.step._replace(parents=tuple(starts))
