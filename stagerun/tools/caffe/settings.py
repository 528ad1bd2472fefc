"""A solver file of Caffe's -> the settings of a stage; and what its net, solver and start say together. Pure."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from stagerun import schedule
from stagerun.base.errors import Span, nearest
from stagerun.language.tree import Block, Entry, quoted
from stagerun.language.view import Doubtful, View
from stagerun.tools.caffe.images import Images
from stagerun.tools.caffe.order import Step, Workers
from stagerun.tools.caffe.text import CaffeText, Findings, Line, Setting, message, setting, written
from stagerun.tools.caffe.whole import Written

# Fields with the same name and meaning, in the order in which they are written. What makes a stage comes first, and always
# stands in the stage's own file.
OF_STAGE = (
    "base_lr", "lr_policy", "gamma", "power", "stepsize", "stepvalue", "lr_iter", "plateau_winsize", "average_loss", "max_iter",
    "warmup_iter", "warmup_start_lr",
)  # fmt: skip
UPDATE = (
    "momentum", "momentum2", "rms_decay", "delta", "weight_decay", "regularization_type", "local_lr_auto", "local_gw_ratio",
)  # fmt: skip
LOOKING = ("display", "test_interval", "snapshot")
POLICIES = ("fixed", "step", "exp", "inv", "multistep", "poly", "poly_cyc", "sigmoid", "plateau")
# Fields that a policy may read, and that are left out where it does not.
OF_POLICY = ("gamma", "power", "stepsize", "stepvalue", "lr_iter", "plateau_winsize", "average_loss")
# Fields of policies that are 0 or empty in Caffe where a solver has none: `multistep` is then `fixed`.
UNWRITTEN = ("power", "stepvalue")
# The values of BVLC's deprecated solver_type.
TYPES = {
    "SGD": "SGD", "NESTEROV": "Nesterov", "ADAGRAD": "AdaGrad", "RMSPROP": "RMSProp", "ADADELTA": "AdaDelta", "ADAM": "Adam",
}  # fmt: skip
# Fields that are read elsewhere: what they name, the batch, and what is converted.
ELSEWHERE = (
    *("net", "train_net", "test_net", "net_param", "train_net_param", "test_net_param", "train_state", "test_state"),
    *("iter_size", "random_seed", "clip_gradients", "test_iter", "type", "solver_type"),
)
# Fields without which nothing is lost, and why.
IDLE = {
    "snapshot_prefix": "snapshots go to the output folder",
    "snapshot_after_train": "a stage always ends with a snapshot",
    "snapshot_diff": "a snapshot holds weights, momentum and place",
    "snapshot_format": "snapshots have one format",
    "solver_mode": "where it is computed is chosen on the command line",
    "device_id": "where it is computed is chosen on the command line",
    "test_initialization": "there is no evaluation before the first update",
    "test_compute_loss": "an evaluation always has the loss",
    "debug_info": "it is for looking inside",
    "engine": "which library computes is not part of a recipe",
    "ap_version": "it is about detection",
    "show_per_class_result": "it is about detection",
}
NOT_CARRIED = {"disabled_update": ("stagerun always updates", ""), "eval_type": ("stagerun classifies images", "")}


def check_solver(text: CaffeText, nets: bool, found: Findings) -> None:
    """What is missing in a solver, or can't be. `nets`: whether its net is to be read."""
    view, block = View(text.block), text.block
    if nets:
        _check_nets(text, found)

    def lacks(name: str) -> bool:
        return not (block.broken or name in block.doubtful or (name in block.entries and block.entries[name].values))

    for name, example in (("base_lr", "0.1"), ("lr_policy", '"fixed"'), ("max_iter", "1000")):
        if lacks(name):
            found.mistakes.add(block.place, f"the solver has no `{name}`", f"write `{name}: {example}`")
    with suppress(Doubtful):
        if (view.whole("iter_size") or 0) < 1:
            found.mistakes.add(view.place("iter_size"), "`iter_size` must be at least 1", "leave it out for 1")
        place, policy = view.place("lr_policy"), view.text("lr_policy")
        if policy is not None and policy not in POLICIES:
            hint = nearest(policy, POLICIES) or "known: " + ", ".join(POLICIES)
            found.mistakes.add(place, f"`lr_policy` has no value `{policy}`", hint)
        for name in schedule.policy_fields(policy) if policy in POLICIES else ():
            if name in OF_POLICY and name not in ("average_loss", *UNWRITTEN) and lacks(name):
                found.mistakes.add(place, f"lr_policy `{policy}` needs `{name}`", f"write `{name}: ...`")


