"""Solver files without their nets: what nets say comes from the command line, and is asked for where it does not. Pure."""

from collections.abc import Sequence

from stagerun.caffe_import.converted import Converted, Wanted
from stagerun.caffe_import.counts import Count, Counting, count_told, source_lines
from stagerun.caffe_import.left import Findings
from stagerun.caffe_import.lines import Line, Setting, message, setting
from stagerun.caffe_import.model import WHICH
from stagerun.caffe_import.resumed import going_on, parent_of
from stagerun.caffe_import.settings import AS_CAFFE, SolverStage, seeded, seeds
from stagerun.caffe_import.solver import solver_settings
from stagerun.caffe_import.workers import workers_of
from stagerun.errors import RecipeError, Span
from stagerun.spec.tree import quoted
from stagerun.spec.view import View


def without_nets(
    shown: str, stages: Sequence[SolverStage], disk: Counting, wanted: Wanted, found: Findings
) -> Converted:
    """The stages of solvers that have no mistakes. `shown` is Caffe's folder as messages name it. RecipeError."""
    evaluated = bool(wanted.val_images or wanted.val_source or any(_tests(stage) for stage in stages))
    _note_nets(shown, wanted, evaluated, found)
    seed, own_seeds = seeds(stages)
    settings = {}
    for stage in stages:
        made = solver_settings(stage.text, found)
        made |= {s.name: s for s in _batch(stage, wanted, found)}
        if any(s.step.parents for s in stages) and seeded(stage):
            made["carry"] = AS_CAFFE
        _evaluation(stage, evaluated, made, found)
        if stage.step.name in own_seeds:
            made["random_seed"] = own_seeds[stage.step.name]
        settings[stage.step.name] = going_on(stage, parent_of(stage, stages), made, found)
    if found.mistakes:
        raise RecipeError(found.mistakes.all())
    train = _count("train", wanted.train_source, wanted.images, disk, found)
    data = message("train", source_lines(train, None), None)
    if evaluated:
        data += message(
            "val", source_lines(_count("val", wanted.val_source, wanted.val_images, disk, found), None), None
        )
    steps = tuple(stage.step for stage in stages)
    model = _model(wanted, train)
    return Converted(steps=steps, settings=settings, model=model, data=data, seed=seed, found=found)


def _note_nets(shown: str, wanted: Wanted, evaluated: bool, found: Findings) -> None:
    """The one entry for all that is in no file which was read, and was not told."""
    told = {"batch": wanted.batch_size and wanted.device_batch_size, "transform": None, "multipliers": None}
    missing = [name for name, value in told.items() if value is None]
    why = f"{', '.join(missing[:-1])} and {missing[-1]} are not carried, nor what else nets say of layers and loss"
    found.leave(Span(shown or ".", 0, 0), "nets were not read", why, "write them, or import again with the nets")
    if not evaluated:
        found.leave(
            Span(shown or ".", 0, 0), "data.val", "no solver evaluates", "`--val-images` says that there is one"
        )
    sources = {"train": wanted.train_source, "val": wanted.val_source if evaluated else ""}
    for part in (part for part, source in sources.items() if source is None):
        todo = f"write the LMDB's path, or import again with `--{part}-source`"
        found.leave(
            Span(shown or ".", 0, 0), f"data.{part}.source", f"{part}_lmdb is only a name that stands there", todo
        )


def _count(part: str, source: str | None, images: int | None, disk: Counting, found: Findings) -> Count:
    if source is None:
        return Count(f"{part}_lmdb", images or 0)
    return count_told(f"--{part}-source", source, images, disk, found)


def _model(wanted: Wanted, train: Count) -> tuple[Line, ...]:
    asked = Line('name: "?"', None, WHICH, asks=True)
    classes = Line("num_classes: 0", None, "how many?", asks=True)
    return (
        Line(f"name: {quoted(wanted.model)}") if wanted.model else asked,
        Line(f"num_classes: {wanted.classes}") if wanted.classes else classes,
        *((Line("channels: 1", None, "as in the LMDB"),) if train.channels == 1 else ()),
    )


def _batch(stage: SolverStage, wanted: Wanted, found: Findings) -> list[Setting]:
    """batch_size and device_batch_size, the same in all stages."""
    view, workers = View(stage.text.block), workers_of(stage.step, [stage.step], None).number or 1
    passes = (view.whole("iter_size") or 1) if view.has("iter_size") else 1
    if passes > 1:
        why = f"batch_size is that of a whole update, its {passes} passes together"
        found.leave(view.place("iter_size"), "iter_size", why, "write the stage's own batch_size where it is another")
    together = f"{workers} workers" if workers > 1 else "all workers"
    asked = (
        ("batch_size", wanted.batch_size, f"images of one update, of {together} together?"),
        ("device_batch_size", wanted.device_batch_size, "those of one worker's pass? BatchNorm sees these"),
    )
    return [
        setting(name, str(value)) if value else Setting(name, (Line(f"{name}: 0", None, question, asks=True),))
        for name, value, question in asked
    ]


def _tests(stage: SolverStage) -> bool:
    view = View(stage.text.block)
    return view.has("test_interval") and (view.whole("test_interval") or 0) > 0


def _evaluation(stage: SolverStage, evaluated: bool, made: dict[str, Setting], found: Findings) -> None:
    """Without a count of images to go by, every image is evaluated. Where nothing is, all intervals are 0."""
    entry = stage.text.block.entries.get("test_iter")
    if not evaluated:
        made.pop("test_interval", None)
        if entry is not None:
            found.idle["test_iter"] = "no solver evaluates while it trains"
    elif entry is not None:
        why = "it counts batches of a size that the net tells"
        found.leave(
            entry.place, "test_iter", why, "every image is evaluated; `test_batch_size` and `test_iter` say else"
        )
