"""What MLPerf calls the settings of a stage."""

from typing import Any

from stagerun.recipe import DecayFrom, Solver

# MLPerf's names of some settings depend on the solver type.
BASE_LR, DECAY = "opt_base_learning_rate", "opt_weight_decay"
NAMES: dict[str, dict[str, str]] = {
    "SGD": {BASE_LR: "sgd_opt_base_learning_rate", DECAY: "sgd_opt_weight_decay", "momentum": "sgd_opt_momentum"},
    "LARS": {
        BASE_LR: "lars_opt_base_learning_rate",
        DECAY: "lars_opt_weight_decay",
        "momentum": "lars_opt_momentum",
        "delta": "lars_epsilon",
    },
    "Adam": {"momentum": "opt_adam_beta_1", "momentum2": "opt_adam_beta_2", "delta": "opt_adam_epsilon"},
    "AdamW": {
        DECAY: "opt_adamw_weight_decay",
        "momentum": "opt_adamw_beta_1",
        "momentum2": "opt_adamw_beta_2",
        "delta": "opt_adamw_epsilon",
    },
    "LAMB": {
        DECAY: "opt_lamb_weight_decay_rate",
        "momentum": "opt_lamb_beta_1",
        "momentum2": "opt_lamb_beta_2",
        "delta": "opt_lamb_epsilon",
    },
    "AdaGrad": {"delta": "opt_adagrad_epsilon"},
}
# The field that says over how many iterations a policy falls to zero.
POLY_STEPS = {"poly": "max_iter", "poly_cyc": "lr_iter"}


def _decay_steps(solver: Solver) -> int:
    steps: int = getattr(solver, POLY_STEPS[solver.lr_policy])
    within = solver.lr_policy == "poly" and solver.decay_from is DecayFrom.WARMUP_END
    return steps - solver.warmup_iter if within else steps


def settings(solver: Solver, epoch_images: int, workers: int) -> dict[str, Any]:
    """A stage's settings under MLPerf's keys; what MLPerf has no word for is left out."""
    names = NAMES.get(solver.type, {})
    found: dict[str, Any] = {
        "seed": solver.random_seed,
        "global_batch_size": solver.batch_size,
        # Of the worker that has most to do.
        "gradient_accumulation_steps": -(-solver.logical_workers // workers),
        "opt_name": solver.type.lower(),
        names.get(BASE_LR, BASE_LR): solver.base_lr,
        names.get(DECAY, DECAY): solver.weight_decay,
        "opt_learning_rate_warmup_epochs": solver.warmup_iter * solver.batch_size / epoch_images,
    }
    for field in ("momentum", "momentum2", "delta"):
        if field in names:
            found[names[field]] = getattr(solver, field)
    if solver.lr_policy in POLY_STEPS:
        prefix = names.get(BASE_LR, BASE_LR).removesuffix("base_learning_rate")
        found[prefix + "learning_rate_decay_poly_power"] = solver.power
        found[prefix + "learning_rate_decay_steps"] = _decay_steps(solver)
    if solver.clip_gradients is not None:
        found["opt_gradient_clip_norm"] = solver.clip_gradients
    return found
