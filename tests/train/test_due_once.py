"""What is due at an iteration where a run stops is done once, over all process lives: evaluations, averages, snapshots, proofs,
synchronisations, and the losses themselves."""

from collections import Counter

import pytest
from facade import Event, Iterated, Proof, RunFinished, SnapshotWritten, Synchronised, TestDue, Tested
from test_run_trees import go, ids, make_schedule, of

pytestmark = pytest.mark.long

# Evaluations at 2, 4, 5; snapshots at 3, 5 and, for the branch, 4.
LINE = 'base_lr: 0.02 lr_policy: "fixed" max_iter: 5 test_interval: 2 test_iter: 1 snapshot: 3 '
KINDS = {
    "average": "ema_decay: 0.9 ema_interval: 2",
    "early stop": "early_stop { metric: LOSS patience_iter: 40 }",
    "proofs": "audit_param { proof_iter: 2 }",
    "replicas": "sync_param { method: LOCAL replicas: 2 period: 2 }",
    "pushes": "sync_param { method: ASYNC replicas: 2 max_staleness: 1 }",
}
STAGES = 'stage { name: "main" }\nstage { name: "cut" from: "main@4" solver_param { base_lr: 0.02 lr_policy: "fixed" max_iter: 1 } }\n'


def stops_after_each_iteration(seen: list[Event]) -> bool:
    return bool(of(seen, Iterated))


def stops_in_each_evaluation(seen: list[Event]) -> bool:
    """But for one that comes first in a life: the one that was stopped before."""
    return isinstance(seen[-1], TestDue) and bool(of(seen, Iterated))


def done(events: list[Event]) -> dict[str, Counter[object]]:
    """By what it is, how often each was done."""
    return {
        "losses": Counter((e.stage, e.iter, e.loss) for e in of(events, Iterated)),
        "evaluations": Counter((e.iter, e.ema, e.loss, e.top1) for e in of(events, Tested)),
        "proofs": Counter((e.iter, e.chain) for e in of(events, Proof)),
        "synchronisations": Counter(e.iter for e in of(events, Synchronised)),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_due_where_a_run_stops_is_done_once(kind, data, tmp_path):
    folder = make_schedule(tmp_path / "s", data, STAGES, main=LINE + KINDS[kind] + "\n")
    whole = go(folder, tmp_path / "whole", "keep_snapshots=20")
    assert {e.iter for e in of(whole, Tested)} >= {2, 4, 5}
    for number, stop in enumerate((stops_after_each_iteration, stops_in_each_evaluation)):
        out, events, lives = tmp_path / f"out{number}", list[Event](), 0
        while not of(events, RunFinished):
            events += go(folder, out, "keep_snapshots=20", stop=stop)
            lives += 1
            assert lives < 20
        assert lives >= 3 and done(events) == done(whole)
        written = Counter((e.stage, e.iter) for e in of(events, SnapshotWritten))
        assert set(written.values()) == {1}
        assert written.keys() >= {(e.stage, e.iter) for e in of(whole, SnapshotWritten)}
        mine, there = ids(out), ids(tmp_path / "whole")
        assert {name: mine[name] for name in there} == there