def _check_nets(text: CaffeText, found: Findings) -> None:
    """Exactly one net to train, as in Caffe."""
    entries, doubtful = text.block.entries, text.block.doubtful
    fields = ("net", "train_net", "net_param", "train_net_param")
    named = [entries[name] for name in fields if name in entries and name not in doubtful]
    if not named and not doubtful & {"net", "train_net"}:
        found.mistakes.add(text.block.place, "the solver names no net", 'write `net: "train_val.prototxt"`')
    for entry in named[1:]:
        message = f"`{entry.field.name}` and `{named[0].field.name}` both name the net to train"
        found.mistakes.add(entry.name, message, f"keep one of them; the other stands in line {named[0].name.line}")


def solver_settings(text: CaffeText, found: Findings) -> dict[str, Setting]:
    """The settings that the solver's own fields make, by the name of stagerun's field. The text has no mistakes."""
    view, result = View(text.block), {}
    policy = written_policy = view.text("lr_policy") or ""
    if policy == "multistep" and not view.numbers("stepvalue"):
        policy = "fixed"
    for name, entry in text.block.entries.items():
        if not entry.values:
            continue
        if name in OF_POLICY and name not in schedule.policy_fields(policy):
            found.idle[name] = f"lr_policy {policy} does not read it"
        elif name in (*OF_STAGE, *UPDATE, *LOOKING):
            result[name] = _carried(text, entry, written(entry))
        elif name in IDLE:
            found.idle[name] = IDLE[name]
        elif name in NOT_CARRIED:
            found.leave(entry.place, name, *NOT_CARRIED[name])
    place = view.place("lr_policy")
    if policy != written_policy:
        result["lr_policy"] = setting("lr_policy", quoted(policy), place, f"{written_policy} without a `stepvalue`")
    if "power" in schedule.policy_fields(policy) and "power" not in result:
        result["power"] = setting("power", "0", place, "Caffe's, where the solver has none")
    result |= _type(text, found) | _summed(text)
    return result | _warm_up_cut_short(view, result)


def _warm_up_cut_short(view: View, made: dict[str, Setting]) -> dict[str, Setting]:
    """A shorter ramp with the same rates, for a solver that ends within its warm-up: a stage must not."""
    warm_up, end = (view.whole(name) or 0 for name in ("warmup_iter", "max_iter"))
    base_lr = view.number("base_lr") or 0.0
    if not 0 < end < warm_up:
        return {}
    start = view.number("warmup_start_lr") or 0.0
    reached = start + (base_lr - start) * end / warm_up
    comment = f"the warm-up of {warm_up} iterations to {base_lr:g} comes to this"
    return {
        "base_lr": _said(made["base_lr"], repr(reached), comment),
        "warmup_iter": _said(made["warmup_iter"], str(end), f"{warm_up} of Caffe's, which ends before"),
    }


def _carried(text: CaffeText, entry: Entry, value: str, name: str = "") -> Setting:
    return setting(name or entry.field.name, value, entry.place, text.beside(entry))


def _type(text: CaffeText, found: Findings) -> dict[str, Setting]:
    entry, older = text.block.entries.get("type"), text.block.entries.get("solver_type")
    if entry is None:
        return {"type": _carried(text, older, quoted(TYPES[str(older.values[0].value)]), "type")} if older else {}
    if older is not None:
        message = "`solver_type` beside `type`, which Caffe refuses"
        found.mistakes.add(older.place, message, "take the older word out: `solver_type`")
    kind = str(entry.values[0].value)
    if kind not in TYPES.values():
        hint = nearest(kind, TYPES.values()) or "known: " + ", ".join(TYPES.values())
        found.mistakes.add(entry.place, f"`type` has no value `{kind}`", hint)
    return {"type": _carried(text, entry, quoted(kind))}


def _summed(text: CaffeText) -> dict[str, Setting]:
    """Caffe clips and fits layer-wise rates by the sum over iter_size, stagerun by the mean. A threshold below 0 is no clipping."""
    view, entry, result = View(text.block), text.block.entries.get("clip_gradients"), {}
    passes, limit = view.whole("iter_size") or 1, view.number("clip_gradients")
    if entry and passes == 1 and (limit or 0) >= 0:
        result["clip_gradients"] = _carried(text, entry, written(entry))
    elif entry and limit is not None and limit >= 0:
        said = f"{written(entry)} of Caffe's, over iter_size {passes}"
        result["clip_gradients"] = setting("clip_gradients", repr(limit / passes), entry.place, said)
    if view.flag("local_lr_auto") and passes > 1:
        result["local_lr_passes"] = setting(
            "local_lr_passes", str(passes), view.place("iter_size"), "Caffe's iter_size"
        )
    return result


# For stages that continue from another, where what order images have is nothing random, or is made by the solver's seed.
AS_CAFFE = Setting("carry", (Line("carry { data: RESTART }", None, "as Caffe: from the first image"),))


