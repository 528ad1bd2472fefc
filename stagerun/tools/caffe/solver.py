"""A solver file of Caffe's -> the settings of a stage, but for what its net says. Pure."""

from collections.abc import Iterable

from stagerun import schedule
from stagerun.base.errors import nearest
from stagerun.language.tree import Entry, quoted
from stagerun.language.view import Doubtful, View
from stagerun.tools.caffe.lines import Setting, setting, written
from stagerun.tools.caffe.text import CaffeText, Findings

# Fields with the same name and meaning, in the order in which they are written. What makes a stage comes first, and always
# stands in the stage's own file.
OF_STAGE = (
    "base_lr",
    "lr_policy",
    "gamma",
    "power",
    "stepsize",
    "stepvalue",
    "lr_iter",
    "plateau_winsize",
    "average_loss",
    "max_iter",
    "warmup_iter",
    "warmup_start_lr",
)
UPDATE = (
    "momentum",
    "momentum2",
    "rms_decay",
    "delta",
    "weight_decay",
    "regularization_type",
    "local_lr_auto",
    "local_gw_ratio",
)
LOOKING = ("display", "test_interval", "snapshot")
POLICIES = ("fixed", "step", "exp", "inv", "multistep", "poly", "poly_cyc", "sigmoid", "plateau")
# Fields that a policy may read, and that are left out where it does not.
OF_POLICY = ("gamma", "power", "stepsize", "stepvalue", "lr_iter", "plateau_winsize", "average_loss")
# The values of BVLC's deprecated solver_type.
TYPES = {
    "SGD": "SGD",
    "NESTEROV": "Nesterov",
    "ADAGRAD": "AdaGrad",
    "RMSPROP": "RMSProp",
    "ADADELTA": "AdaDelta",
    "ADAM": "Adam",
}
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
NOT_CARRIED = {
    "disabled_update": ("stagerun always updates", ""),
    "eval_type": ("stagerun classifies images", ""),
}


def check_solver(text: CaffeText, nets: bool, found: Findings) -> None:
    """What is missing in a solver, or can't be. `nets`: whether its net is to be read."""
    view = View(text.block)
    if nets:
        _check_nets(text, found)
    for name, example in (("base_lr", "0.1"), ("lr_policy", '"fixed"'), ("max_iter", "1000")):
        try:
            if not view.has(name):
                found.mistakes.add(text.block.place, f"the solver has no `{name}`", f"write `{name}: {example}`")
        except Doubtful:
            continue
    try:
        if (view.whole("iter_size") or 0) < 1 and view.has("iter_size"):
            found.mistakes.add(view.place("iter_size"), "`iter_size` must be at least 1", "leave it out for 1")
        _check_policy(view, found)
    except Doubtful:
        return


def _check_policy(view: View, found: Findings) -> None:
    policy = view.text("lr_policy")
    if policy is None:
        return
    place = view.place("lr_policy")
    if policy not in POLICIES:
        hint = nearest(policy, POLICIES) or "known: " + ", ".join(POLICIES)
        found.mistakes.add(place, f"`lr_policy` has no value `{policy}`", hint)
        return
    for name in schedule.policy_fields(policy):
        there = name in view.block.entries and bool(view.block.entries[name].values)
        if name in OF_POLICY and name != "average_loss" and not there and not _doubtful(view, name):
            found.mistakes.add(place, f"lr_policy `{policy}` needs `{name}`", f"write `{name}: ...`")


def _doubtful(view: View, name: str) -> bool:
    return view.block.broken or name in view.block.doubtful


def _check_nets(text: CaffeText, found: Findings) -> None:
    """Exactly one net to train, as in Caffe."""
    entries = text.block.entries
    named = [entries[n] for n in ("net", "train_net", "net_param", "train_net_param") if n in entries]
    named = [e for e in named if e.field.name not in text.block.doubtful]
    if not named and not text.block.doubtful & {"net", "train_net"}:
        found.mistakes.add(text.block.place, "the solver names no net", 'write `net: "train_val.prototxt"`')
    for entry in named[1:]:
        line = named[0].name.line
        message = f"`{entry.field.name}` and `{named[0].field.name}` both name the net to train"
        found.mistakes.add(entry.name, message, f"keep one of them; the other stands in line {line}")


def solver_settings(text: CaffeText, found: Findings) -> dict[str, Setting]:
    """The settings that the solver's own fields make, by the name of stagerun's field. The text has no mistakes."""
    view, result = View(text.block), {}
    policy = view.text("lr_policy") or ""
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
    result |= {s.name: s for s in (*_type(text, found), *_clip(text))}
    return result


def _carried(text: CaffeText, entry: Entry, value: str) -> Setting:
    name = entry.field.name
    return setting(name, value, entry.place, text.beside(entry), text.above(entry))


def _type(text: CaffeText, found: Findings) -> Iterable[Setting]:
    entries = text.block.entries
    if "type" in entries:
        kind = str(entries["type"].values[0].value)
        if kind not in TYPES.values():
            hint = nearest(kind, TYPES.values()) or "known: " + ", ".join(TYPES.values())
            found.mistakes.add(entries["type"].place, f"`type` has no value `{kind}`", hint)
        yield _carried(text, entries["type"], quoted(kind))
    elif "solver_type" in entries:
        entry = entries["solver_type"]
        kind = TYPES[str(entry.values[0].value)]
        yield setting("type", quoted(kind), entry.place, text.beside(entry), text.above(entry))


def _clip(text: CaffeText) -> Iterable[Setting]:
    """Caffe's threshold is on the norm of the sum over iter_size, stagerun's on that of the mean. Below 0 is no clipping."""
    view, entries = View(text.block), text.block.entries
    limit = view.number("clip_gradients") if "clip_gradients" in entries else None
    if limit is None or limit < 0:
        return
    entry, passes = entries["clip_gradients"], view.whole("iter_size") or 1
    if passes == 1:
        yield _carried(text, entry, written(entry))
    else:
        said = f"{written(entry)} of Caffe's, over iter_size {passes}"
        yield setting("clip_gradients", repr(limit / passes), entry.place, said, text.above(entry))
