"""Proofs in a log, their chains, which of them are checked, and what `plan` says of audits."""

from test_plan import schedule

from stagerun.base.events import Proof, StageStarted
from stagerun.base.snapshots import SnapshotRef
from stagerun.plan.described import audits
from stagerun.schedule.audits import chained
from stagerun.tools.verify_run.proofs import broken_chains, proofs_of, stretches

TREE = schedule()


def started(stage: str, iter: int) -> StageStarted:
    return StageStarted(
        stage=stage, number=1, iter=iter, max_iter=20, start="", batch_size=1, device_batch_size=1, begins=0
    )


def chain(stage: str, before: str, iters: range) -> list[Proof]:
    found = []
    for iter in iters:
        state = f"{stage}{iter}"
        before = chained(before, iter, state)
        found.append(Proof(stage=stage, iter=iter, state=state, chain=before))
    return found


def test_a_chain_goes_on_over_kills_and_into_the_stage_that_starts_there() -> None:
    trunk = chain("trunk", "", range(0, 21, 5))
    long = chain("long", trunk[-1].chain, range(0, 11, 5))
    events = [started("trunk", 0), *trunk[:4], started("trunk", 10), *trunk[3:], started("long", 0), *long]
    proofs, wrong = proofs_of(events)
    assert not wrong and {name: list(its) for name, its in proofs.items()} == {
        "trunk": [0, 5, 10, 15, 20],
        "long": [0, 5, 10],
    }
    assert broken_chains(TREE, proofs) == []
    other = Proof(stage="trunk", iter=10, state="other", chain=trunk[2].chain)
    assert broken_chains(TREE, {"trunk": {**proofs["trunk"], 10: other}, "long": proofs["long"]}) == [
        "the proof of `trunk` at iteration 10 does not follow from the one before it"
    ]
    alone = chain("long", "", range(0, 11, 5))
    assert broken_chains(TREE, {**proofs, "long": {p.iter: p for p in alone}}) == [
        "the proof of `long` at iteration 0 does not follow from the one before it"
    ]
    assert proofs_of([started("trunk", 0), trunk[0], trunk[1], Proof(stage="trunk", iter=5, state="x", chain="y")])[1]
    assert list(proofs_of([started("trunk", 0), *trunk, started("trunk", 0), trunk[0]])[0]["trunk"]) == [0]


def test_proofs_are_checked_from_the_nearest_snapshot_before() -> None:
    proofs, _ = proofs_of([started("trunk", 0), *chain("trunk", "", range(0, 21, 5))])
    there = [SnapshotRef(name=f"trunk-{n}", stage="trunk", iter=n, attempt=1, id=str(n), parent="") for n in (10, 20)]
    drawn = stretches(TREE, proofs, there, 20, 1)
    assert [(one.base.name if one.base else None, one.begins, one.until, one.iters) for one in drawn] == [
        (None, 0, 10, (5, 10)),
        ("trunk-10", 10, 20, (15, 20)),
    ]
    (one,) = stretches(TREE, proofs, [], 1, 3)
    assert one.base is None and one.until in (5, 10, 15, 20) and stretches(TREE, proofs, [], 1, 3) == [one]


def test_plan_says_what_is_audited_and_what_it_costs() -> None:
    def said(text: str) -> str:
        made = schedule(trunk=f'base_lr: 0.1 lr_policy: "fixed" max_iter: 20 {text}')
        return audits(made.stage("trunk").solver)

    assert said("") == ""
    assert said("audit_param { }") == (
        "audits: workers compared at snapshots and every 200 iterations, a device batch of each computed again every 200 "
        "(0.50% of the arithmetic at most), a proof every 100; on a difference STOP"
    )
    assert said("audit_param { compare_iter: 0 replay_iter: 0 proof_iter: 0 on_difference: ROLLBACK }") == (
        "audits: workers compared at snapshots; on a difference ROLLBACK"
    )
