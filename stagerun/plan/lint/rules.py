"""Every rule by its id. A literal table; and what it says, as text. Pure."""

from collections.abc import Iterator

from stagerun.errors import Span
from stagerun.plan.lint import large_batch, lengths, rates, silence
from stagerun.plan.lint.finding import Finding, Rule
from stagerun.plan.update import unread_fields
from stagerun.recipe import Schedule, Stage
from stagerun.text import columns


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
    """`silence` finds these, when it knows what the other rules have found."""
    yield from ()


RULES: dict[str, Rule] = {
    "lr-jump": Rule(
        rates.lr_jump,
        "the learning rate jumps, where two stages, or a warm-up and its policy, meet, or up inside a stage",
    ),
    "warmup-start": Rule(rates.warmup_start, "a warm-up starts above base_lr"),
    "zero-parent": Rule(rates.zero_parent, "a stage goes up again from a parent whose rate has come down to zero"),
    "lr-batch": Rule(large_batch.lr_batch, "a large batch whose learning rate is far from those of published runs"),
    "decay-on-norm": Rule(large_batch.decay_on_norm, "a large batch with weight decay on BatchNorm"),
    "batch-images": Rule(large_batch.batch_images, "an update of more images than there are"),
    "comment-number": Rule(lengths.comment_number, "a comment that gives another length than the line it stands in"),
    "unsaved-work": Rule(lengths.unsaved_work, "a kill costs much, since snapshots are far apart"),
    "unread-field": Rule(unread_field, "a field that the policy, or the type, of no stage that has it reads"),
    "no-test": Rule(no_test, "there are no images to evaluate with"),
    silence.ID: Rule(_of_comments, "a comment for lint that does nothing; can't be silenced"),
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
