"""`run --profile`: a short stretch of iterations with a clock at each of their joints, for all ranks in one file.

One file, since a viewer opens one, and what there is to be seen (who waits for whom) lies between ranks. Rank 0 writes it, where the
user can find it; the others' spans travel as JSON, after the stretch. It is a Chrome trace, which Perfetto (ui.perfetto.dev) and
chrome://tracing show: the JSON object of the "Trace Event Format", complete events (`ph: X`) with times in microseconds.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from stagerun.base.events import Iterated, Note, NotFinite
from stagerun.base.spans import REDUCTION, Span, Spans, overlap
from stagerun.base.text import count, size
from stagerun.comm import Comm, gather_json
from stagerun.system.host import host_name
from stagerun.system.process import boot_id
from stagerun.train.hooks import Seen

# Iterations of a process that go before: the first is slow, and the next are fed by batches made ahead.
WARM_UP = 3


class Profile:
    """One for each rank and process life; over when `iterations` were seen, or with the run. While it is `on`, the clocks of
    `engine.timed` and of the network note their spans."""

    def __init__(self, file: str, iterations: int, comm: Comm) -> None:
        self.file, self.iterations, self.comm = file, iterations, comm
        self.before, self.seen, self.over = WARM_UP, 0, False
        self.spans = Spans()
        self.spans.on = False

    def on(self, event: Seen) -> Iterator[Seen]:
        """Collective, at the end of the stretch."""
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
        """Write what was seen, and report it. Collective; once. A file that can't be written does not end the run: that was tried at its start."""
        self._on(False)
        self.over = True
        # The spans after the clocks: what a thread of the network has still to note is noted by then.
        self.comm.barrier()
        clock = {"now": time.monotonic(), "boot": boot_id() or host_name(), "host": host_name()}
        clocks = gather_json(self.comm, clock)
        spans = gather_json(self.comm, [asdict(span) for span in self.spans.found])
        self.spans.found.clear()
        if not self.seen:
            return Note(text=f"the run was over before {WARM_UP + 1} iterations: no profile", warning=True)
        if self.comm.rank:
            return Note(text="")
        ranks = []
        for rank, (clock, found) in enumerate(zip(clocks, spans, strict=True)):
            # One kernel has one clock; two are as far apart as they were after a barrier.
            apart = 0.0 if clock["boot"] == clocks[0]["boot"] else clocks[0]["now"] - clock["now"]
            seen = [
                Span(**{**span, "started": span["started"] + apart, "ended": span["ended"] + apart}) for span in found
            ]
            ranks.append(RankSpans(rank, clock["host"], tuple(seen)))
        about = {"workers": self.comm.size, "threads": torch.get_num_threads(), "torch": torch.__version__}
        try:
            Path(self.file).write_text(chrome_trace(ranks, about))
        except OSError as error:
            return Note(text=f"the profile can't be written to {self.file}: {error.strerror}", warning=True)
        return Note(text=profile_line(ranks, self.file))


# -- the file


_TRAINING, _NETWORK = 0, 1  # rows of a rank; reductions that are under way together lie on as many rows as it takes


@dataclass(frozen=True, slots=True)
class RankSpans:
    """What one rank saw, by rank 0's clock."""

    rank: int
    host: str
    spans: tuple[Span, ...]


def chrome_trace(ranks: Sequence[RankSpans], about: dict[str, object]) -> str:
    """One process per rank, with a row for what it does and rows for what is on the network. The trace begins at 0. `about` goes with
    it."""
    first = min((span.started for rank in ranks for span in rank.spans), default=0.0)
    events: list[dict[str, object]] = []
    for rank in ranks:
        events.append(_name(rank.rank, "process_name", 0, f"rank {rank.rank} on {rank.host}"))
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank.rank, "args": {"sort_index": rank.rank}})
        events.append(_name(rank.rank, "thread_name", _TRAINING, "training"))
        rows: list[float] = []  # when each row of the network is free again
        for span in sorted(rank.spans, key=lambda s: (s.started, -s.ended)):
            row = _TRAINING
            if span.name == REDUCTION:
                row = next((n for n, free in enumerate(rows) if free <= span.started), len(rows))
                if row == len(rows):
                    rows.append(0.0)
                    events.append(_name(rank.rank, "thread_name", _NETWORK + row, f"network {row + 1}"))
                rows[row] = span.ended
                row += _NETWORK
            events.append(
                {
                    "ph": "X",
                    "name": f"{span.name} {size(span.bytes)}" if span.name == REDUCTION else span.name,
                    "cat": span.name,
                    "pid": rank.rank,
                    "tid": row,
                    "ts": round(1e6 * (span.started - first), 1),
                    "dur": round(1e6 * span.seconds, 1),
                    "args": {"stage": span.stage, "iteration": span.iter}
                    | ({"bytes": span.bytes} if span.name == REDUCTION else {}),
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, separators=(",", ":"))


def _name(rank: int, kind: str, row: int, text: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": text}}


def profile_line(ranks: Sequence[RankSpans], file: str) -> str:
    """Report the profile in one line."""
    found = [overlap(rank.spans) for rank in ranks]
    iterations, sending = max(one.iterations for one in found), sum(one.sending for one in found)
    text = f"profile of {count(iterations, 'iteration')} on {count(len(ranks), 'worker')} in {file}"
    if not sending:
        return text
    per_step, hidden = 1000 * sending / (iterations * len(ranks)), sum(one.hidden for one in found) / sending
    return f"{text}: gradients were on their way for {per_step:.1f} ms of an iteration, {100 * hidden:.0f} % of it while backward went on"
