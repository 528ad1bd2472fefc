"""Rules about how long something is, and about fields; every rule by its id, as a literal table and as text. Pure."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stagerun.base.errors import Span
from stagerun.base.recipe import Schedule, Stage
from stagerun.base.text import columns
from stagerun.base.units import epochs
from stagerun.language.layers import DURATIONS
from stagerun.plan.described import unread_fields
from stagerun.tools.lint import finding, rates
from stagerun.tools.lint.finding import Finding, Rule, comments_of, place_of

# Images that may be lost: six epochs of ImageNet, or more than two hours of a GPU that does a thousand in a second.
UNSAVED = 8_000_000

# No more groups than a length has: after each comma of a long list another number may begin, and each would be read to the list's end.
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,6}|[0-9]+)(?:\.[0-9]+)?"
_LENGTH = re.compile(
    rf"(?P<about>(?:\babout|\bsome|\bnearly|\baround|\bcirca|\bca\.?|~|≈)\s*)?(?<![\w./])(?P<low>{_NUMBER})"
    rf"(?:\s*(?:to|-|–)\s*(?P<high>{_NUMBER}))?[\s-]*(?P<unit>epochs?|ep|iterations?|iters?|updates?)\b\.?",
    re.IGNORECASE,
)
# `epochs 5 and 10`, which says where something is.
_PLACES = re.compile(
    rf"\b(?:epochs?|iterations?|iters?|updates?)\s+{_NUMBER}(?:(?:,?\s+and|,|\s+to|-)\s*{_NUMBER})*", re.IGNORECASE
)
# What may stand between the lengths of a comment in a line of its own that says nothing else.
_BETWEEN = re.compile(r"(?:[\s#=:;,.()/]|\b(?:i\.e|or|and|is|are|of|training|this stage)\b)*", re.IGNORECASE)
# What a duration's origin says where it is written in epochs; of a repeated field for each value.
_IN_EPOCHS = re.compile(r"(\w+): ([^\s,\]]+)")
_ABOUT = 0.1  # how far off a number may be that says it is not exact


@dataclass(frozen=True, slots=True)
class _Duration:
    """A field that is written in a line: all of its values, in iterations and in epochs."""

    name: str
    iterations: tuple[int, ...]
    epochs: tuple[float, ...]


def comment_number(schedule: Schedule) -> Iterator[Finding]:
    """A comment behind a duration that gives another length than the line it stands in: `max_iter: 12000   # 25 epochs`; or one in
    the line above that gives a length and says nothing else. What is written is taken as rounded to its last digit; where a comment
    gives several lengths, or several stages read the line, one that agrees is enough.
    """
    durations = _durations(schedule)
    for path, text in schedule.files:
        for comment in comments_of(path, text):
            here = durations.get((path, comment.line + comment.alone), [])
            if comment.alone and not _BETWEEN.fullmatch(_LENGTH.sub("", comment.text)):
                continue
            for units in (("ep",), ("iter", "update")):
                said = [m for m in _LENGTH.finditer(comment.text) if m["unit"].lower().startswith(units)]
                places = [m.group() for m in _PLACES.finditer(comment.text) if m.group().lower().startswith(units)]
                named = [float(n.replace(",", "")) for text in places for n in re.findall(_NUMBER, text)]
                agree = any(_agrees(m, d) for m in said for d in here)
                agree = agree or any(n in (d.epochs if "ep" in units else d.iterations) for n in named for d in here)
                if said and here and not agree:
                    yield _disagreement(Span(path, comment.line, comment.column), said[0], here[0])


def _disagreement(comment: Span, said: re.Match[str], duration: _Duration) -> Finding:
    begin, end = said.start("low"), said.end("unit")
    text = (
        f"the comment says {said.group()[begin - said.start() :]}, and `{duration.name}` is "
        f"{duration.iterations[0]} iterations, {duration.epochs[0]:.4g} epochs"
    )
    span = Span(comment.path, comment.line, comment.column + begin, end - begin)
    return Finding("comment-number", text, span, "one of the two is wrong")


def _durations(schedule: Schedule) -> dict[tuple[str, int], list[_Duration]]:
    """What the durations of each line come to, for every stage that reads it."""
    found: dict[tuple[str, int], list[_Duration]] = {}
    images = schedule.data.train.images
    for stage in schedule.stages:
        for name, _ in DURATIONS:
            origin, value = stage.origins.get(f"solver.{name}"), getattr(stage.solver, name, None)
            values = value if isinstance(value, tuple) else (value,)
            if origin is None or origin.span is None or not values or values[0] is None:
                continue
            lengths = [epochs(v, images, stage.solver.batch_size) for v in values]
            in_epochs = _IN_EPOCHS.findall(origin.text)
            lengths += [float(number.rstrip("fF")) for _, number in in_epochs]
            duration = _Duration(in_epochs[0][0] if in_epochs else name, tuple(values), tuple(lengths))
            found.setdefault((origin.span.path, origin.span.line), []).append(duration)
    return found


def _agrees(said: re.Match[str], duration: _Duration) -> bool:
    low, high = (_number(said[name] or said["low"]) for name in ("low", "high"))
    values = duration.epochs if said["unit"].lower().startswith("ep") else duration.iterations
    slack = [rounding + (_ABOUT * number if said["about"] else 0.0) for number, rounding in (low, high)]
    return any(low[0] - slack[0] <= value <= high[0] + slack[1] for value in values)


def _number(text: str) -> tuple[float, float]:
    """A number as it is written, and half of its last digit's place."""
    return float(text.replace(",", "")), 0.5000001 * 10.0 ** -len(text.partition(".")[2])


