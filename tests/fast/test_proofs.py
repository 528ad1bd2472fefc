"""Proofs in a log, their chains, which of them are checked, and what `plan` says of audits."""

from facade import Iterated, NotFinite, Proof, RunStarted, SnapshotRef, StageStarted
from test_plan import schedule

from stagerun.base.events import Renamed, chained
from stagerun.plan import PlannedStage, State
from stagerun.tools.verify import ends_before
from stagerun.tools.verify_run import Course, Saved, broken_chains, courses_of, missing, stretches

TREE = schedule()


def life(workers: int, threads: int = 1) -> RunStarted:
    return RunStarted(
        schedule="tree", out="out", workers=workers, device="cpu", threads=threads, stages=(), iterations=20,
        iterations_left=20, version="1",
    )  # fmt: skip


ONE, TWO = life(1), life(2)


def how(run: RunStarted) -> tuple[int, int]:
    return run.workers, run.threads


def started(stage: str, iter: int, start: str = "") -> StageStarted:
    return StageStarted(
        stage=stage, number=1, iter=iter, max_iter=20, start=start, batch_size=1, device_batch_size=1, begins=0
    )


def failed(iter: int, back_to: int | None, number: int = 1) -> NotFinite:
    return NotFinite(
        stage="trunk", iter=iter, lr=0.1, what="loss", done="ROLLBACK", number=number, most=9, position=0, images=1,
        seconds=0.0, back_to=back_to,
    )  # fmt: skip


def saved(iter: int, number: int = 0, attempt: int = 1) -> Saved:
    name = f"trunk-{iter}-{attempt}"
    return Saved(SnapshotRef(name=name, stage="trunk", iter=iter, attempt=attempt, id=name, parent=""), number)


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


def drawn(course: Course, *there: Saved, number: int = 20, seed: int = 1) -> list[tuple[str | None, int, int, int]]:
    """(base, from, until, workers) of each stretch."""
    found, _ = stretches(TREE, {"trunk": course}, there, (number, seed), how)
    return [(one.base.name if one.base else None, one.begins, one.until, one.workers) for one in found]


def test_proofs_are_checked_from_the_nearest_snapshot_before():
    course = courses_of([ONE, started("trunk", 0), *chain("trunk", "", range(0, 21, 5))])[0]["trunk"]
    assert drawn(course, saved(10), saved(20)) == [(None, 0, 10, 1), ("trunk-10-1", 10, 20, 1)]
    (one,) = drawn(course, number=1, seed=3)
    assert one[0] is None and one[2] in (5, 10, 15, 20) and drawn(course, number=1, seed=3) == [one]
    (whole,), beyond = stretches(TREE, {"trunk": course}, [], (20, 1), how)
    assert whole.iters == (5, 10, 15, 20) and beyond == 0


def test_what_a_return_discarded_is_left_out_and_none_is_trained_over():
    """A stop saved iteration 5; in the next life the update after 6 fails, and 4 is where it goes back to; that life is killed, and the third
    one fails and returns again."""
    way_0, way_1 = (chain("trunk", "", range(n)) for n in (7, 13))
    again = [started("trunk", 5), way_0[6], failed(6, 4), started("trunk", 4), *way_1[5:]]
    events = [ONE, started("trunk", 0), *way_0[:6]]
    courses, wrong = courses_of([*events, ONE, *again[:3], ONE, *again])
    course = courses["trunk"]
    assert not wrong and course.returns == {1: 4} and list(course.proofs) == list(range(13))
    assert [course.number(n) for n in (4, 5, 12)] == [0, 1, 1]
    there = [saved(4), saved(5), saved(8, 1)]
    assert drawn(course, *there) == [(None, 0, 4, 1), ("trunk-8-1", 8, 12, 1)], "4 to 8 lies behind the return"
    assert stretches(TREE, courses, there, (20, 1), how)[1] == 4
    elsewhere, _ = courses_of([*events, ONE, *again[:3], ONE, started("trunk", 4), *way_0[5:]])
    assert elsewhere["trunk"].returns == {}, "on another machine it did not fail"


def test_a_stretch_ends_before_its_last_iteration():
    def done(iter: int) -> Iterated:
        return Iterated(
            stage="trunk", iter=iter, epoch=0.0, lr=0.1, momentum=0.9, weight_decay=0.0, loss=1.0, images=1, seconds=0.1
        )

    ends = ends_before("trunk", 6)
    assert [ends(event) for event in (started("trunk", 4), done(5), ONE)] == [False, True, True]
    skips = ends_before("trunk", 7)
    assert [skips(failed(4, None)), skips(failed(5, None))] == [False, True], "on_nan: SKIP"


def test_each_iteration_is_trained_with_the_workers_of_the_life_that_trained_it():
    proofs = chain("trunk", "", range(13))
    events = [ONE, started("trunk", 0), *proofs[:6], TWO, started("trunk", 5), *proofs[6:9], TWO, started("trunk", 8)]
    course = courses_of([*events, *proofs[9:]])[0]["trunk"]
    assert drawn(course, saved(5)) == [(None, 0, 5, 1), ("trunk-5-1", 5, 12, 2)]
    assert drawn(course, saved(4)) == [(None, 0, 4, 1), ("trunk-4-1", 4, 5, 1)], "no snapshot is left where two went on"
    (elastic,), _ = stretches(TREE, {"trunk": course}, [], (20, 1), lambda run: (2, run.threads))
    assert (elastic.until, elastic.workers) == (12, 2)


def test_a_stage_that_was_renamed_has_its_proofs_under_the_new_name_once():
    proofs = chain("old", "", range(3))
    told = Renamed(stage="trunk", snapshots=("old-00000001-a0001",))
    later = chain("old", "", range(2))  # of another stage, which has the old name now
    courses, _ = courses_of([ONE, started("old", 0), *proofs, ONE, told, started("old", 0), *later, ONE, told])
    assert {name: list(course.proofs) for name, course in courses.items()} == {"trunk": [0, 1, 2], "old": [0, 1]}


def test_what_is_trained_has_all_its_proofs():
    made = schedule(trunk='base_lr: 0.1 lr_policy: "fixed" max_iter: 13 audit_param { proof_iter: 5 }')

    def lacking(state: State, iter: int, *iters: int) -> list[int]:
        planned = PlannedStage(stage=made.stage("trunk"), state=state, iter=iter, position=0)
        proofs = {n: Proof(stage="trunk", iter=n, state="", chain="") for n in iters}
        return missing(planned, Course(proofs) if iters else None)

    assert lacking(State.DONE, 13, 0, 5, 7, 10, 13) == []
    assert lacking(State.DONE, 13, 0, 5, 7) == [10, 13] and lacking(State.DONE, 13) == [0, 5, 10, 13]
    assert lacking(State.RESUME, 7, 0, 5) == [] and lacking(State.RESUME, 10, 5) == [0, 10]
    assert lacking(State.FRESH, 0) == []
    bare = PlannedStage(stage=TREE.stage("trunk"), state=State.DONE, iter=20, position=0)
    assert missing(bare, None) == [], "it has no audit_param"
