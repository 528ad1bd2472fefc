"""`run --profile`: a short stretch of iterations with a clock at each of their joints, for all ranks in one file.

One file, since a viewer opens one, and what there is to be seen (who waits for whom) lies between ranks. Rank 0 writes it, where the
user can find it; the others' spans travel as JSON, after the stretch.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from stagerun.base.events import Event, Iterated, Note, NotFinite
from stagerun.base.spans import Span, Spans
from stagerun.comm import Comm, Reducer, gather_json
from stagerun.engine.images import Batch
from stagerun.engine.loop import StageLoop, train
from stagerun.engine.state import TrainState
from stagerun.engine.timed import timed_train
from stagerun.system.host import host_name
from stagerun.system.process import boot_id
from stagerun.train.trace import RankSpans, chrome_trace, profile_line

# Iterations of a process that go before: the first is slow, and the next are fed by batches made ahead.
WARM_UP = 3


class Profile:
    """One for each rank and process life; over when `iterations` were seen, or with the run."""

    def __init__(self, file: str, iterations: int, comm: Comm) -> None:
        self.file, self.iterations, self.comm = file, iterations, comm
        self.before, self.seen, self.over = WARM_UP, 0, False
        self.spans = Spans()
        self.spans.on = False
        self.host = host_name()

    def train(
        self,
        loop: StageLoop,
        state: TrainState,
        batches: Iterator[Batch],
        reducer: Reducer,
        stop: Callable[[], bool],
        left: Callable[[], float | None],
        device: torch.device,
    ) -> Iterator[Event]:
        """As `engine.loop.train`. Collective, at the end of the stretch, too."""
        if self.over:
            yield from train(loop, state, batches, reducer, stop, left)
            return
        for event in timed_train(loop, state, batches, reducer, stop, left, self.spans, device):
            yield event
            if isinstance(event, Iterated | NotFinite) and not self.over:
                if self.before:
                    self.before -= 1
                else:
                    self.seen += 1
                self._on(not self.before)
                if self.seen == self.iterations:
                    yield self.finish()

    def _on(self, on: bool) -> None:
        self.spans.on, self.comm.spans = on, self.spans if on else None

    def finish(self) -> Note:
        """Writes what was seen, and reports it. Collective; once. A file that can't be written does not end the run: that was tried at its
        start."""
        self._on(False)
        self.over = True
        # The spans after the clocks: what a thread of the network has still to note is noted by then.
        clocks = gather_json(self.comm, self._clock())
        spans = gather_json(self.comm, [asdict(span) for span in self.spans.found])
        self.spans.found.clear()
        if not self.seen:
            return Note(text=f"the run was over before {WARM_UP + 1} iterations: no profile", warning=True)
        if self.comm.rank:
            return Note(text="")
        ranks = [
            RankSpans(rank, clock["host"], tuple(_shifted(Span(**s), _shift(clocks[0], clock)) for s in found))
            for rank, (clock, found) in enumerate(zip(clocks, spans, strict=True))
        ]
        about = {"workers": self.comm.size, "threads": torch.get_num_threads(), "torch": torch.__version__}
        try:
            Path(self.file).write_text(chrome_trace(ranks, about))
        except OSError as error:
            return Note(text=f"the profile can't be written to {self.file}: {error.strerror}", warning=True)
        return Note(text=profile_line(ranks, self.file))

    def _clock(self) -> dict[str, object]:
        self.comm.barrier()
        now = time.monotonic()
        return {"now": now, "boot": boot_id() or self.host, "host": self.host}


def _shift(first: dict[str, Any], other: dict[str, Any]) -> float:
    """Seconds from a rank's clock to rank 0's: the same where one kernel runs both, else as far apart as they were after a barrier."""
    return 0.0 if other["boot"] == first["boot"] else float(first["now"] - other["now"])


def _shifted(span: Span, seconds: float) -> Span:
    return replace(span, started=span.started + seconds, ended=span.ended + seconds)
