"""`stagerun.run`: training in this process, as an iterator of events."""

import atexit
import concurrent.futures.thread  # its threads end after what is registered below
import inspect
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stagerun.base.errors import StagerunError, UsageError, listing, nearest
from stagerun.base.events import Event, Note
from stagerun.base.recipe import Determinism, Schedule
from stagerun.command.ending import of_surroundings
from stagerun.launch import GRACE_S
from stagerun.logs.table import all_logs, require_packages
from stagerun.plan.choice import check_workers
from stagerun.system.portable import pin
from stagerun.system.world import World, default_threads, launched, started_by
from stagerun.tools.library import Folder, Names, names_of, schedule_of, selection_of
from stagerun.train.options import RunOptions


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
    """Train what is not yet done, with one worker in this process; the arguments are the options of `stagerun run`.

    Trains nothing before the first event is asked for. RecipeError for mistakes in the files, or an unknown stage.
    """
    schedule = schedule_of(schedule, overrides)
    if launched():
        raise UsageError(
            f"a launcher has started this process as one of several ({started_by()}), and `stagerun.run` is one worker",
            "let the launcher start `stagerun run DIR`",
        )
    logs = names_of(log)
    selection_of(redo, only, until)
    for name in logs:
        if name not in all_logs():
            hint = nearest(name, all_logs()) or f"the logs are {listing(list(all_logs()), 'and')}"
            raise UsageError(f"no log is called `{name}`", hint)
    require_packages(logs)
    check_workers(schedule, 1)
    if schedule.determinism is Determinism.PORTABLE:
        pin(threads)
    options = RunOptions(
        folder=schedule.name, out=None if out is None else os.fspath(out), threads=threads, retry=retry, exact=require_bit_exact,
        redo=names_of(redo), only=names_of(only), until=until, log=logs,
    )  # fmt: skip
    return Run(schedule, options)


class Run(Iterator[Event]):
    """The events of a run, one after the other (`stagerun.base.events`); after the last one all is on disk, as after `stagerun run`.

    Training continues when the next event is asked for. `close`, the end of a `with`, an interrupt (Ctrl-C), or the end of the process stop
    it after the iteration under way, and save; the same call resumes. A StagerunError says what went wrong, as `log.jsonl` does.
    """

    def __init__(self, schedule: Schedule, options: RunOptions) -> None:
        self.schedule = schedule
        self.out: Path = options.output(schedule)
        self.last: Event | None = None
        # A cell that is run again: its first run would hold the folder.
        if (before := _RUNS.get(self.out.resolve())) is not None:
            before.close()
        _RUNS[self.out.resolve()] = self
        # KeyboardInterrupt is raised in the main thread alone, never during an iteration in another.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "stagerun")
        self._seen = deque[Event | None]()  # notes, and the event that follows them
        stop = _Stop()
        self._events = _events(schedule, options, stop, self._seen.append)
        self._end = weakref.finalize(self, _close, self._thread, self._events, stop)
        self._end.atexit = False  # _close_all comes first

    def __next__(self) -> Event:
        try:
            if not self._seen and self._end.alive:
                self._seen.append(self._thread.submit(next, self._events, None).result())
        except KeyboardInterrupt:
            self.close()
            raise
        except StagerunError:
            raise
        except Exception as error:
            if (limit := of_surroundings(error)) is not None:
                raise limit from error
            raise
        event = self._seen.popleft() if self._seen else None
        if event is None:
            raise StopIteration
        self.last = event
        return event

    def close(self) -> None:
        """Stop after the iteration under way, and save; return when that is on disk. A StagerunError if it can't be."""
        self._seen.clear()
        self._end()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        at = type(self.last).__name__ if self.last else "not started"
        return f"<Run of {self.schedule.name} into {self.out}: {at}>"


_RUNS: weakref.WeakValueDictionary[Path, Run] = weakref.WeakValueDictionary()  # the newest by output folder


def _close_all() -> None:
    for each in list(_RUNS.values()):
        each.close()


# `atexit` comes when the threads that read images have ended, and an iteration could no longer be finished.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


class _Stop:
    """A request to stop, and the seconds that the run has left then."""

    at: float | None = None

    def __call__(self) -> bool:
        return self.at is not None

    def left(self) -> float | None:
        return None if self.at is None else self.at + GRACE_S - time.monotonic()


def _close(thread: concurrent.futures.Executor, events: Generator[Event, None, None], stop: _Stop) -> None:
    stop.at = time.monotonic()
    try:
        if inspect.getgeneratorstate(events) != inspect.GEN_CREATED:
            thread.submit(deque, events, 0).result()  # a step under way ends before
    finally:
        thread.shutdown()


class _Screen(AbstractContextManager["_Screen"]):
    """Hands over what a command would print next to the events."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def __call__(self, event: Event) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _events(
    schedule: Schedule, options: RunOptions, stop: _Stop, note: Callable[[Event], None]
) -> Generator[Event, None, None]:
    import torch

    from stagerun.comm import SoloComm
    from stagerun.engine.device import choose_device
    from stagerun.train.context import Context, Stopping
    from stagerun.train.sinks import logged_run

    def say(text: str) -> None:
        if text:
            note(Note(text=text))

    with _restored():
        torch.set_num_threads(options.threads or default_threads(1))
        world, comm = World(), SoloComm()
        device, stopping, screen = choose_device(world, exact=True), Stopping(stop.left), _Screen(say)
        context = Context(schedule, "", comm, world, device, None, stop, stopping=stopping, screen=screen, say=say)
        yield from logged_run(options, context)
        comm.close()


@contextmanager
def _restored() -> Iterator[None]:
    """Restore the settings of torch, OpenCV and the environment at the end."""
    import cv2
    import torch

    algorithms, cudnn = torch.get_deterministic_debug_mode(), torch.backends.cudnn

    def restore_algorithms() -> None:
        if torch.get_deterministic_debug_mode() != algorithms:  # to set them loads the compiler, for seconds
            torch.use_deterministic_algorithms(algorithms > 0, warn_only=algorithms == 1)

    with ExitStack() as stack:
        for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR"):
            if name in os.environ:
                stack.callback(os.environ.__setitem__, name, os.environ[name])
            else:
                stack.callback(os.environ.pop, name, None)
        if torch.cuda.is_available():  # without a GPU this would start CUDA
            stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        stack.callback(cv2.setNumThreads, cv2.getNumThreads())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        stack.callback(setattr, cudnn, "deterministic", cudnn.deterministic)
        memory: Any = torch.utils.deterministic
        stack.callback(setattr, memory, "fill_uninitialized_memory", memory.fill_uninitialized_memory)
        stack.callback(restore_algorithms)
        yield
