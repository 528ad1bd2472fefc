"""`stagerun verify`: a run that was killed and continued is proven; a changed log, and a changed snapshot that looks whole, are found."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import processes
import pytest
import small
from processes import events
from reliability.forging import Forged
from test_own_network_run import MODEL, MYNET

AUDIT = (
    "--set", "solver.audit_param={ proof_iter: 2 }", "--set", "keep_snapshots=1",
)  # fmt: skip
PLACES = 3  # of the ten that can be drawn: init 2 4 6, cyc1 2 4 5, collapse 2 3, early 2 3


@pytest.fixture(scope="module")
def audited(base, tmp_path_factory):
    """A run of one worker that was stopped amid its first stage and continued with two, and has no snapshot of that moment."""
    out = tmp_path_factory.mktemp("audited") / "out"
    stopped = small.run(base / "schedule", out, *AUDIT, fault="kill@95")
    assert stopped.returncode != 0
    small.run(base / "schedule", out, *AUDIT, nproc=2, code=0)
    (resumed,) = (e for e in events(out, "StageStarted") if e["iter"] > 0)
    assert resumed["stage"] == "init" and not (out / "snapshots" / resumed["start"]).exists()
    return out


def verify(base: Path, out: Path, *words: object, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    done = small.stagerun("verify", base / "schedule", "--out", out, *AUDIT, "--json", *words, env=env)
    return done.returncode, json.loads(done.stdout)


def test_a_run_that_was_killed_and_went_on_with_other_workers_is_proven(base, audited):
    before = sorted(audited.rglob("*"))
    code, found = verify(base, audited, "--proofs", PLACES)
    assert (code, found["verdict"], found["wrong"]) == (0, "BIT-EXACT", [])
    assert found["trained"] + found["out_of_reach"] >= PLACES and found["out_of_reach"] <= 2, "init, after the kill"
    assert found["snapshots"] == 4 and found["proofs"] == 14
    assert sorted(audited.rglob("*")) == before, "nothing is written"


def test_on_another_processor_it_is_not_comparable(base, audited):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"}
    code, found = verify(base, audited, "--proofs", 1, env=env)
    assert (code, found["verdict"], found["wrong"]) == (0, "NOT COMPARABLE", [])
    assert "instruction set" in str(found["unlike"])


def test_a_proof_that_is_missing_is_found_and_one_that_a_kill_tore_is_not(base, audited, tmp_path):
    out = Path(shutil.copytree(audited, tmp_path / "out"))
    lines = (out / "log.jsonl").read_text().splitlines(keepends=True)
    proofs = {(e["stage"], e["iter"]): n for n, line in enumerate(lines) if (e := json.loads(line))["event"] == "Proof"}

    def without(*gone: int) -> list[str]:
        (out / "log.jsonl").write_text("".join(line for n, line in enumerate(lines) if n not in gone))
        code, found = verify(base, out, "--proofs", 0)
        assert (code, found["verdict"]) == ((80, "DIFFERS") if found["wrong"] else (0, "CONSISTENT"))
        return [text for text in found["wrong"] if not text.startswith("snapshot ")]

    assert without(proofs["early", 3]) == ["the log has no proof of `early` at iteration 3"]
    of_early = [n for (stage, _), n in proofs.items() if stage == "early"]
    assert without(*of_early) == ["the log has no proof of stage `early`, which is trained"]
    (again,) = (n for n, line in enumerate(lines) if n and '"RunStarted"' in line)
    torn = max(n for n, line in enumerate(lines[:again]) if '"Proof"' in line)
    lines[torn] = lines[torn][:40] + "\n"
    assert without(*range(torn + 1, again)) == []


def test_nothing_is_left_of_one_that_is_interrupted(base, audited, tmp_path):
    words = ["verify", base / "schedule", "--out", audited, *AUDIT, "--nproc", 2, "--proofs", 1]
    run = processes.Run([str(word) for word in words], {"TMPDIR": str(tmp_path)}).start()
    end = time.monotonic() + 300
    while len(run.pids()) < 4:  # itself, the launcher and two workers
        assert run.process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    os.kill(run.process.pid, signal.SIGINT)
    code, text = run.wait()
    assert code not in (0, 80) and "Traceback" not in text, text
    assert run.gone() and not list(tmp_path.iterdir())


def test_a_network_of_ones_own_is_run_only_if_asked_to(base, tmp_path):
    folder, out = small.make_schedule(tmp_path / "own", base / "data"), tmp_path / "out"
    lines = (folder / "schedule.prototxt").read_text().splitlines()
    (folder / "schedule.prototxt").write_text("\n".join(MODEL if s.startswith("model {") else s for s in lines))
    (folder / "mynet.py").write_text(MYNET)
    assert small.run(folder, out, *AUDIT, "--only", "init").returncode == 0
    shutil.rmtree(folder)
    refused = small.stagerun("verify", out)
    assert refused.returncode == 64 and "runs Python that it names" in refused.stderr
    assert "--trust-code" in refused.stderr
    done = small.stagerun("verify", out, "--trust-code")
    assert done.returncode == 0 and "\nBIT-EXACT: 4 proofs chained" in done.stdout, done.stdout + done.stderr


def test_what_redo_has_replaced_is_passed_over(base, audited, tmp_path):
    """The old ends of stages whose parent was trained again are there, too, and of no proof."""
    out, words = tmp_path / "out", ("--set", "cyc1.weight_decay=0.01")
    shutil.copytree(audited, out)
    small.run(base / "schedule", out, *AUDIT, *words, "--redo", "cyc1", code=0)
    assert len(list((out / "snapshots").glob("collapse-*"))) > 1
    code, found = verify(base, out, *words, "--proofs", 0)
    assert (code, found["verdict"], found["wrong"]) == (0, "CONSISTENT", [])


def test_a_stage_that_was_given_another_name_is_proven(base, tmp_path):
    folder, out = small.make_schedule(tmp_path / "schedule", base / "data"), tmp_path / "out"
    assert small.run(folder, out, *AUDIT, fault="kill@95").returncode != 0
    assert {e["stage"] for e in events(out, "Proof")} == {"init"} and list((out / "snapshots").glob("init-*"))
    for file in (folder / "init.prototxt", folder / "schedule.prototxt"):
        file.write_text(file.read_text().replace('"init"', '"warm"'))
    (folder / "init.prototxt").rename(folder / "warm.prototxt")
    small.run(folder, out, *AUDIT, code=0)
    assert not list((out / "snapshots").glob("init-*")), "the log alone has the old name"
    for words in ((folder, "--out", out, *AUDIT), (out,)):  # the output folder alone is enough
        proven = small.stagerun("verify", *words, "--proofs", 1, code=0)
        assert re.search(r"warm, 0 to \d: the same", proven.stdout), proven.stdout


def test_one_changed_digest_in_the_log_is_found(base, audited, tmp_path):
    out = Path(shutil.copytree(audited, tmp_path / "out"))
    lines = (out / "log.jsonl").read_text().splitlines(keepends=True)
    at = max(n for n, line in enumerate(lines) if '"Proof"' in line and '"cyc1"' in line)
    state = re.search(r'"state": "(\w+)"', lines[at])
    assert state is not None
    lines[at] = lines[at].replace(state[1], f"{int(state[1], 16) ^ 1:016x}")
    (out / "log.jsonl").write_text("".join(lines))
    # A part that comes out the same is said to, whatever else is wrong.
    said = small.stagerun("verify", base / "schedule", "--out", out, *AUDIT, "--proofs", 1)
    assert said.returncode == 80 and re.search(r"1/1 \w+, .*: the same", said.stdout), said.stdout
    assert "the proof of `cyc1` at iteration 5 does not follow from the previous one" in said.stdout
    nowhere = small.stagerun("verify", base / "schedule", "--out", tmp_path / "nowhere", *AUDIT)
    assert nowhere.returncode == 64 and "has no log of a run" in nowhere.stderr


def test_one_changed_bit_of_a_snapshot_with_a_mended_manifest_is_found(base, audited, tmp_path):
    out = Path(shutil.copytree(audited, tmp_path / "out"))
    (snapshot,) = (out / "snapshots").glob("early-00000003-*")
    forged = Forged(snapshot, tmp_path, random.Random(1))
    data = bytearray(forged.read("model.safetensors"))
    data[-5] ^= 1
    forged.write("model.safetensors", bytes(data))
    forged.finish()
    code, found = verify(base, out, "--proofs", 0)
    assert code == 80 and found["wrong"] == [f"snapshot {snapshot.name} holds another state than the log proves"]
    assert hashlib.sha256(bytes(data)).hexdigest() in (snapshot / "MANIFEST.json").read_text()
