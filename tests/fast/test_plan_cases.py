r"""Which stages a plan finds done, stale, or where they go on, from outside: tests/cases/plan/*.txt. Nothing is trained, no disk is read.

A case has the files of a schedule, and a transcript of these lines. Snapshots are told by PLACES: `main@5`, `main` (all that others start
from, and its end), or a directory's name.

`$ trained PLACES... FIELD=VALUE...`  a life that leaves such snapshots (no places: all) of the schedule as it is now; fields are SnapshotRef's,
                                 those with a dot of its identity, `-` for none there
`$ lost PLACES...`               takes snapshots away (no places: all)
`$ edit OLD NEW`                 in whichever files have OLD (`\n` is a new line); `$ undo` takes all edits back
`$ plan --only X ...`            what `plan` finds: stages with snapshots to start from, what differs, pieces, and what is trained anew
`$ run --redo X ...`             the same in a line, or the refusal
"""

import functools
import re
import shlex
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import contract
import pytest
from facade import Inventory, Schedule, SnapshotRef, Stage, StagerunError
from made_schedules import snapshot

from stagerun.language import read
from stagerun.plan import Plan, PlannedStage, make_plan, require_fresh

CASES = sorted((contract.CASES / "plan").glob("*.txt"))


@functools.cache
def read_once(files: tuple[tuple[str, str], ...]) -> Schedule:
    return read({name: text.encode() for name, text in files}, "/s", [])


class Played:
    def __init__(self, files: dict[str, str]) -> None:
        self.first, self.files, self.lives = files, files, 0
        self.refs: list[SnapshotRef] = []

    def plan(self, *words: str) -> Plan:
        named = {
            option: [word for before, word in pairwise(words) if before == f"--{option}"]
            for option in ("redo", "only", "until")
        }
        asked = named["redo"], named["only"], *named["until"]
        of, refs = read_once(tuple(self.files.items())), sorted(self.refs, key=lambda r: (r.attempt, r.iter, r.stage))
        plan = make_plan(of, Inventory(tuple(refs)), *asked)
        again = make_plan(of, plan.inventory, *asked).stages
        assert again == plan.stages, "what it has found out of renamed stages changes nothing of the plan"
        return plan

    def trained(self, *words: str) -> None:
        self.lives += 1
        of = read_once(tuple(self.files.items()))
        fields = dict(word.split("=", 1) for word in words if "=" in word)
        for place in [word for word in words if "=" not in word] or [stage.name for stage in of.stages]:
            name, _, iter = place.partition("@")
            stage = of.stage(name)
            for at in [int(iter)] if iter else [*of.branch_points(name), stage.solver.max_iter]:
                plan = self.plan()
                start = self.start_of(of, stage, plan)
                made = snapshot(of, name, at, start, self.lives, "solver.base_lr solver.lr_policy")
                (now,) = (planned.stage for planned in plan.stages if planned.stage.name == name)
                self.refs.append(changed(replace(made, identity=now.identity), fields))

    def start_of(self, of: Schedule, stage: Stage, plan: Plan) -> str:
        if stage.parent is None:
            return ""
        at = stage.parent_iter or of.stage(stage.parent).solver.max_iter
        known = [*plan.inventory.snapshots, *self.refs]
        return next((ref.id for ref in reversed(known) if (ref.stage, ref.iter) == (stage.parent, at)), "lost")

    def lost(self, *places: str) -> None:
        self.refs = [
            ref for ref in self.refs if places and not {ref.name, ref.stage, f"{ref.stage}@{ref.iter}"} & {*places}
        ]

    def edit(self, old: str, new: str) -> None:
        assert any(old in text for text in self.files.values()), f"{old!r} is nowhere"
        self.files = {name: text.replace(old, new.replace(r"\n", "\n")) for name, text in self.files.items()}

    def undo(self) -> None:
        self.files = self.first

    def said(self, command: str, *words: str) -> str:
        try:
            match command:
                case "plan":
                    return "".join(f"{line}\n" for line in lines(self.plan(*words)))
                case "run":
                    require_fresh(plan := self.plan(*words))
                    work = " -> ".join(f"{step.label} from {step.iter}" for step in plan.work)
                    return f"{work or 'nothing to do'}\n"
            getattr(self, command)(*words)
            return ""
        except StagerunError as error:
            return f"{error.render()}\n"


def changed(ref: SnapshotRef, fields: dict[str, str]) -> SnapshotRef:
    identity = {**ref.identity, **{key: value for key, value in fields.items() if "." in key}}
    own = {key: int(value) if value.isdigit() else value for key, value in fields.items() if "." not in key}
    return replace(ref, identity={key: value for key, value in identity.items() if value != "-"}, **own)


def lines(plan: Plan) -> list[str]:
    found = [stage_line(planned) for planned in plan.stages]
    found += [f"piece {piece.label}{way(piece)}, for {' '.join(piece.children)}" for piece in plan.pieces]
    for lost in plan.lost:
        place = f"{lost.stage}{'' if lost.end else f'@{lost.iter}'} comes again, for {' '.join(lost.children)}"
        place += f", unasked {' '.join(lost.unasked)}" if lost.unasked else ""
        where = f"as it was where {lost.like.name} is from" if lost.like else "nobody knows where it was"
        found.append(f"{place}; {where}")
    found += [f"unclaimed: {' '.join(plan.unclaimed)}"] if plan.unclaimed else []
    both = (plan.least_left, plan.iterations_left), (plan.least, plan.iterations)
    left, whole = (str(most) if least == most else f"{least} to {most}" for least, most in both)
    after = f"; next {plan.next.label} at {plan.next.iter}" if plan.next else ""
    return [*found, f"{left} of {whole} iterations to do{after}"]


def stage_line(planned: PlannedStage) -> str:
    """With the image at which it begins, where it has yet to."""
    begins = f", from image {planned.begins_at}{' at most' * planned.at_most}" if planned.state.value == "fresh" else ""
    why = f": {planned.why.partition(': it was edited')[0]}" if planned.why else ""
    changes = "".join(f"; {change}" for change in planned.changes)
    return f"{planned.stage.name} {planned.state.value}{way(planned)}{begins}{why}{changes}"


def way(planned: PlannedStage) -> str:
    at = f" at {planned.iter}" if planned.state.value == "resume" else ""
    return f"{at} <- {planned.start.name}" if planned.start else at


def played(case: contract.Case) -> str:
    one, text = Played(case.files), ""
    for line in re.findall(r"^\$ (.*)\n", case.transcript, re.MULTILINE):
        text += f"$ {line}\n{one.said(*shlex.split(line))}"
    return text


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path):
    case = contract.Case.read(path)
    assert played(case) == case.transcript, "run scripts/dev golden and read the difference"


if __name__ == "__main__":
    for one in map(contract.Case.read, map(Path, sys.argv[1:]) if sys.argv[1:] else CASES):
        one.rewrite(played(one))
