"""The loaders of a stage: its training images, and its evaluations' images, as training reads them and `data show` shows them; and a trial of
them before a run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, Problem, RecipeError, UsageError
from stagerun.base.order import EveryRecord, Order, Sampled
from stagerun.base.recipe import Cache, Sampling, Schedule, Solver, Source, Stage, Transform
from stagerun.base.text import count, first
from stagerun.base.units import shares, weights_of
from stagerun.base.wings import ignored_in
from stagerun.data.datum import Image
from stagerun.data.index import Index, printable
from stagerun.data.jpeg import Rectangle
from stagerun.data.loader import Augment, Job, Loader, LoaderOptions, NetworkInput, PythonTransform, Training, together
from stagerun.data.pictures import Decoded, make_memory
from stagerun.data.pixels import Draw, apply
from stagerun.data.records import LmdbSource, Records, spread
from stagerun.language import require_folders
from stagerun.language.rules.model import classes_problem
from stagerun.schedule.image_size import at_largest, crop_size
from stagerun.system.image_sets import is_there

_DEFAULTS = LoaderOptions()


def training_loader(
    records: Records,
    schedule: Schedule,
    stage: Stage,
    *,
    options: LoaderOptions = _DEFAULTS,
    python: PythonTransform | None = None,
    augment: Augment | None = None,
    start: int = 0,
) -> Loader:
    """Return a loader of training images. `python` is the transform's function, `augment` its change of colours; `start` is the
    position at which the stage begins, for a crop_size that changes within it."""
    solver = stage.solver
    training = Training(
        seed=solver.random_seed,
        sampling=order_of(records, schedule, stage),
        python=python,
        augment=augment,
        side=side_at(solver, start) if solver.transform.crop_size_ramp else None,
    )
    network = network_input(stage, ignored_in(stage).train, stage.data.train.labels is not None)
    return Loader(records, at_largest(solver.transform), network, training=training, options=options)


def side_at(solver: Solver, start: int) -> Callable[[int], int | None]:
    """Return the crop_size as a function of the position, in a stage that begins at `start`. The images of a device batch belong to one
    update, so they share it."""
    return lambda position: crop_size(solver, (position - start) // solver.batch_size)


def evaluation_loader(
    records: Records, stage: Stage, *, threads: int = 1, numbered: bool = False, five_crops: bool = False
) -> Loader:
    """Return a loader of an evaluation's images, each once: in key order, or by their shape if the transform is `rectangular`.

    Rectangles are computed for batches of test_batch_size, however many are requested at a time: they affect the result.
    """
    param, options = stage.solver.test_transform, LoaderOptions(threads=threads)
    network = network_input(stage, ignored_in(stage).test, numbered)
    if five_crops:
        return CropLoader(records, param, network, options)
    if param.rectangular:
        return RectangularLoader(records, param, network, stage.solver.test_batch_size, options)
    return Loader(records, param, network, options=options)


def network_input(stage: Stage, ignored: int | None, numbered: bool) -> NetworkInput:
    return NetworkInput(
        channels=stage.model.channels,
        num_classes=stage.model.num_classes,
        numbered=numbered,
        ignored=ignored,
    )


def order_of(records: Records, schedule: Schedule, stage: Stage) -> Order:
    """Return the order of training records by the stage's `sampling`. DataError without a side file, or if classes don't fit."""
    solver = stage.solver
    if solver.sampling is Sampling.UNIFORM:
        return EveryRecord(solver.random_seed, len(records), schedule.data.shuffle)
    setting = f"`sampling: {solver.sampling.value}`"
    if records.index is None:
        raise _no_side_file(records, f"{setting} needs the labels of all records")
    labels, classes = records.index.labels, stage.model.num_classes
    ignored = ignored_in(stage).train
    if ignored is not None:  # such an image is of no class
        labels = np.where(labels == ignored, -1, labels)
    if int(labels.max(initial=-1)) >= classes:
        raise DataError(
            f"{records.name}: has label {labels.max()}, and `num_classes` is {classes}", "see `stagerun data verify`"
        )
    sizes = np.bincount(labels[labels >= 0], minlength=classes).tolist()
    weights = weights_of(solver, sizes)
    drawn = shares(weights, len(records))
    if never := [str(c) for c in range(classes) if weights[c] and not drawn[c]]:
        named = f"class{'es' * (len(never) > 1)} {', '.join(first(never, 5))}"
        images = count(len(records), "image")
        raise DataError(f"{records.name}: {setting} leaves less than one of {images} in an epoch to {named}")
    return Sampled(solver.random_seed, labels, drawn)


def _no_side_file(records: Records, need: str) -> DataError:
    hint = f"make it with `stagerun data verify --index {records.name}`"
    return DataError(f"{records.name}: {need}, and the side file is missing", hint)


# -- Rectangular validation: images of similar shape go through the network together, less of each cut off.
#
# As in fast.ai's ImageNet training of 2018 (cybertronai/imagenet18_old: training/dataloader.py): the images are sorted by width over
# height and cut into batches; each batch is cropped from the centre to its mean ratio, the shorter side `crop_size`, the longer one so
# many times as long, rounded down to a multiple of 8.

_MULTIPLE = 8


class RectangularLoader(Loader):
    """An evaluation's images sorted by width / height (equal ones in key order), cropped batch by batch.

    Positions count in that order. Batches begin at multiples of `batch_size`, and a crop belongs to such a batch, so that it doesn't depend
    on the number requested at a time. DataError without a side file, which has the sizes.
    """

    def __init__(
        self,
        records: Records,
        param: Transform,
        network: NetworkInput,
        batch_size: int,
        options: LoaderOptions = _DEFAULTS,
    ) -> None:
        if records.index is None:
            raise _no_side_file(records, "rectangular evaluation needs the sizes of the images")
        # The whole resized image; the crop is the batch's.
        super().__init__(records, replace(param, crop_size=None), network, options=options)
        assert param.crop_size is not None  # `check` holds it
        self._side, self._batch_size = param.crop_size, batch_size
        ratios = _ratios(records.name, records.index)
        self._by_shape = np.argsort(ratios, kind="stable")
        self._ratios = ratios[self._by_shape]

    def plan(self, position: int, count: int) -> Job:
        """Raise ValueError for images of two of the batches."""
        first = position - position % self._batch_size
        if count < 1 or position + count > first + self._batch_size:
            raise ValueError(f"{count} images from {position} are not in one batch of {self._batch_size}")
        mean = float(self._ratios[first : first + self._batch_size].mean())
        positions = np.arange(position, position + count, dtype=np.int64)
        made = self._batch(positions, crop_of(mean, self._side))
        return Job(made, self._by_shape[positions].tolist(), self._param)

    def _make(self, job: Job, n: int) -> None:
        image, job.made.labels[n] = self._whole(job.indices[n])
        centre(image, job.made.images[n])

    def _check_shape(self, i: int, position: int, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        """Any shape can be cropped."""


def evenly(of: int, count: int) -> list[int]:
    """Return the middles of `count` nearly equal parts of 0 .. of-1, 1 <= count <= of."""
    return [(2 * n + 1) * of // (2 * count) for n in range(count)]


def crop_of(ratio: float, side: int) -> tuple[int, int]:
    """Return (height, width) of the crop of images whose mean width / height is `ratio`."""
    if ratio < 1:
        return _down(side / ratio, side), side
    return side, _down(side * ratio, side)


def _down(length: float, least: int) -> int:
    """Round down to a multiple of 8, but not below the shorter side, which may be any number."""
    return max(int(length) // _MULTIPLE * _MULTIPLE, least)


def centre(image: Image, out: Image) -> None:
    """Copy the centre of the image to `out`; black outside of the image, as in torchvision's center_crop: an image may be less elongated
    than the mean of its batch."""
    height, width = out.shape[:2]
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    down, right = max(top, 0), max(left, 0)
    part = image[down : down + height, right : right + width]
    if part.shape != out.shape:
        out[...] = 0
    down, right = max(-top, 0), max(-left, 0)
    out[down : down + part.shape[0], right : right + part.shape[1]] = part


def _ratios(name: str, index: Index) -> NDArray[np.float64]:
    """Return width / height of each record."""
    unknown = np.flatnonzero((index.heights <= 0) | (index.widths <= 0))
    if unknown.size:
        raise DataError(
            f"{name}: {count(unknown.size, 'record')} can't be used, says the side file; the first is "
            f"`{printable(index.key(int(unknown[0])))}`",
            f"list them with `stagerun data verify --decode {name}`",
        )
    ratios: NDArray[np.float64] = index.widths / index.heights
    return ratios


# -- Several crops of each validation image: the four corners and the centre.

CROPS = 5
NO_CROP_HINT = "use `--views flip`, or no views"


class CropLoader(Loader):
    """An evaluation's images, five crops of each: top left, top right, bottom left, bottom right, centre.

    The image is padded and resized as `transform_param` says, and cropped five times. UsageError without crop_size, and for rectangular crops.
    """

    def __init__(self, records: Records, param: Transform, network: NetworkInput, options: LoaderOptions) -> None:
        if param.crop_size is None or param.rectangular:
            raise UsageError("the evaluation's transform has no crop_size, or is `rectangular`", NO_CROP_HINT)
        super().__init__(records, param, network, options=options)
        self._side = param.crop_size

    def plan(self, position: int, count: int) -> Job:
        """`images` is uint8[5 * count, crop_size, crop_size, channels]: the first crop of each image, then the second of
        each, and so on; labels and positions are int64[count]."""
        positions = np.arange(position, position + count, dtype=np.int64)
        return Job(self._batch(positions, (self._side, self._side), CROPS), positions.tolist(), self._param)

    def _make(self, job: Job, n: int) -> None:
        whole, job.made.labels[n] = self._whole(job.indices[n])
        job.made.images[n :: len(job.indices)] = five_crops(whole, self._side)

    def preflight(self, samples: int = 32) -> None:
        """Check as Loader does; UsageError if every sampled image is as large as its crop."""
        super().preflight(samples)
        shapes = [self._whole(i)[0].shape[:2] for i in spread(len(self.records), samples)]
        if all(shape == (self._side, self._side) for shape in shapes):
            text = f"there is nothing to crop: the images are {self._side} x {self._side} pixels, as large as crop_size"
            raise UsageError(text, NO_CROP_HINT)


def five_crops(image: Image, side: int) -> NDArray[np.uint8]:
    """Return uint8[5, side, side, channels] from uint8[height, width, channels]; the centre is an evaluation's crop."""
    height, width = image.shape[:2]
    bottom, right = height - side, width - side
    corners = [(0, 0), (0, right), (bottom, 0), (bottom, right), (bottom // 2, right // 2)]
    return np.stack([apply(image, Draw(crop=Rectangle(y, x, side, side))) for y, x in corners])


# -- Checks of a schedule's images before a run: its LMDBs are opened, and some records of each are decoded.


def preflight(schedule: Schedule) -> None:
    """Check some records of each LMDB, and the folders that are not imported yet. DataError, RecipeError.

    The workers check whether `cache: DEVICE` has room.
    """
    require_folders(schedule)
    ready = [s for s in schedule.sources if s.path not in schedule.imports or is_there(schedule.imports[s.path])]
    records = opened(schedule, ready)
    kept = Cache.DISK if schedule.data.cache is Cache.DEVICE else schedule.data.cache
    memory = cache(lambda path: make_memory(records[path], schedule.model.channels, kept))
    require_usable(schedule, records, lambda stage: memory(stage.data.train.path))


def opened(schedule: Schedule, sources: Iterable[Source] | None = None) -> dict[str, Records]:
    """Open the LMDBs of these sources, or of all enabled stages; return them by the sources' paths. DataError, StorageError."""
    wanted = schedule.sources if sources is None else sources
    return {source.path: LmdbSource(schedule.lmdb(source), source.images) for source in wanted}


def require_usable(
    schedule: Schedule,
    records: Mapping[str, Records],
    memory: Callable[[Stage], Decoded | None],
    python: Callable[[Stage], PythonTransform | None] | None = None,
) -> None:
    """Try some records of each LMDB, by path, as each stage would. RecipeError if only `num_classes` is wrong, else DataError with all
    mistakes. `memory` keeps decoded training images. `python` returns a stage's imported function; without it, images that a function
    changes are skipped."""
    mistakes: list[DataError] = []
    problems: dict[str, Problem] = {}  # by their messages
    checked: list[tuple[object, ...]] = []  # hundreds of stages may have the same loaders
    for stage in schedule.stages:
        sources = stage.data.train, *stage.data.val
        if not all(source.path in records for source in sources):
            continue
        train, *vals = [records[source.path] for source in sources]
        seen, classes = stage, _classes([train, *vals])
        if (problem := classes_problem(schedule, stage, *classes)) is not None:
            problems.setdefault(problem.message, problem)
            # The labels out of range need no other message.
            seen = replace(stage, model=replace(stage.model, num_classes=len(classes[1])))
        mistakes += filter(None, (_other_classes(train, val) for val in vals))
        if (settings := _settings(seen)) in checked:
            continue
        if not stage.solver.transform.crop_size_ramp:  # it depends on more settings
            checked.append(settings)
        try:  # changes of colours, which need torch, fail for no image and are omitted
            function = python(stage) if python is not None else None
            if function is not None or not stage.solver.transform.python:
                options = LoaderOptions(memory=memory(stage))
                loader = training_loader(train, schedule, seen, python=function, options=options)
                mistakes += loader.mistakes()
        except DataError as error:
            mistakes.append(error)
        for val, source in zip(vals, stage.data.val, strict=True):
            try:
                mistakes += evaluation_loader(val, seen, numbered=source.labels is not None).mistakes()
            except DataError as error:
                mistakes.append(error)
    if problems and not mistakes:
        raise RecipeError(list(problems.values()))
    mistakes[:0] = [DataError(replace(problem, hint="").render(), problem.hint) for problem in problems.values()]
    if mistakes:
        raise together(mistakes)


def _settings(stage: Stage) -> tuple[object, ...]:
    """Return all settings of a stage's loaders, except for the progress of a ramp."""
    solver = stage.solver
    transforms = solver.transform, solver.test_transform, solver.test_batch_size
    drawn = solver.random_seed, solver.sampling
    return stage.data, stage.model, *transforms, *drawn, ignored_in(stage)


def _classes(records: Iterable[Records]) -> tuple[str, tuple[str, ...]]:
    """Return (name, classes) of the LMDB that names most classes."""
    named = [(r.name, r.index.facts.classes if r.index else ()) for r in records]
    return max(named, key=lambda pair: len(pair[1]))


def _other_classes(train: Records, val: Records) -> DataError | None:
    """Return an error if the side files name different classes for one label: accuracy would be wrong."""
    if train.index is None or val.index is None:
        return None
    pairs = zip(train.index.facts.classes, val.index.facts.classes, strict=False)
    for label, (trained, tested) in enumerate(pairs):
        if trained != tested:
            return DataError(
                f"label {label} is `{trained}` in {train.name}, and `{tested}` in {val.name}",
                "labels count the class folders in the order of their names: import both from the same folders, or from lists "
                "that state the labels",
            )
    return None
