"""`plan --workers N --link RATE`: what is to be known of the network for the cost model, and its mistakes."""

from pathlib import Path

from stagerun import signals
from stagerun.errors import UsageError
from stagerun.plan import Plan
from stagerun.plan.prediction import Job, Link
from stagerun.recipe import Determinism, Schedule
from stagerun.train.results import read_figures


def job_of(
    plan: Plan, out: Path, workers: int | None, bandwidth: float | None, latency: float | None, rate: float | None
) -> Job | None:
    """What is to be predicted; None where nobody asked. UsageError; RecipeError for more workers than there is work for."""
    if workers is None and bandwidth is None:
        if latency is not None:
            raise UsageError("--latency without --link", "write --workers 128 --link 10Gbit/s --latency 50us")
        return None
    if workers is None or bandwidth is None:
        missing = "--workers" if workers is None else "--link"
        raise UsageError(
            f"a prediction needs {missing}, too",
            "write --workers 128 --link 10Gbit/s, and --latency 50us where it is known",
        )
    from stagerun.launch.workers import check_workers

    check_workers(plan.schedule, workers)
    figures = read_figures(out)
    if rate is None and figures is None:
        raise UsageError(
            "--workers needs to know how fast one worker is, and nothing was rehearsed here",
            "`stagerun rehearse` it here, or give --images-per-second N, of one worker alone",
        )
    return Job(
        workers=workers,
        link=Link(bandwidth, latency or 0.0),
        pieces=_pieces(plan.schedule),
        elastic=plan.schedule.determinism is Determinism.ELASTIC,
        images_per_second=rate,
        figures=figures,
    )


def _pieces(schedule: Schedule) -> dict[str, tuple[float, ...]]:
    """By stage, bytes of what an iteration sends, in that order: the tail with BatchNorm's statistics, then the gradients in chunks."""
    with signals.held():
        import torch

        from stagerun.comm import pieces_of
        from stagerun.engine.device import dtype_of
        from stagerun.engine.parameters import trained_parameters
        from stagerun.models import build

    with torch.device("meta"):
        network = build(schedule.model)
    found = {}
    for stage in schedule.stages:
        network.to(dtype_of(stage.solver.precision))
        trained_parameters(network, stage.solver.param)  # freezes the others, which then have no gradients
        found[stage.name] = tuple(map(float, pieces_of(network)))
    return found