@dataclass(frozen=True, slots=True)
class SolverStage:
    """A stage with its solver as read."""

    step: Step
    text: CaffeText


@dataclass(frozen=True, slots=True)
class CaffeStage(SolverStage):
    """One with its net. `layers` are those of training; `val` is None where no layer reads images in TEST."""

    net: Block
    layers: list[Block]
    train: Images
    val: Images | None
    written: Written


def seeds(stages: Sequence[SolverStage]) -> tuple[Line, dict[str, dict[str, Setting]]]:
    """Schedule.seed, and those of stages that differ. Caffe draws a seed from the clock where the solver has none."""
    said = {}
    for stage in stages:
        entry = stage.text.block.entries.get("random_seed")
        value = entry.values[0].value if entry else None
        if entry and isinstance(value, int) and value >= 0:
            said[stage.step.name] = (entry, stage.text.beside(entry))
    if not said:
        return Line("seed: 1"), {}
    texts = Counter(e.values[0].text for e, _ in said.values())
    usual = texts.most_common(1)[0][0]
    place = next(e.place for e, _ in said.values() if e.values[0].text == usual)
    own = {
        name: {"random_seed": setting("random_seed", e.values[0].text, e.place, comment)}
        for name, (e, comment) in said.items()
        if e.values[0].text != usual
    }
    return Line(f"seed: {usual}", place, "Caffe's random_seed"), own


def note_sources(stages: Sequence[CaffeStage], val: Images | None, found: Findings) -> None:
    """One LMDB is trained on in all stages, and one evaluated: which of the others go on with which is for the user to say."""
    first = stages[0].train
    for stage in stages:
        if stage.train.source != first.source:
            why = f"stage {stage.step.name} reads other images than {stages[0].step.name}; `data {{ train {{ ... }} }}` in its file says so"
            found.leave(stage.train.source_place, "source", why, f"it is trained on {first.source}")
        if stage.train.shuffle != first.shuffle:
            why = f"stage {stage.step.name} differs from {stages[0].step.name}, and a schedule has one `data`"
            found.leave(stage.train.layer.place, "shuffle", why)
        if stage.val is not None and val is not None and stage.val.source != val.source:
            why = f"stage {stage.step.name} evaluates other images; `data {{ val {{ ... }} }}` in its file says so"
            found.leave(stage.val.source_place, "source", why, f"it is evaluated on {val.source}")
    for images in (first, val):
        if images is not None and ("%#" in images.source or "%*" in images.source):
            why = "Intel's marks for the number of the worker: each had a part of its own, and stagerun reads one LMDB"
            found.leave(images.source_place, "source", why)


def _device_batch(stage: CaffeStage) -> tuple[int, Span]:
    """Images over which BatchNorm normalises."""
    part, size = View(stage.net).whole("bn_stats_batch_size") or 0, stage.train.batch or 1
    fits = part > 0 and size % part == 0
    return (part, stage.net.entries["bn_stats_batch_size"].place) if fits else (size, stage.train.batch_place)


