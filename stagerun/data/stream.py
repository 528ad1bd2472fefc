"""Batches as the engine gets them, made ahead by threads, in order; and the memory that they lie in."""

import contextlib
import math
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from stagerun.data.loader import Job, Loader


@dataclass(frozen=True, slots=True)
class Batch:
    """`images` is uint8[n, height, width, channels], contiguous, in the order B, G, R; labels and positions are int64[n].

    `lighting` is float32[n, 3], to be added to B, G, R; `cutout` int32[n, 4], the top, left, height and width of what becomes 0 for
    the network; `crop` int32[n, 3], the top and left in the record of what was cut out, and 1 where it was mirrored, of a transform with `mean_file`. None where the transform has no such thing. The memory of `images` is used again when no one refers to the array,
    to a part of it or to a tensor made of it: whoever holds one of these may do so as long as they like.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    lighting: NDArray[np.float32] | None = None
    cutout: NDArray[np.int32] | None = None
    crop: NDArray[np.int32] | None = None


class Buffers:
    """Arrays over memory that is used again: fresh pages for each batch would cost 20 to 30 us per image of 224 x 224.

    When is memory free? A new array is made over it each time it is lent. All that refers to the pixels refers to that array: a
    part of it (numpy lets a view of a view refer to the array that is first in line, and that is this one, as the memory
    itself is not an array), a memoryview, a tensor of `torch.from_numpy`, and what shares memory with these. So when the array is
    collected, and not before, no one can see the memory any more, and its callback puts it back. Counting references
    instead would have to know how many are the loader's own.
    """

    def __init__(self, most: int) -> None:
        """At most `most` pieces of memory are kept for later; any number may be lent."""
        self._free: deque[bytearray] = deque(maxlen=most)

    def array(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """uint8[shape], contiguous, with anything in it. From any thread."""
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
            if len(memory) == size:  # others are of batches of another size, which the stream may have left behind
                return memory


CHUNK = 8  # images that a thread takes at a time
_CHUNKS_AHEAD = 4  # at least so many are known, and their records asked for, before they are started
_CHUNKS_EACH = 2  # per thread: one in the making, one to come
_LOOK_S = 0.5  # how often one who waits looks whether those that it waits for are alive


class Stream(Iterator[Batch]):
    """The batches of (position, count), in order, made by `loader.threads` daemon threads.

    They end with the last batch, at an error, or at `close`, which waits for the images in the making. Closed by itself when
    it is no longer referred to, and at the interpreter's exit.
    """

    def __init__(self, loader: "Loader", requests: Iterable[tuple[int, int]]) -> None:
        # The threads must not refer to this object, or it would never be collected.
        work = _Work(loader, requests)
        threads = [threading.Thread(target=work.run, name="loader", daemon=True) for _ in range(loader.threads)]
        self._work, self._threads = work, threads
        # Also runs at exit, before the interpreter is taken down: no thread must be inside OpenCV then.
        self.close = weakref.finalize(self, _end, work, threads)
        for thread in threads:
            thread.start()

    def __next__(self) -> Batch:
        try:
            batch = self._work.next(self._threads)
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


class _Place:
    """A batch's place in the line: what is left of it, and the error of its first image that has one."""

    def __init__(self, job: "Job | None", error: BaseException | None = None) -> None:
        self.job, self.error = job, error
        self.error_at = -1 if error else 1 << 62
        self.left = -(-job.count // CHUNK) if job else 0  # chunks

    def fail(self, at: int, error: BaseException) -> None:
        # The first in the batch's order, not in time: the same error however many threads there are.
        if at < self.error_at:
            self.error, self.error_at = error, at


class _Work:
    """What the threads and the consumer share.

    Two locks. `_planning` is held by the one thread that asks for more requests, which may take as long as it likes: the
    consumer doesn't need it. `_changed` guards all else and is never held for long.
    """

    def __init__(self, loader: "Loader", requests: Iterable[tuple[int, int]]) -> None:
        self._loader, self._requests = loader, iter(requests)
        self._ahead = max(_CHUNKS_AHEAD, _CHUNKS_EACH * loader.threads)
        self._planning = threading.Lock()
        self._changed = threading.Condition()
        self._line: deque[_Place] = deque()  # planned and not yet handed out
        self._chunks: deque[tuple[_Place, Job, int, int]] = deque()  # not yet started, in order
        self._asked = 0  # of `_chunks`, whose records were asked for
        self._last = False  # no more batches will be planned
        self._ended = 0  # threads that came to their end as they should
        self.stop = False

    def run(self) -> None:
        """One thread's life."""
        while (chunk := self._take()) is not None:
            place, job, first, last = chunk
            error: BaseException | None = None
            try:
                job.fill(first, last)
            except BaseException as caught:  # whatever it is, it belongs to the consumer
                error = caught
            with self._changed:
                if error is not None:
                    place.fail(first, error)
                    self._give_up_behind(place)
                place.left -= 1
                if place.left == 0:
                    self._changed.notify_all()
            del chunk, place, job, error  # while it waits for the next, this thread keeps no batch alive
        with self._changed:
            self._ended += 1

    def _take(self) -> tuple[_Place, "Job", int, int] | None:
        """The next chunk, its records asked for long ago; None when there are no more."""
        with self._planning:
            while not self.stop:
                with self._changed:
                    known, full = len(self._chunks), self._is_full()
                    enough = known >= self._ahead or self._last or full
                    if enough and known:
                        chunk = self._chunks.popleft()
                        self._asked = max(0, self._asked - 1)
                        soon = list(self._chunks)[self._asked : self._ahead]
                        self._asked += len(soon)
                        break
                    if self._last:
                        return None
                    if full:
                        self._changed.wait(_LOOK_S)
                        continue
                self._plan()
            else:
                return None
        for _, job, first, last in soon:
            job.expect(first, last)
        return chunk

    def _is_full(self) -> bool:
        """Whether `depth` batches and one in the making are in the line; of small ones more, until all threads have work."""
        if len(self._line) <= self._loader.depth:
            return False
        images = sum(place.job.count for place in self._line if place.job is not None)
        return images >= _CHUNKS_EACH * CHUNK * self._loader.threads

    def _plan(self) -> None:
        """Puts the next request in the line; at their end, or at an error, notes that there are no more."""
        place: _Place | None = None
        try:
            position, count = next(self._requests)
            job = self._loader.plan(position, count)
            place = _Place(job)
        except StopIteration:
            pass
        except BaseException as error:  # the consumer's, behind the batches before
            place = _Place(None, error)
        with self._changed:
            if place is None or place.job is None:
                self._last = True
            if place is not None:
                self._line.append(place)
                if place.job is not None:
                    starts = range(0, place.job.count, CHUNK)
                    self._chunks.extend((place, place.job, n, min(n + CHUNK, place.job.count)) for n in starts)
            self._changed.notify_all()

    def _give_up_behind(self, failed: _Place) -> None:
        """What comes after a batch that failed is not wanted; what comes before it is, and the rest of it too, which may have
        an error that comes first."""
        self._last = True
        if failed not in self._line:  # closed meanwhile, or itself behind another
            return
        while self._line[-1] is not failed:
            self._line.pop()
        kept = set(map(id, self._line))
        self._chunks = deque(chunk for chunk in self._chunks if id(chunk[0]) in kept)
        self._asked = min(self._asked, len(self._chunks))

    def next(self, threads: list[threading.Thread]) -> Batch | None:
        """The next batch, when it is ready; None behind the last one, or when the stream is closed. Raises its error."""
        with self._changed:
            while not self.stop:
                if self._line and self._line[0].left == 0:
                    place = self._line.popleft()
                    self._changed.notify_all()
                    break
                if self._last and not self._line:
                    return None
                if not self._changed.wait(_LOOK_S) and sum(t.is_alive() for t in threads) + self._ended < len(threads):
                    raise RuntimeError("a thread of the loader is gone")
            else:
                return None
        if place.error is not None:
            raise place.error
        assert place.job is not None
        return place.job.batch()

    def end(self) -> None:
        with self._changed:
            self._line.clear()
            self._chunks.clear()
            self._changed.notify_all()


def _end(work: _Work, threads: list[threading.Thread]) -> None:
    work.stop = True
    # The garbage collector may run this in one of the threads that are to end, in the middle of anything: that one can't wait
    # for the others, which may wait for a lock that it holds. They all look at `stop` soon.
    if threading.current_thread() in threads:
        return
    work.end()
    for thread in threads:
        with contextlib.suppress(RuntimeError):  # it was not started: the system has no room for more threads
            thread.join()
