"""`stagerun.run`: training in this process, as an iterator of events."""

import atexit
import concurrent.futures.thread  # noqa: F401  # its threads end after what is registered below
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from stagerun.base.errors import StagerunError, UsageError, listing, nearest
from stagerun.base.events import Event, Note
from stagerun.base.recipe import Schedule
from stagerun.command.ending import of_surroundings
from stagerun.launch import GRACE_S
from stagerun.logs.table import all_logs, require_packages
from stagerun.plan.choice import check_workers
from stagerun.system.world import World, default_threads, launched, started_by
from stagerun.tools.library.lockstep import Lockstep
from stagerun.tools.library.plan import Folder, Names, names_of, require_name, schedule_of
from stagerun.train.options import RunOptions

_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR")


def run(
    schedule: Schedule | Folder,
    out: Folder | None = None,
    *,
    overrides: Names = (),
    redo: Names = (),
    only: Names = (),
    until: str | None = None,
    threads: int | None = None,
    retry: bool = False,
    require_bit_exact: bool = False,
    log: Names = (),
) -> "Run":
    """Trains what is not yet done, with one worker in this process; the arguments are the options of `stagerun run`.

    Nothing is trained before the first event is asked for. RecipeError for mistakes in the files or a stage that there isn't.
    """
    found = schedule_of(schedule, overrides)
    if launched():
        raise UsageError(
            f"a launcher has started this process as one of several ({started_by()}), and `stagerun.run` is one worker",
            "let the launcher start `stagerun run DIR`",
        )
    require_name(until)
    folder = None if out is None else os.fspath(out)
    options = RunOptions(
        folder=found.name, out=folder, threads=threads, retry=retry, exact=require_bit_exact, until=until,
        redo=names_of(redo), only=names_of(only), log=names_of(log),
    )  # fmt: skip
    for name in options.log:
        if name not in all_logs():
            raise UsageError(
                f"there is no log `{name}`",
                nearest(name, all_logs()) or f"the logs are {listing(list(all_logs()), 'and')}",
            )
    require_packages(options.log)
    check_workers(found, 1)
    return Run(found, options)


class Run(Iterator[Event]):
    """The events of a run, one after the other (`stagerun.base.events`); after the last one all is on disk, as after `stagerun run`.

    Training goes on when the next event is asked for. `close`, the end of a `with`, an interrupt (Ctrl-C), or the end of the process stop it
    after the iteration under way, and save; the same call goes on. A StagerunError says what went wrong, as `log.jsonl` does.
    """

    def __init__(self, schedule: Schedule, options: RunOptions) -> None:
        self.schedule = schedule
        self.out: Path = options.output(schedule)
        self.last: Event | None = None
        _end_another(self.out, self)
        stop = _Stop()
        steps = Lockstep[Event](lambda hand: _events(schedule, options, stop, hand))
        self._steps = steps
        self._end = weakref.finalize(self, _close, steps, stop)
        self._end.atexit = False  # _close_all comes first

    def __next__(self) -> Event:
        try:
            event = self._steps.next()
        except KeyboardInterrupt:
            self.close()
            raise
        except StagerunError:
            raise
        except Exception as error:
            if (known := of_surroundings(error)) is not None:
                raise known from error
            raise
        if event is None:
            raise StopIteration
        self.last = event
        return event

    def close(self) -> None:
        """Stops after the iteration under way, and saves; returns when that is on disk. A StagerunError if it can't be."""
        self._end()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<Run of {self.schedule.name} into {self.out}: {type(self.last).__name__ if self.last else 'not started'}>"
        )


# By output folder, the newest that may hold it.
_LIVE: weakref.WeakValueDictionary[Path, Run] = weakref.WeakValueDictionary()


def _end_another(out: Path, run: Run) -> None:
    """A cell that is run again goes on where its first time was left: that would hold the folder."""
    real = out.resolve()
    if (before := _LIVE.get(real)) is not None:
        before.close()
    _LIVE[real] = run


def _close_all() -> None:
    for run in list(_LIVE.values()):
        run.close()


# `atexit` comes when the threads that read images have ended, and an iteration could no longer be finished.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


class _Stop:
    """Whether this run was asked to stop, and since when."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self) -> bool:
        return self.at is not None

    def left(self) -> float | None:
        return None if self.at is None else self.at + GRACE_S - time.monotonic()


def _close(steps: Lockstep[Event], stop: _Stop) -> None:
    stop.at = stop.at or time.monotonic()
    steps.finish()


def _events(schedule: Schedule, options: RunOptions, stop: _Stop, hand: Callable[[Event], None]) -> Iterator[Event]:
    """In a thread of its own, with settings of its own. `hand` gets a Note for what a command would print beside the events."""
    import torch

    from stagerun.comm import SoloComm
    from stagerun.engine.device import choose_device
    from stagerun.train.context import Context, Stopping
    from stagerun.train.worker import logged_run

    def say(text: str) -> None:
        if text:
            hand(Note(text=text))

    with _restored():
        torch.set_num_threads(options.threads or default_threads(1))
        world, comm = World(), SoloComm()
        device, stopping, screen = choose_device(world, exact=True), Stopping(stop.left), _NoScreen(say)
        context = Context(schedule, "", comm, world, device, None, stop, stopping=stopping, screen=screen, say=say)
        yield from logged_run(options, context)
        comm.close()


class _NoScreen(AbstractContextManager["_NoScreen"]):
    """Shows no event; what a command would print beside them goes to `say`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        pass


@contextmanager
def _restored() -> Iterator[None]:
    """Restore the settings of torch, OpenCV and the environment at the end."""
    import cv2
    import torch

    variables = {name: os.environ.get(name) for name in _VARIABLES}
    threads, pictures, drawn = torch.get_num_threads(), cv2.getNumThreads(), torch.get_rng_state()
    # Asked without a GPU this would start CUDA.
    drawn_there = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    cudnn, filled = torch.backends.cudnn, torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark, deterministic = cudnn.benchmark, cudnn.deterministic
    algorithms = torch.get_deterministic_debug_mode()
    try:
        yield
    finally:
        if torch.get_deterministic_debug_mode() != algorithms:  # to set them loads the compiler, for seconds
            torch.use_deterministic_algorithms(algorithms > 0, warn_only=algorithms == 1)
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
