"""Spans of all ranks as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing show. Pure.

The format is the JSON object of the "Trace Event Format": complete events (`ph: X`) with times in microseconds.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.base.spans import REDUCTION, Overlap, Span, overlap
from stagerun.base.text import count, size

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
            events.append(_event(rank.rank, row, span, first))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, separators=(",", ":"))


def _event(rank: int, row: int, span: Span, first: float) -> dict[str, object]:
    arguments: dict[str, object] = {"stage": span.stage, "iteration": span.iter}
    name = span.name
    if span.name == REDUCTION:
        arguments["bytes"] = span.bytes
        name = f"{name} {size(span.bytes)}"
    return {
        "ph": "X",
        "name": name,
        "cat": span.name,
        "pid": rank,
        "tid": row,
        "ts": round(1e6 * (span.started - first), 1),
        "dur": round(1e6 * span.seconds, 1),
        "args": arguments,
    }


def _name(rank: int, kind: str, row: int, text: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": text}}


def together(ranks: Sequence[RankSpans]) -> Overlap:
    """The sums over all ranks; `iterations` are those of one."""
    found = [overlap(rank.spans) for rank in ranks]
    return Overlap(
        iterations=max(o.iterations for o in found),
        backward=sum(o.backward for o in found),
        sending=sum(o.sending for o in found),
        hidden=sum(o.hidden for o in found),
    )


def profile_line(ranks: Sequence[RankSpans], file: str) -> str:
    """What is said when the file is there."""
    found = together(ranks)
    text = f"profile of {count(found.iterations, 'iteration')} on {count(len(ranks), 'worker')} in {file}"
    if not found.sending:
        return text
    per_step = 1000 * found.sending / (found.iterations * len(ranks))
    return f"{text}: gradients were on their way for {per_step:.1f} ms of an iteration, {100 * found.share:.0f} % of it while backward went on"
