"""What a function of the user's (`transform_param { python }`) takes of a loader thread's time."""

import time
from collections.abc import Iterator

from stagerun.base.recipe import Schedule
from stagerun.data.loaders import training_loader
from stagerun.data.python_transform import PythonTransform
from stagerun.data.records import LmdbSource
from stagerun.plan.estimate import PythonCost

_IMAGES, _SECONDS, _AT_ONCE = 256, 2.0, 8


def python_costs(schedule: Schedule) -> Iterator[PythonCost]:
    """One for each function, in the first stage that has it: some hundred images by one thread. UsageError, DataError, StorageError."""
    done = set()
    for stage in schedule.stages:
        name = stage.solver.transform.python
        if name is None or name in done or not stage.enabled:
            continue
        done.add(name)
        function = PythonTransform(name, schedule.python)
        loader = training_loader(LmdbSource(schedule.lmdb(stage.data.train)), schedule, stage, python=function)
        loader.batch(0, _AT_ONCE)  # what is slow the first time
        images, seconds = function.images, function.seconds
        began, position = time.perf_counter(), _AT_ONCE
        while position < _IMAGES and time.perf_counter() - began < _SECONDS:
            loader.batch(position, _AT_ONCE)
            position += _AT_ONCE
        whole, made = time.perf_counter() - began, function.images - images
        yield PythonCost(
            name=name, stage=stage.name, seconds=(function.seconds - seconds) / made, loading_seconds=whole / made
        )
