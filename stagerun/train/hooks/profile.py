"""`run --profile`: a short stretch of iterations with a clock at each of their joints, for all ranks in one file.

One file, since a viewer opens one, and what there is to be seen (who waits for whom) lies between ranks. Rank 0 writes it, where the
user can find it; the others' spans travel as JSON, after the stretch. It is a Chrome trace, which Perfetto (ui.perfetto.dev) and
chrome://tracing show: the JSON object of the "Trace Event Format", complete events (`ph: X`) with times in microseconds.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from stagerun.base.events import Iterated, Note, NotFinite
from stagerun.base.text import count, size
from stagerun.comm import Comm, gather_json
from stagerun.comm.spans import REDUCTION, Span, Spans, overlap
from stagerun.system.host import host_name
from stagerun.system.process import boot_id
from stagerun.train.hooks import Seen

# Iterations of a process that go before: the first is slow, and the next are fed by batches made ahead.
WARM_UP = 3


class Profile:
    """One for each rank and process life; over when `iterations` were seen, or with the run. While its spans are on, the clocks of
    `engine.timed` and of the network note them."""

    def __init__(self, file: str, iterations: int, comm: Comm) -> None:
        self.file, self.last, self.comm = file, WARM_UP + iterations, comm
        self.seen, self.over = 0, False  # iterations, those of the warm-up too
        self.spans = Spans()
        self.spans.on = False

    def on(self, event: Seen) -> Iterator[Seen]:
        """Collective, at the end of the stretch."""
        yield event
        if isinstance(event, Iterated | NotFinite) and not self.over:
            self.seen += 1
            self._on(self.seen >= WARM_UP)
            if self.seen == self.last:
                yield self.finish()

    def _on(self, on: bool) -> None:
        self.spans.on, self.comm.spans = on, self.spans if on else None

    def finish(self) -> Note:
        """Write what was seen, and report it. Collective; once. A file that can't be written does not end the run: that was tried at its start."""
        self._on(False)
        self.over = True
        # The spans after the clocks: what a thread of the network has still to note is noted by then.
        self.comm.barrier()
        mine = {"now": time.monotonic(), "boot": boot_id() or host_name(), "host": host_name()}
        clocks = gather_json(self.comm, mine)
        spans = gather_json(self.comm, [asdict(span) for span in self.spans.found])
        self.spans.found.clear()
        if self.seen <= WARM_UP:
            return Note(text=f"the run was over before {WARM_UP + 1} iterations: no profile", warning=True)
        if self.comm.rank:
            return Note(text="")
        ranks = []
        for clock, found in zip(clocks, spans, strict=True):
            # One kernel has one clock; two are as far apart as they were after a barrier.
            apart = 0.0 if clock["boot"] == clocks[0]["boot"] else clocks[0]["now"] - clock["now"]
            ranks.append([Span(**one | {end: one[end] + apart for end in ("started", "ended")}) for one in found])
        about = {"workers": self.comm.size, "threads": torch.get_num_threads(), "torch": torch.__version__}
        try:
            Path(self.file).write_text(chrome_trace(ranks, [clock["host"] for clock in clocks], about))
        except OSError as error:
            return Note(text=f"the profile can't be written to {self.file}: {error.strerror}", warning=True)
        return Note(text=profile_line(ranks, self.file))


_TRAINING, _NETWORK = 0, 1  # rows of a rank; reductions that are under way together lie on as many rows as it takes


def chrome_trace(ranks: Sequence[Sequence[Span]], hosts: Sequence[str], about: dict[str, object]) -> str:
    """One process per rank, with a row for what it does and rows for what is on the network: spans by rank 0's clock. The trace begins
    at 0. `about` goes with it."""
    first = min((span.started for spans in ranks for span in spans), default=0.0)
    events: list[dict[str, object]] = []

    def label(rank: int, kind: str, row: int, **args: object) -> None:
        events.append({"ph": "M", "name": kind, "pid": rank, "tid": row, "args": args})

    for rank, (spans, host) in enumerate(zip(ranks, hosts, strict=True)):
        label(rank, "process_name", 0, name=f"rank {rank} on {host}")
        label(rank, "process_sort_index", 0, sort_index=rank)
        label(rank, "thread_name", _TRAINING, name="training")
        rows: list[float] = []  # when each row of the network is free again
        for span in sorted(spans, key=lambda s: (s.started, -s.ended)):
            row, name, args = _TRAINING, span.name, {"stage": span.stage, "iteration": span.iter}
            if span.name == REDUCTION:
                at = next((n for n, free in enumerate(rows) if free <= span.started), len(rows))
                row, name, args["bytes"] = _NETWORK + at, f"{span.name} {size(span.bytes)}", span.bytes
                if at == len(rows):
                    rows.append(0.0)
                    label(rank, "thread_name", row, name=f"network {at + 1}")
                rows[at] = span.ended
            times = {"ts": round(1e6 * (span.started - first), 1), "dur": round(1e6 * span.seconds, 1)}
            events.append({"ph": "X", "name": name, "cat": span.name, "pid": rank, "tid": row, **times, "args": args})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, separators=(",", ":"))


def profile_line(ranks: Sequence[Sequence[Span]], file: str) -> str:
    """Report the profile in one line."""
    found = [overlap(spans) for spans in ranks]
    iterations, sending = max(one.iterations for one in found), sum(one.sending for one in found)
    text = f"profile of {count(iterations, 'iteration')} on {count(len(ranks), 'worker')} in {file}"
    if not sending:
        return text
    per_step, hidden = 1000 * sending / (iterations * len(ranks)), sum(one.hidden for one in found) / sending
    return f"{text}: gradients were on their way for {per_step:.1f} ms of an iteration, {100 * hidden:.0f} % of it while backward went on"
