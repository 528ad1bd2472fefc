"""`run --profile`: timings of the parts of a few iterations, for all ranks in one file.

One file shows which rank waits for which. Rank 0 writes it; the others send their spans as JSON. It is a Chrome trace, which Perfetto
(ui.perfetto.dev) and chrome://tracing show: the JSON object of the "Trace Event Format", complete events (`ph: X`) with times in
microseconds.
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

# Iterations skipped at first: the first is slow, and the next are fed by batches made ahead. Then those of --profile.
WARM_UP, PROFILED = 3, 10


class Profile:
    """The profile of one rank and process life; over after `iterations`, or with the run. While its spans are on, the clocks of
    `engine.loop` and of the network record into them."""

    def __init__(self, file: str, iterations: int, comm: Comm) -> None:
        self.file, self.last, self.comm = file, WARM_UP + iterations, comm
        self.seen, self.over = 0, False  # iterations, with the warm-up
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
        """Write the profile, and report it. Collective; once. A failed write does not end the run: it was tried at the start."""
        self._on(False)
        self.over = True
        # The spans after the clocks: by then threads of the network have recorded all.
        self.comm.barrier()
        clock_now = {"now": time.monotonic(), "boot": boot_id() or host_name(), "host": host_name()}
        clocks = gather_json(self.comm, clock_now)
        spans = gather_json(self.comm, [asdict(span) for span in self.spans.found])
        self.spans.found.clear()
        if self.seen <= WARM_UP:
            return Note(text=f"the run was over before {WARM_UP + 1} iterations: no profile", warning=True)
        if self.comm.rank:
            return Note(text="")
        ranks = []
        for clock, recorded in zip(clocks, spans, strict=True):
            # Hosts have different clocks: compare them after the barrier.
            apart = 0.0 if clock["boot"] == clocks[0]["boot"] else clocks[0]["now"] - clock["now"]
            ranks.append([Span(**one | {end: one[end] + apart for end in ("started", "ended")}) for one in recorded])
        about = {"workers": self.comm.size, "threads": torch.get_num_threads(), "torch": torch.__version__}
        try:
            Path(self.file).write_text(chrome_trace(ranks, [clock["host"] for clock in clocks], about))
        except OSError as error:
            return Note(text=f"the profile can't be written to {self.file}: {error.strerror}", warning=True)
        return Note(text=profile_line(ranks, self.file))


_TRAINING, _NETWORK = 0, 1  # rows of a rank; concurrent reductions need several


def chrome_trace(ranks: Sequence[Sequence[Span]], hosts: Sequence[str], about: dict[str, object]) -> str:
    """Return the trace: a process per rank, with a row for training and rows for the network, spans by rank 0's clock, from 0. `about`
    is added."""
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
    overlaps = [overlap(spans) for spans in ranks]
    iterations, sending = max(one.iterations for one in overlaps), sum(one.sending for one in overlaps)
    text = f"profile of {count(iterations, 'iteration')} on {count(len(ranks), 'worker')} in {file}"
    if not sending:
        return text
    per_step, hidden = 1000 * sending / (iterations * len(ranks)), sum(one.hidden for one in overlaps) / sending
    return (
        f"{text}: gradients were sent for {per_step:.1f} ms of an iteration, {100 * hidden:.0f} % of it during backward"
    )
