"""A run of one worker in the caller's process, whose settings are restored afterwards."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import cv2
import torch

from stagerun.base.events import Event, Note
from stagerun.base.recipe import Schedule
from stagerun.comm import SoloComm
from stagerun.engine.device import choose_device
from stagerun.system.world import World, default_threads
from stagerun.train.context import Context, Stopping
from stagerun.train.options import RunOptions
from stagerun.train.worker import logged_run

_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR")


def run_in_process(
    schedule: Schedule,
    options: RunOptions,
    stop: Callable[[], bool],
    left: Callable[[], float | None],
    hand: Callable[[Event], None],
) -> Iterator[Event]:
    """Yield the events; `hand` gets a Note for what a command would print beside them."""

    def say(text: str) -> None:
        if text:
            hand(Note(text=text))

    with _restored():
        torch.set_num_threads(options.threads or default_threads(1))
        world, comm = World(), SoloComm()
        device, stopping = choose_device(world, exact=True), Stopping(left)
        screen = _NoScreen(say)
        yield from logged_run(
            options, Context(schedule, "", comm, world, device, None, stop, stopping=stopping, screen=screen, say=say)
        )
        comm.close()


class _NoScreen:
    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def __enter__(self) -> "_NoScreen":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def __call__(self, event: Event) -> None:
        pass


@contextmanager
def _restored() -> Iterator[None]:
    """Restore the settings of torch, OpenCV and the environment at the end."""
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    threads, pictures, drawn = torch.get_num_threads(), cv2.getNumThreads(), torch.get_rng_state()
    # Asked without a GPU this would start CUDA.
    drawn_there = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    cudnn, filled = torch.backends.cudnn, torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark, deterministic = cudnn.benchmark, cudnn.deterministic
    algorithms = _algorithms()
    try:
        yield
    finally:
        if _algorithms() != algorithms:  # to set them loads the compiler, for seconds
            torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        cudnn.benchmark, cudnn.deterministic = benchmark, deterministic
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        if drawn_there:
            torch.cuda.set_rng_state_all(drawn_there)
        torch.set_rng_state(drawn)
        torch.set_num_threads(threads)
        cv2.setNumThreads(pictures)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _algorithms() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
