"""`run --profile` and `rehearse` with real workers."""

import json

import pytest
import small


@pytest.mark.slow
def test_reductions_lie_within_backward(base, tmp_path):
    schedule = small.make_schedule(tmp_path, base / "data", init='base_lr: 0.1 lr_policy: "fixed" max_iter: 14')
    trace = tmp_path / "trace.json"
    done = small.run(schedule, tmp_path / "out", "--profile", trace, nproc=2, timeout=300, code=0)
    assert "profile of 10 iterations on 2 workers" in done.stdout
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in (0, 1):
        for iter in range(3, 13):
            mine = [e for e in events if e["pid"] == rank and e["args"]["iteration"] == iter]
            backward = [e for e in mine if e["cat"] == "backward"][-1]
            sums = [e for e in mine if e["cat"] == "reduction"]
            assert len(sums) >= 2  # the tail, and the gradients
            # They leave while backward goes on, and are there before the update.
            assert all(backward["ts"] <= e["ts"] <= backward["ts"] + backward["dur"] + 1e4 for e in sums)
            update = next(e for e in mine if e["cat"] == "update")
            assert all(e["ts"] + e["dur"] <= update["ts"] + 1e3 for e in sums)
    assert {e["args"]["iteration"] for e in events} == set(range(3, 13))


def test_pushes_under_way_do_not_end_a_rehearsal(base, tmp_path):
    """A stage with ASYNC stops where all its workers have pushed, which may be beyond the iteration where it is to stop."""
    words = ["--set", "solver.sync_param={ method: ASYNC replicas: 2 max_staleness: 2 }", "--only", "init"]
    words += ["--iters", 6, "--out", tmp_path / "out", "--nproc", 2, "--threads", 1, "--json"]
    done = small.stagerun("rehearse", base / "schedule", *words, code=0)
    (cost,) = json.loads(done.stdout)["figures"]["costs"]
    assert cost["pass_seconds"] > 0
