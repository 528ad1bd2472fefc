"""Proofs in a log: their chains, and those that a return discarded. process/test_verify*: `verify` of real runs."""

from facade import NotFinite, Proof, RunStarted, SnapshotRef, StageStarted
from test_plan import schedule

from stagerun.base.events import Renamed, chained
from stagerun.tools.verify_run import Course, Saved, broken_chains, courses_of, stretches

TREE = schedule()
ONE = RunStarted(
    schedule="tree", out="out", workers=1, device="cpu", threads=1, stages=(), iterations=20, iterations_left=20, version="1"
)  # fmt: skip


def started(stage: str, iter: int, start: str = "") -> StageStarted:
    return StageStarted(
        stage=stage, number=1, iter=iter, max_iter=20, start=start, batch_size=1, device_batch_size=1, begins=0
    )


FAILED = NotFinite(
    stage="trunk", iter=6, lr=0.1, what="loss", done="ROLLBACK", number=1, most=9, position=0, images=1, seconds=0.0, back_to=4
)  # fmt: skip


def saved(iter: int, number: int = 0) -> Saved:
    name = f"trunk-{iter}-1"
    return Saved(SnapshotRef(name=name, stage="trunk", iter=iter, attempt=1, id=name, parent=""), number)


def chain(stage: str, before: str, iters: range) -> list[Proof]:
    found = []
    for iter in iters:
        state = f"{stage}{iter}"
        before = chained(before, iter, state)
        found.append(Proof(stage=stage, iter=iter, state=state, chain=before))
    return found


def test_a_chain_goes_on_over_kills_and_into_the_stage_that_starts_there():
    trunk = chain("trunk", "", range(0, 21, 5))
    long = chain("long", trunk[-1].chain, range(0, 11, 5))
    events = [ONE, started("trunk", 0), *trunk[:4], started("trunk", 10), *trunk[3:], started("long", 0), *long]
    courses, wrong = courses_of(events)
    assert not wrong and {name: list(course.proofs) for name, course in courses.items()} == {
        "trunk": [0, 5, 10, 15, 20],
        "long": [0, 5, 10],
    }
    assert broken_chains(TREE, courses) == []
    other = Proof(stage="trunk", iter=10, state="other", chain=trunk[2].chain)
    assert broken_chains(TREE, {**courses, "trunk": Course({**courses["trunk"].proofs, 10: other})}) == [
        "the proof of `trunk` at iteration 10 does not follow from the previous one"
    ]
    alone = chain("long", "", range(0, 11, 5))
    assert broken_chains(TREE, {**courses, "long": Course({p.iter: p for p in alone})}) == [
        "the proof of `long` at iteration 0 does not follow from the previous one"
    ]
    # `early_stop` ended the trunk at 10: what starts from its end starts there.
    short = chain("trunk", "", range(0, 11, 5))
    below = chain("long", short[-1].chain, range(0, 11, 5))
    both = {name: Course({p.iter: p for p in its}) for name, its in (("trunk", short), ("long", below))}
    assert broken_chains(TREE, both) == []
    assert list(courses_of([ONE, started("trunk", 0), *trunk, started("trunk", 0), trunk[0]])[0]["trunk"].proofs) == [0]
    assert courses_of(trunk)[1] == ["the log has proofs of `trunk`, and no run that trained it"]


def test_what_a_return_discarded_is_left_out_and_none_is_trained_over():
    """A stop saved iteration 5; in the next life the update after 6 fails, and 4 is where it goes back to; that life is killed, and the third
    one fails and returns again."""
    way_0, way_1 = (chain("trunk", "", range(n)) for n in (7, 13))
    again = [started("trunk", 5), way_0[6], FAILED, started("trunk", 4), *way_1[5:]]
    events = [ONE, started("trunk", 0), *way_0[:6]]
    courses, wrong = courses_of([*events, ONE, *again[:3], ONE, *again])
    course = courses["trunk"]
    assert not wrong and course.returns == {1: 4} and list(course.proofs) == list(range(13))
    assert [course.number(n) for n in (4, 5, 12)] == [0, 1, 1]
    there = [saved(4), saved(5), saved(8, 1)]
    found, beyond = stretches(TREE, courses, there, (20, 1), lambda run: (run.workers, run.threads))
    bases = [(one.base.name if one.base else None, one.begins, one.until) for one in found]
    assert bases == [(None, 0, 4), ("trunk-8-1", 8, 12)] and beyond == 4, "4 to 8 lies behind the return"
    elsewhere, _ = courses_of([*events, ONE, *again[:3], ONE, started("trunk", 4), *way_0[5:]])
    assert elsewhere["trunk"].returns == {}, "on another machine it did not fail"


def test_a_stage_that_was_renamed_has_its_proofs_under_the_new_name_once():
    proofs = chain("old", "", range(3))
    told = Renamed(stage="trunk", snapshots=("old-00000001-a0001",))
    later = chain("old", "", range(2))  # of another stage, which has the old name now
    courses, _ = courses_of([ONE, started("old", 0), *proofs, ONE, told, started("old", 0), *later, ONE, told])
    assert {name: list(course.proofs) for name, course in courses.items()} == {"trunk": [0, 1, 2], "old": [0, 1]}