def passes_of(stage: CaffeStage) -> int:
    """How often a worker of Caffe's moves BatchNorm's statistics in an iteration."""
    return (View(stage.text.block).whole("iter_size") or 1) * ((stage.train.batch or 1) // _device_batch(stage)[0])


def batch(stage: CaffeStage, workers: Workers, made: dict[str, Setting], found: Findings) -> list[Setting]:
    """batch_size over the whole job, and device_batch_size. Takes a clip of several nodes out of `made`."""
    images, passes, (device, place) = stage.train, View(stage.text.block).whole("iter_size") or 1, _device_batch(stage)
    assert images.batch is not None
    if (part := View(stage.net).whole("bn_stats_batch_size") or 0) and part != device:
        why = f"{part} does not divide the batch of {images.batch}; BatchNorm takes the statistics of one device batch"
        found.leave(stage.net.entries["bn_stats_batch_size"].place, "bn_stats_batch_size", why)
    factors = [str(images.batch), *([f"{workers.number} workers"] if workers.number > 1 else [])]
    factors += [f"iter_size {passes}"] if passes > 1 else []
    if workers.nodes and "clip_gradients" in made:
        why = "left out: Intel's Caffe on several nodes does not clip, whatever this says"
        found.leave(made.pop("clip_gradients").lines[0].span or place, "clip_gradients", why)
    size, comment = images.batch * passes * workers.number, " x ".join(factors) if len(factors) > 1 else ""
    return [
        setting("batch_size", str(size), images.batch_place, comment),
        setting("device_batch_size", str(device), place),
    ]


def transforms(stage: CaffeStage, val: Images | None) -> list[Setting]:
    """The transforms. A net without a TEST layer is evaluated as the first one that has it says."""
    result = []
    if stage.train.transform:
        lines = message("transform_param", stage.train.transform, stage.train.layer.place)
        result.append(Setting("transform_param", lines))
    test = stage.val or val
    if test is not None:
        lines = message("test_transform_param", test.transform, test.layer.place) if test.transform else ()
        if not lines:
            lines = (Line("test_transform_param { }", test.layer.place, "the whole image, as it is"),)
        result.append(Setting("test_transform_param", lines))
        if test.batch:
            result.append(setting("test_batch_size", str(test.batch), test.batch_place))
    return result


def seeded(stage: SolverStage) -> bool:
    view = View(stage.text.block)
    return view.has("random_seed") and (view.whole("random_seed") or 0) >= 0


def evaluation(stage: CaffeStage, val: Images | None, made: dict[str, Setting], total: int, found: Findings) -> None:
    """Adds test_iter to `made` where it is not every image of `total` (0: not known), and takes the interval out of it where
    there is no TEST layer."""
    entry = stage.text.block.entries.get("test_iter")
    interval = made.get("test_interval")
    if val is None:
        made.pop("test_interval", None)
        for place, name in (
            (interval and interval.lines[0].span, "test_interval"),
            (entry and entry.place, "test_iter"),
        ):
            if place:
                found.leave(place, name, "no net has a layer that reads images in TEST", "add `val` to `data`")
        return
    if entry is None or not entry.values or interval is None:
        return
    if len(entry.values) > 1:
        found.leave(entry.values[1].span, "test_iter", "one evaluation is made; the first is taken")
    passes, batch = entry.values[0].value, (stage.val or val).batch
    assert isinstance(passes, int)
    if total and batch and passes * batch >= total:
        if passes * batch > total:
            why = f"{passes} passes of {batch} images are more than there are; Caffe counts some of them twice"
            found.leave(entry.place, "test_iter", why, f"each of the {total} images is evaluated once")
        return
    made["test_iter"] = setting("test_iter", entry.values[0].text, entry.place, stage.text.beside(entry))


# -- a stage that in Caffe went on from another solver's snapshot


def parent_of(stage: SolverStage, stages: Sequence[SolverStage]) -> SolverStage:
    """The stage it starts from; itself if there is none."""
    name = stage.step.parents[0].partition("@")[0] if stage.step.parents else ""
    return next((other for other in stages if other.step.name == name), stage)


def go_on(stage: SolverStage, made: dict[str, Setting], found: Findings) -> None:
    """Changes in `made`, the settings of `stage`, what its start in the middle of things changes.

    Caffe takes over weights, momentum, and the count of iterations, by which it reads its policy, ends, evaluates and saves
    (`Restore` of solver.cpp and sgd_solver.cpp in sara-nl/caffe). A stage counts from its own start.
    """
    begins, view = stage.step.begins, View(stage.text.block)
    if not begins or stage.step.start is None:
        return
    end, policy = view.whole("max_iter") or 0, view.text("lr_policy") or ""
    made["max_iter"] = _said(made["max_iter"], str(end - begins), f"{end} of Caffe's, from {begins} on")
    if (view.whole("warmup_iter") or 0) <= begins:
        for name in ("warmup_iter", "warmup_start_lr"):
            if made.pop(name, None):
                found.idle[f"{name} of {stage.step.name}"] = f"the stage begins at iteration {begins}, after it"
    if policy != "fixed" or "warmup_iter" in made:
        place = view.place("lr_policy")
        made["policy_start_iter"] = setting("policy_start_iter", str(begins), place, "as Caffe counts")
    if policy == "poly":  # whose own end is that of the stage
        made["lr_policy"] = _said(made["lr_policy"], '"poly_cyc"', "Caffe's poly, of which this is the end")
        made["lr_iter"] = setting("lr_iter", str(end), view.place("max_iter"))
    if any(view.whole(name) for name in LOOKING if name in made) or policy in ("plateau", "multistep"):
        why = f"intervals count from the start of the stage, Caffe's iteration {begins}, and drops of the rate by the solver before are not taken over"
        found.leave(stage.step.start.span, f"stage {stage.step.name}", why, "compare its rates with Caffe's log")
    carry = "carry { momentum: KEEP data: RESTART }" if made.get("carry") == AS_CAFFE else "carry { momentum: KEEP }"
    made["carry"] = Setting("carry", (Line(carry, stage.step.start.span, "as Caffe's `--snapshot`"),))


def _said(before: Setting, value: str, comment: str) -> Setting:
    """A setting with another value; the comments of Caffe's file stay."""
    line = before.lines[0]
    both = f"{comment}; {line.comment}" if line.comment else comment
    return setting(before.name, value, line.span, both)