def unsaved_work(schedule: Schedule) -> Iterator[Finding]:
    """A kill may cost more than UNSAVED images, since no snapshot is due for so long; or a stage's own file asks for an interval that
    is longer than the stage, so that none is ever due in it. One at the end of a stage is always taken.
    """
    for stage in schedule.stages:
        solver, images = stage.solver, schedule.data.train.images
        span = place_of(stage, "snapshot", "max_iter")
        points = (0, *schedule.branch_points(stage.name), solver.max_iter)  # snapshots are taken there, too
        longest = max(b - a for a, b in itertools.pairwise(points))
        lost = min(solver.snapshot or longest, longest) * solver.batch_size
        if lost > UNSAVED:
            text = f"a kill in stage `{stage.name}` may cost {lost:,} images, {lost / images:.3g} epochs: " + (
                f"snapshots are {solver.snapshot} iterations apart"
                if solver.snapshot
                else "no snapshot is taken inside it"
            )
            hint = f"`snapshot: {max(1, UNSAVED // 4 // solver.batch_size)}` costs {UNSAVED // 4:,} at most"
            yield Finding("unsaved-work", text, span, hint)
        elif solver.snapshot > solver.max_iter and stage.origins["solver.snapshot"].layer != "schedule":
            text = f"`snapshot` {solver.snapshot} is never due: stage `{stage.name}` has {solver.max_iter} iterations"
            yield Finding("unsaved-work", text, span, "there is always one at the end of a stage")


def no_test(schedule: Schedule) -> Iterator[Finding]:
    """Nothing is ever evaluated."""
    if schedule.data.val is None and schedule.stages:
        origin = schedule.stages[0].origins.get("data.train.source")
        path = schedule.files[0][0] if schedule.files else ""
        span = origin.span if origin is not None and origin.span is not None else Span(path, 1, 1)
        hint = "write `val { source: ... images: ... }` in `data`"
        yield Finding("no-test", "there is no `data.val`: nothing says how good the network is", span, hint)


def unread_field(schedule: Schedule) -> Iterator[Finding]:
    """One for each line that sets such a field, whichever stages inherit it; a line that one of them reads is none. What
    `--set` says stands in no file.
    """
    unread = {stage.name: unread_fields(stage) for stage in schedule.stages}
    read: set[Span] = set()
    for stage in schedule.stages:
        read |= _written(stage, but_for=[u.field for u in unread[stage.name]])
    for stage in schedule.stages:
        for field in unread[stage.name]:
            if field.origin.layer == "--set" or field.span in read:
                continue
            why = field.why if field.why.startswith(":") else f",{field.why}"
            text = f"`{field.name}` is not read in stage `{stage.name}`{why}"
            yield Finding("unread-field", text, field.span, "take it out, or is another policy or type meant?")


def _written(stage: Stage, but_for: list[str]) -> set[Span]:
    """Where the fields of Solver stand that the stage has, leaving some out."""
    left_out = {f"solver.{field}" for field in but_for}
    return {o.span for key, o in stage.origins.items() if o.span is not None and key not in left_out}


def _of_comments(schedule: Schedule) -> Iterator[Finding]:
    """`unsilenced` finds these, when it knows what the other rules have found."""
    yield from ()


RULES: dict[str, Rule] = {
    "lr-jump": Rule(
        rates.lr_jump,
        "the learning rate jumps, where two stages, or a warm-up and its policy, meet, or up inside a stage",
    ),
    "warmup-start": Rule(rates.warmup_start, "a warm-up starts above base_lr"),
    "zero-parent": Rule(rates.zero_parent, "a stage goes up again from a parent whose rate has come down to zero"),
    "lr-batch": Rule(rates.lr_batch, "a large batch whose learning rate is far from those of published runs"),
    "decay-on-norm": Rule(rates.decay_on_norm, "a large batch with weight decay on BatchNorm"),
    "batch-images": Rule(rates.batch_images, "an update of more images than there are"),
    "comment-number": Rule(comment_number, "a comment that gives another length than the line it stands in"),
    "unsaved-work": Rule(unsaved_work, "a kill costs much, since snapshots are far apart"),
    "unread-field": Rule(unread_field, "a field that the policy, or the type, of no stage that has it reads"),
    "no-test": Rule(no_test, "there are no images to evaluate with"),
    finding.ID: Rule(_of_comments, "a comment for lint that does nothing; can't be silenced"),
}


def rules_text() -> str:
    """The ids, what each is for, and how a comment silences one."""
    rows = [(f"  {id}", rule.purpose) for id, rule in RULES.items()]
    return "\n".join(
        [
            "lint: what is legal in a schedule and looks wrong (`stagerun check DIR --lint`)",
            "",
            *columns(rows),
            "",
            "A comment silences one where it is meant: in its line, in the line above, or at the head of a file for all of that file.",
            "",
            "  # lint: ignore lr-jump, zero-parent: what the published run did",
        ]
    )
