"""`stagerun status`: whether a run is alive and how far it is, for a person and as JSON."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from stagerun.base.errors import WORTH_ANOTHER_START
from stagerun.base.pace import STALE, sent, strip
from stagerun.base.snapshots import passed_over
from stagerun.base.text import columns, count, duration, listed, percent, size
from stagerun.command.ending import show, tell
from stagerun.command.options import command, flag
from stagerun.command.shared import Folder, Json, Out, Overrides
from stagerun.logs.lines import ensembles_table, left_out
from stagerun.tools.status.look import Progress, Status, elsewhere, look
from stagerun.tools.status.output import find_target
from stagerun.tools.status.snapshots import SNAPSHOTS, Wishes, show_snapshots
from stagerun.train.results import LIMIT

MOST_WARNINGS = 10
MOST_HOSTS = 8
GOES_ON = "the same `stagerun run` goes on"
STUCK = f"the last {LIMIT} runs got no further, so `stagerun run` asks for --retry"


@command(grouped=True)
def status(
    folder: Folder,
    overrides: Overrides = (),
    out: Out = None,
    as_json: Json = False,
    snapshots: bool = flag(
        "--snapshots",
        "List what is saved instead: whole, damaged, set aside, and what started from it.",
        title=SNAPSHOTS,
    ),
    verify: bool = flag(
        "--verify", "Also read every byte of it; exit code 78 if one differs from its digest.", title=SNAPSHOTS
    ),
    *,
    wishes: Wishes,
) -> None:
    """Shows whether a run is alive, how far it is, and its warnings, from any terminal; with --snapshots, what is saved.

    DIR is the schedule's folder, or the output folder itself. A run counts as alive while it holds the output folder's lock;
    where that doesn't reach, as on another host, while it gives signs of life, for which is waited 15 s at most.

    A snapshot counts as complete when its manifest is as it was written and its files have the right sizes; --verify reads the files too.
    --pin and --unpin work beside a run, --drop does not. All of these list the snapshots afterwards.
    """
    target = find_target(folder, overrides, out)
    if snapshots or verify or wishes != Wishes():
        return show_snapshots(target, verify, wishes, as_json)
    now = time.time()
    found = look(target, now, tell)
    text = status_json(found) if as_json else status_text(found, now)
    show(text + (elsewhere(target) if found.state == "nothing" and not as_json else ""), marks=found.stages)


def status_json(status: Status) -> str:
    ensembles = [asdict(e) | {"gain": e.gain, "gain_over_mean": e.gain_over_mean} for e in status.ensembles]
    return json.dumps(asdict(status) | {"ensembles": ensembles}, indent=1)


def status_text(status: Status, now: float) -> str:
    """`now` in seconds since the epoch."""

    def ago(time: float) -> str:
        return duration(max(0.0, now - time))  # another machine's clock may be ahead

    lines = [f"{status.schedule}: {headline(status, now)}"]
    if status.run is not None:
        threads = count(status.run.threads, "thread")
        workers = count(status.run.workers, "worker")
        if together := status.run.side_by_side:
            workers = f"{count(together, 'worker')}, a stage each,"
        lines.append(f"{workers} on {status.run.device}, {threads} each, output in {status.out}")
        if len(set(status.run.hosts)) > 1:
            lines.append(hosts_text(status.run.hosts))
    if status.stages:
        lines.append(strip(status.stages))
    if status.progress is not None and status.state != "finished":
        lines.append(status.progress.line)
    lines += _side_by_side(status.beside)
    lines += _gradients(status)
    if status.state == "running" and status.last_logged is not None:
        lines.append(f"last logged {ago(status.last_logged)} ago")
    if status.not_finite:
        lines.append(f"{count(status.not_finite, 'iteration')} not finite in this process life")
    if status.snapshot is not None:
        age = "" if status.snapshot.written is None else f", {ago(status.snapshot.written)} old"
        lines.append(f"newest snapshot {status.snapshot.name}, {size(status.snapshot.bytes)}{age}")
    if status.evaluations:
        lines += ["", *_table(status)]
    if status.ensembles:
        lines += ["", ensembles_table(status.ensembles)]
    lines += [passed_over(name) for name in status.forbidden]
    lines += _warnings(status, ago)
    return "\n".join(lines)


def _side_by_side(stages: Sequence[Progress]) -> list[str]:
    """A line for each stage that is trained beside others; all that is known of one that has logged no iteration is its name."""
    rows = [("at work", "iteration", "loss", "images/s", "left in stage")]
    for now in stages:
        known = now.loss is not None and now.images_per_second is not None and now.seconds_left_in_stage is not None
        said = (
            (f"{now.loss:.4f}", f"{now.images_per_second:.0f}", duration(now.seconds_left_in_stage or 0))
            if known
            else ("",) * 3
        )
        rows.append((now.stage, f"{now.iter}/{now.max_iter}" if now.max_iter else "starting", *said))
    return columns(rows) if stages else []


def _gradients(status: Status) -> list[str]:
    """How those of the present or last stage are sent; where a line of progress doesn't say it, how much that is, too."""
    now = status.progress
    if now is None or now.stage not in {**status.gradients, **status.chosen}:
        return []
    chosen = status.chosen.get(now.stage)
    line = f"gradients as AUTO chose: {chosen}" if chosen else f"gradients: {status.gradients[now.stage]}"
    if status.state == "finished" and now.sent_bytes is not None and now.dense_bytes:
        line += f"; {sent(now.sent_bytes, now.dense_bytes)}"
    return [line]


