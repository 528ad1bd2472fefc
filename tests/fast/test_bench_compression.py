"""`bench compression`: which runs it makes, what it reads in their logs, and the table."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from stagerun.base.errors import UsageError
from stagerun.base.recipe import Method
from stagerun.cli import main
from stagerun.language import load
from stagerun.tools.bench.accuracy import accuracy_picture
from stagerun.tools.bench.cases import DENSE, Case, cases, overrides, path, wanted
from stagerun.tools.bench.outcome import Bench, Outcome, as_csv, as_record, diverged, notes, outcome, render

SOLVERS = Path(__file__).parents[2] / "solvers"
FASHION = SOLVERS / "fashion_compressed"


@pytest.mark.long
def test_every_case_is_a_schedule_that_can_be_trained():
    words = ",".join(method.value for method in Method)
    found = cases(wanted(words), scopes=True, memory=True)
    assert found[0] == DENSE and len({case.folder for case in found}) == len(found)
    for case in found:
        (stage,) = path(load(FASHION, overrides([], case, 1)), "main_dense")
        compress = load(FASHION, overrides([stage], case, 5)).stage("main_dense").solver.compress
        assert compress.method.value == ("NONE" if case == DENSE else case.method)
        assert not case.scope or (compress.scope.value, compress.memory.value) == (case.scope, case.memory)


def test_what_has_no_choice_is_one_case():
    def folders(words: str, scopes: bool = False, memory: bool = False) -> list[str]:
        return [case.folder for case in cases(wanted(words), scopes, memory)]

    assert folders("NONE,LOSSLESS,AUTO", True, True) == ["dense", "lossless", "auto"]
    assert folders("POWER_SGD", True, True) == ["dense", "power_sgd-layerwise-residual", "power_sgd-layerwise-none"]
    assert folders("QSGD,TOP_K,TOP_K") == ["dense", "qsgd-layerwise-none", "top_k-layerwise-residual"]
    assert folders("TOP_K ratio: 0.1,TOP_K as_released: true") == [
        "dense",
        "top_k-ratio-0.1-layerwise-residual",
        "top_k-as_released-true-layerwise-none",
    ]


def test_the_last_stage_and_those_it_starts_from():
    tree = load(SOLVERS / "fashion_ensemble")
    assert [stage.name for stage in path(tree, None)] == ["init", "cyc1", "cyc2", "cyc3", "collapse_cyc3"]
    assert [stage.name for stage in path(tree, "cyc1")] == ["init", "cyc1"]
    with pytest.raises(UsageError, match="--stage cyc9"):
        path(tree, "cyc9")
    words = overrides(path(tree, "cyc1"), Case(method="SIGN", scope="LAYERWISE", memory="NONE"), 3)
    assert words[0] == "seed=3" and {word.partition(".")[0] for word in words[1:]} == {"init", "cyc1"}


# -- a log


def line(event: str, **values: object) -> bytes:
    return json.dumps({"time": 0.0, "event": event, **values}).encode() + b"\n"


def iterated(iter: int, seconds: float, sent: int | None, stage: str = "a") -> bytes:
    values = {"stage": stage, "iter": iter, "seconds": seconds}
    return line("Iterated", **values, **({} if sent is None else {"sent_bytes": sent}))


LOG = [
    line("RunStarted", workers=2, device="cpu"),
    line("StageStarted", stage="a", iter=0),
    iterated(1, 1.0, 100),
    iterated(2, 1.0, 100),
    line("Tested", stage="a", iter=2, top1=0.9, ema=False),
    iterated(3, 9.0, 900)[:20],  # killed
    line("RunStarted", workers=2, device="cpu"),
    line("StageStarted", stage="a", iter=1),  # from its snapshot: what came after it doesn't count
    iterated(2, 2.0, 200),
    line("Tested", stage="a", iter=2, top1=0.4, ema=False),
    iterated(3, 3.0, 300),
    line("Tested", stage="a", iter=3, top1=0.6, ema=False),
    line("Tested", stage="a", iter=2, top1=0.99, ema=True),
    iterated(9, 7.0, 9999, stage="b"),
    line("StageFinished", stage="a", top1=0.6),
]


def test_a_run_that_was_killed_counts_each_iteration_once():
    found = outcome(LOG, "a", 4, 0.55)
    assert found == Outcome(seed=4, top1=0.6, bytes=200, seconds=2.0, reached=6.0, workers=(2,), device="cpu")
    assert outcome(LOG, "a", 4, 0.7).reached is None, "it was 90 % in a part that is gone"
    assert outcome(LOG[:-1], "a", 4, None) is None and outcome(LOG, "c", 4, None) is None
    alone = [one for one in LOG if b"Iterated" not in one] + [iterated(1, 1.0, None)]
    assert outcome(alone, "a", 4, None).bytes == 0


def test_a_run_that_diverged_and_was_not_started_again():
    failed = line("Failed", code=79, text="the loss is nan")
    assert diverged([*LOG, failed]) and not diverged(LOG) and not diverged([failed, *LOG])
    assert not diverged([*LOG, line("Failed", code=69, text="")])


# -- the table

TOP_K = Case(method="TOP_K", scope="LAYERWISE", memory="RESIDUAL")
SIGN = Case(method="SIGN", scope="LAYERWISE", memory="NONE")


def run(seed: int, top1: float, sent: float, workers: int = 2, reached: float | None = None) -> Outcome:
    return Outcome(
        seed=seed, top1=top1, bytes=sent, seconds=0.05, reached=reached, workers=(workers,), device="cpu"
    )  # fmt: skip


BENCH = Bench(
    schedule="s", stage="a", accuracy=0.8, cases=[DENSE, TOP_K, SIGN],
    outcomes={
        DENSE: [run(1, 0.80, 1000, reached=10.0), run(2, 0.90, 1000, reached=20.0)],
        TOP_K: [run(1, 0.79, 20, reached=30.0), run(2, 0.89, 22)],
        SIGN: [run(2, 0.85, 30)],
    },
    lost={SIGN: [1]},
)  # fmt: skip


def test_rows_are_against_dense_with_the_same_seeds():
    dense, top_k, sign = BENCH.rows
    assert (dense.top1.mean, dense.gain, dense.share, dense.reached) == (pytest.approx(0.85), None, 1.0, 15.0)
    assert (top_k.gain, top_k.share) == (pytest.approx(-0.01), pytest.approx(0.021))
    assert top_k.reached is None, "one of its seeds did not get there"
    assert sign.gain == pytest.approx(-0.05) and sign.lost == (1,)


def test_what_is_printed_and_written():
    text = render(BENCH)
    assert "85.00 %" in text and "-1.00" in text and "2.1%" in text and "50.0 ms" in text and "to 80 %" in text
    assert "diverged with seed 1" in text and "not all runs" not in text
    record = json.loads(json.dumps(as_record(BENCH)))
    assert len(record["runs"]) == 5 and record["rows"][1]["case"]["method"] == "TOP_K"
    lines = list(csv.DictReader(as_csv(BENCH).splitlines()))
    assert [one["bytes"] for one in lines if one["method"] == "TOP_K"] == ["20", "22"]


def test_what_is_missing_is_said():
    part = Bench(
        schedule="s", stage="a", accuracy=None, cases=[DENSE, TOP_K], outcomes={DENSE: [run(1, 0.8, 0, workers=1)]}
    )
    assert [note.partition(":")[0] for note in notes(part)] == ["one worker sends nothing", "not all runs are done"]
    assert accuracy_picture(part) is None
    mixed = Bench(
        schedule="s", stage="a", accuracy=None, cases=[DENSE],
        outcomes={DENSE: [run(1, 0.8, 10), run(2, 0.8, 10, workers=3)]},
    )  # fmt: skip
    assert any("2 and 3 workers" in note for note in notes(mixed))


def test_the_picture_has_every_method():
    picture = accuracy_picture(BENCH).decode()
    assert picture.startswith("<?xml") and "TOP_K" in picture and "SIGN" in picture
    assert picture == accuracy_picture(BENCH).decode()
    far = replace(BENCH, outcomes={**BENCH.outcomes, SIGN: [run(2, 0.286, 30)]})
    assert "28.6 %" in accuracy_picture(far).decode(), "one that fails doesn't push all others into a corner"


# -- the command line


def test_what_is_done_can_be_shown_while_the_rest_is_trained(tmp_path):
    words = ["bench", "compression", str(FASHION), "--methods", "SIGN", "--stage", "main_dense", "--show"]
    words += ["--out", str(tmp_path)]
    none = CliRunner().invoke(main, words)
    assert none.exit_code == 0 and not list(tmp_path.iterdir())
    folder = tmp_path / "sign-layerwise-residual" / "seed1"
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_bytes(b"".join(LOG).replace(b'"a"', b'"main_dense"'))
    some = CliRunner().invoke(main, words)
    assert some.exit_code == 0 and "60.00 %" in some.output and "not all runs are done" in some.output
    assert (tmp_path / "compression.csv").exists()


def test_mistakes_come_before_the_first_run(tmp_path):
    def said(*words: str) -> str:
        answer = CliRunner().invoke(main, ["bench", "compression", *words, "--out", str(tmp_path / "out")])
        assert answer.exit_code == 64
        return answer.output

    assert "did you mean `TOP_K`?" in said(str(FASHION), "--methods", "TOP_X")
    both = said(str(FASHION), "--methods", "SIGN ratio: 0.1,TOP_K ratio: 2")
    assert "does not read `ratio`" in both and "at most 1, not 2" in both and "2 mistakes" in both
    assert "--stage x" in said(str(FASHION), "--methods", "SIGN", "--stage", "x")
    assert not (tmp_path / "out").exists()
