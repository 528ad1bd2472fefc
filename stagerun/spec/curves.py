"""Errors of meaning in momentum_policy and weight_decay_policy. Pure."""

import contextlib
import math
from collections.abc import Sequence

from stagerun import recipe, schedule
from stagerun.errors import Span, listing
from stagerun.spec import tree, values
from stagerun.spec.knots import check_knots
from stagerun.spec.problems import Problems
from stagerun.spec.rate import telling_iterations
from stagerun.spec.view import Doubtful, View

EXAMPLES = {
    "power": "power: 2",
    "gamma": "gamma: 0.94",
    "knot": "knot { epoch: 0 factor: 1 } knot { epoch: 5 factor: 2 }",
}


def check_curves(stage: str, view: View, images: int | None, problems: Problems) -> None:
    """`images` (of an epoch) is None where it isn't known."""
    for name in ("momentum", "weight_decay"):
        with contextlib.suppress(Doubtful):
            message = view.view(f"{name}_policy")
            policy = message.text("policy") if message else None
            if message is not None and policy is not None:
                _fields(policy, message, problems)
                if policy == "piecewise_linear":
                    check_knots(message, f"{name}_policy", problems)
                end = message.number("end_value") or 0.0
                if name == "momentum" and end >= 1:
                    problems.add(message.place("end_value"), f"`end_value` of momentum must be below 1, not {end:g}")
                    continue
                _values(stage, name, view, message, images, problems)


def _fields(policy: str, message: View, problems: Problems) -> None:
    """What the policy needs and lacks, and what is written and not read: nothing is inherited inside the message."""
    read = schedule.curve_fields(policy)
    lacking = [n for n in read if tree.default(message.block.kind.fields_by_name[n]) is None and not message.has(n)]
    if lacking:
        hint = "write " + " ".join(f"`{EXAMPLES[n]}`" for n in lacking)
        problems.add(message.place("policy"), f"policy `{policy}` needs `{lacking[0]}`", hint)
    for field in message.block.entries:
        if field not in ("policy", *read):
            readers = [f'policy: "{p}"' for p in schedule.CURVES if field in schedule.curve_fields(p)]
            hint = f"write {listing(readers)}, or remove it"
            problems.add(message.place(field), f"policy `{policy}` does not read `{field}`", hint)


def _values(stage: str, name: str, view: View, message: View, images: int | None, problems: Problems) -> None:
    """Momentum stays below 1, weight decay finite, neither falls below 0."""
    if not all(view.has(field) for field in ("max_iter", "batch_size")):
        return
    found, batch, value = values.build(recipe.Curve, message), view.whole("batch_size"), view.number(name)
    length, start = view.whole("max_iter"), view.whole("policy_start_iter")
    assert batch and length and start is not None and value is not None
    solver = recipe.Solver(
        base_lr=0.0,
        lr_policy="fixed",
        max_iter=length,
        batch_size=batch,
        policy_start_iter=start,
        epoch_iter=None if images is None else images / batch,
        device_batch_size=1,
        random_seed=0,
        test_batch_size=1,
        momentum_policy=found if name == "momentum" else None,
        weight_decay_policy=found if name == "weight_decay" else None,
    )
    if not _complete(found, solver):
        return
    for iteration in telling_iterations(solver):
        what = _wrong(name, value, found, solver, iteration)
        if what:
            hint = f"stage `{stage}`: `{name}` goes on from {value:g}"
            problems.add(_place(view, message, found, name), f"`{name}` {what} at iteration {iteration}", hint)
            return


def _complete(found: recipe.Curve, solver: recipe.Solver) -> bool:
    read = schedule.curve_fields(found.policy)
    known = found.policy != "exp_epoch" or solver.epoch_iter is not None
    places: Sequence[float] = [k.iter for k in found.knot]
    return known and all(getattr(found, n) not in (None, ()) for n in read) and places == sorted(places)


def _wrong(name: str, value: float, found: recipe.Curve, solver: recipe.Solver, iteration: int) -> str:
    try:
        now = schedule.moving(value, found, solver)(iteration)
    except (ValueError, ZeroDivisionError):
        return "is no number"
    except OverflowError:
        return "is too large for a double"
    if math.isinf(now):
        return "is too large for a double"
    if now < 0:
        return f"is {now:.6g}"
    return f"is {now:.6g}, and must be below 1," if name == "momentum" and now >= 1 else ""


def _place(view: View, message: View, found: recipe.Curve, name: str) -> Span:
    """The field of the policy that says how far it goes."""
    field = {"poly": "policy", "exp_epoch": "gamma", "piecewise_linear": "knot"}.get(found.policy, "end_value")
    return message.place(field) if field in message.block.entries else view.place(f"{name}_policy")
