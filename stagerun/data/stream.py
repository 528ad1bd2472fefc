"""Batches for the engine, made ahead by threads, in order; and their reused memory."""

import math
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from stagerun.data.loader import Job, Loader


@dataclass(frozen=True, slots=True)
class Batch:
    """`images` is uint8[n, height, width, channels], contiguous, in the order B, G, R; labels and positions are int64[n].

    `cutout` is int32[n, 4], the top, left, height and width of the rectangle that becomes 0 for the network; `crop` int32[n, 3], the top
    and left of the crop in the record, and 1 if it was mirrored, for a transform with `mean_file`. Else they are None. The memory of
    `images` is reused after the last reference to the array, to a part of it or to a tensor of it is gone.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    cutout: NDArray[np.int32] | None = None
    crop: NDArray[np.int32] | None = None


class Buffers:
    """Arrays over reused memory: fresh pages for each batch would cost 20 to 30 us per image of 224 x 224.

    Each loan is a new array. Everything that refers to the pixels refers to that array: a part of it (a view of a view, too), a memoryview,
    a tensor of `torch.from_numpy`. So when the array is collected, nothing can see the memory any more, and its callback returns it.
    """

    def __init__(self, most: int) -> None:
        """Keep at most `most` pieces of memory for later; any number may be lent."""
        self._free: deque[bytearray] = deque(maxlen=most)

    def array(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return uint8[shape], contiguous, uninitialised. From any thread."""
        memory = self._take(math.prod(shape))
        array: NDArray[np.uint8] = np.ndarray(shape, np.uint8, buffer=memory)
        # May run in any thread, at any time: appending to a deque takes no lock that this thread could hold.
        weakref.finalize(array, self._free.append, memory).atexit = False
        return array

    def _take(self, size: int) -> bytearray:
        while True:
            try:
                memory = self._free.popleft()
            except IndexError:
                return bytearray(size)
            if len(memory) == size:  # others are of batches of a previous size
                return memory


CHUNK = 8  # images that a thread takes at a time
_CHUNKS_EACH = 2  # per thread: one in progress, one waiting
_THREAD = "loader"


class Stream(Iterator[Batch]):
    """The batches of (position, count), in order, made by `loader.options.threads` threads; one more plans them ahead.

    They end with the last batch, at an error, or at `close`, which waits for the images in progress. Closed automatically after its last
    reference is gone, and at the interpreter's exit.
    """

    def __init__(self, loader: "Loader", requests: Iterable[tuple[int, int]]) -> None:
        # The threads must not refer to this object, or it would never be collected.
        self._work = work = _Work(loader, requests)
        planner = threading.Thread(target=work.plan, name=_THREAD, daemon=True)
        # Also runs at exit, before the interpreter is taken down: no thread must be inside OpenCV then.
        self.close = weakref.finalize(self, _end, work, planner)
        planner.start()

    def __next__(self) -> Batch:
        try:
            batch = self._work.next()
        except BaseException:
            self.close()
            raise
        if batch is None:
            self.close()
            raise StopIteration
        return batch

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Work:
    """State shared by the threads and the consumer."""

    def __init__(self, loader: "Loader", requests: Iterable[tuple[int, int]]) -> None:
        self._loader, self._requests = loader, iter(requests)
        self.pool = ThreadPoolExecutor(loader.options.threads, thread_name_prefix=_THREAD)
        self._changed = threading.Condition()
        # Planned and not yet returned: batches, and at last an error, or None.
        self._line: deque[tuple[Job, list[Future[None]]] | BaseException | None] = deque()
        self._images = 0  # in `_line`
        self._stopped = False

    def plan(self) -> None:
        """Plan the next request, which may take any time, whenever the line has room. The planner's thread."""
        try:
            while self._has_room():
                position, count = next(self._requests)
                job = self._loader.plan(position, count)
                self._loader.expect(job.indices)
                starts = range(0, count, CHUNK)
                self._add(
                    (job, [self.pool.submit(self._loader.fill, job, n, min(n + CHUNK, count)) for n in starts]), count
                )
                del job  # while it waits for room, this thread keeps no batch alive
        except StopIteration:
            self._add(None)
        except BaseException as error:  # whatever it is, it belongs to the consumer, behind the batches before
            self._add(error)
        if self._stopped:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def _has_room(self) -> bool:
        """Wait until the line has fewer than `depth` batches and one in progress; more of small ones, so that all threads have work.
        False when the stream is closed."""
        enough = _CHUNKS_EACH * CHUNK * self._loader.options.threads
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or len(self._line) <= self._loader.options.depth or self._images < enough
            )
            return not self._stopped

    def _add(self, planned: "tuple[Job, list[Future[None]]] | BaseException | None", count: int = 0) -> None:
        with self._changed:
            self._line.append(planned)
            self._images += count
            self._changed.notify_all()

    def next(self) -> Batch | None:
        """Return the next batch, when it is ready; None behind the last one, or when the stream is closed. Raise the error of its first
        image that failed, in any order of threads."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._line)
            planned = None if self._stopped else self._line[0]
        if planned is None:
            return None
        if isinstance(planned, BaseException):
            raise planned
        job, chunks = planned
        try:
            for chunk in chunks:
                chunk.result()
        except CancelledError:  # closed by another thread
            return None
        with self._changed:
            self._line.popleft()
            self._images -= len(job.indices)
            self._changed.notify_all()
        return job.made

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def _end(work: _Work, planner: threading.Thread) -> None:
    work.stop()
    # The garbage collector may run this in one of the ending threads, in the middle of anything: that one can't wait for the others, which
    # may wait for a lock that it holds. They all end soon.
    if not threading.current_thread().name.startswith(_THREAD):
        if planner.ident is not None:
            planner.join()
        work.pool.shutdown(cancel_futures=True)
