"""What `report` says of a real run: the tables that the run printed, and a log that reads as Caffe's."""

import json
import subprocess
import sys
from datetime import datetime

import caffe_parser
import small
from made_up_runs import report, rows


def test_tables_need_no_torch_and_agree_with_what_was_printed(finished):
    program = (
        "import sys; from stagerun.cli import main\n"
        "try: main()\nfinally: print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "report", finished / "out"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr
    table = {line.split()[0]: line for line in (finished / "out.txt").read_text().splitlines()[-5:]}
    found = rows(finished / "out")
    assert [(row["stage"], row["from"]) for row in found] == [
        ("init", "seed"), ("cyc1", "init"), ("collapse", "cyc1"), ("early", "init"),
    ]  # fmt: skip
    for row in found:
        assert f"{100 * float(row['top1']):.2f} %" in table[row["stage"]]
        assert f"{float(row['loss']):.4f}" in table[row["stage"]]
    assert rows(finished / "out", "--by", "run")[0]["state"] == "finished"


def test_a_caffe_log_of_a_run_is_read_by_a_parser_of_caffes_lines(finished):
    parsed = caffe_parser.parse(report(finished / "out", "--format", "caffe").stdout, datetime.now().year)
    events = [json.loads(line) for line in (finished / "out" / "log.jsonl").read_text().splitlines()]
    trained, tested = ([e for e in events if e["event"] == name] for name in ("Iterated", "Tested"))
    above = dict(zip(small.STAGES, (0, 6, 11, 14), strict=True))
    assert [row["NumIters"] for row in parsed.train] == [*range(17)]
    assert [above[e["stage"]] + e["iter"] - 1 for e in trained] == [*range(17)]
    assert [row["loss"] for row in parsed.train] == [float(f"{e['loss']:g}") for e in trained]
    assert [row["LearningRate"] for row in parsed.train] == [float(f"{e['lr']:g}") for e in trained]
    assert [row["NumIters"] for row in parsed.test] == [above[e["stage"]] + e["iter"] for e in tested]
    assert [row["accuracy"] for row in parsed.test] == [float(f"{e['top1']:g}") for e in tested]
    assert len(parsed.snapshots) == sum(e["event"] == "SnapshotWritten" for e in events)
    seconds = [row["Seconds"] for row in parsed.train]
    assert seconds == sorted(seconds) and parsed.ends == ["Optimization Done."]