def headline(status: Status, now: float) -> str:
    """Whether it is alive, how it ended, and what to do about it."""

    def ago(time: float) -> str:
        return duration(max(0.0, now - time))

    when = f"{ago(status.last_logged)} ago" if status.last_logged is not None else "before anything was logged"
    last = status.broken_off or ((status.progress,) if status.progress else ())
    places = [f"{one.stage} after iteration {one.iter}" for one in last]
    at = f" in {listed(places)}" if places else ""
    who = str(status.holder) if status.holder else ""
    match status.state:
        case "starting":
            return f"starting, nothing logged yet: {who}"
        case "running":
            return f"running: {who}"
        case "finished":
            return f"finished {when}{left_out(status.not_chosen)}"
        case "stopped":
            why = f" ({status.reason})" if status.reason else ""
            return f"stopped {when}{at}{why}, everything is saved: {GOES_ON}"
        case "failed":
            why = status.reason.partition("\n")[0]
            text = f"ended with exit code {status.exit_code} {when}{at}" + (f": {why}" if why else "")
            if status.stuck:
                return f"{text}; {STUCK}"
            return f"{text}; {GOES_ON}" if status.exit_code in WORTH_ANOTHER_START else text
        case "elsewhere":
            beat = f"beat {status.holder.beat}" if status.holder and status.holder.beat is not None else "its name"
            logged = "nothing logged yet" if status.last_logged is None else f"last logged {when}{at}"
            return (
                f"no word of an end from {who}, which this machine can't see: its last sign of life is {beat}, {logged}; if it "
                f"is dead, {GOES_ON}"
            )
        case "killed":
            return f"killed, or ended without a word, {when}{at}: {STUCK if status.stuck else GOES_ON}"
    return f"nothing has been run yet in {Path(status.out).absolute()}"


def hosts_text(hosts: Sequence[str]) -> str:
    """Where the ranks are; `hosts` by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    named = []
    for host, here in list(ranks.items())[:MOST_HOSTS]:
        in_a_row = here == list(range(here[0], here[-1] + 1)) and len(here) > 2
        numbers = f"{here[0]} to {here[-1]}" if in_a_row else ", ".join(map(str, here))
        named.append(f"{host} ({'rank' if len(here) == 1 else 'ranks'} {numbers})")
    more = len(ranks) - len(named)
    return f"on {count(len(ranks), 'host')}: {', '.join(named)}{f' and {more} more' if more else ''}"


def _table(status: Status) -> list[str]:
    averaged = any(e.ema_top1 is not None for e in status.evaluations)
    rows = [["evaluated", "iteration", "top-1", "top-5", "loss", *["EMA top-1"] * averaged, "snapshot"]]
    for e in status.evaluations:
        scores = [percent(e.top1), percent(e.top5), "" if e.loss is None else f"{e.loss:.4f}"]
        stale = f" ({STALE})" * (status.stages.get(e.stage) == STALE)
        rows.append([e.stage + stale, str(e.iter), *scores, *[percent(e.ema_top1)] * averaged, e.snapshot])
        for val, top1, top5, loss, ema in e.beside:
            scores = [percent(top1), percent(top5), "" if loss is None else f"{loss:.4f}"]
            rows.append([f"{'EMA ' * ema}on {val}", "", *scores, *[""] * averaged, ""])
    return columns(rows)


def _warnings(status: Status, ago: Callable[[float], str]) -> list[str]:
    lines = []
    if status.silent and status.last_logged is not None:
        lines.append(f"warning: nothing has been logged for {ago(status.last_logged)}, though the run is alive")
    if len(status.warnings) > MOST_WARNINGS:
        lines.append(f"{len(status.warnings) - MOST_WARNINGS} older warnings are in log.jsonl")
    lines += [f"warning {ago(w.time)} ago: {w.text}" for w in status.warnings[-MOST_WARNINGS:]]
    if status.unreadable_lines:
        lines.append(f"warning: {count(status.unreadable_lines, 'line')} of log.jsonl can't be read")
    return ["", *lines] if lines else []
