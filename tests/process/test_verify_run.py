"""`stagerun verify-run`: a run that was killed and continued is proven; a changed log, and a changed snapshot that looks whole, are found."""

import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import small
from reliability.forging import Forged

AUDIT = ("--set", "solver.audit_param={ compare_iter: 2 replay_iter: 2 proof_iter: 2 }")


@pytest.fixture(scope="module")
def audited(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that was stopped amid its first stage and continued."""
    out = tmp_path_factory.mktemp("audited") / "out"
    stopped = small.run(
        base / "schedule", out, *AUDIT, nproc=2, env={**os.environ, "OMP_NUM_THREADS": "1", "STAGERUN_FAULT": "kill@60"}
    )
    assert stopped.returncode != 0
    done = small.run(base / "schedule", out, *AUDIT, nproc=2)
    assert done.returncode == 0, done.stderr
    return out


def verify(base: Path, out: Path, *words: object) -> tuple[int, dict[str, object]]:
    done = small.stagerun("verify-run", base / "schedule", "--out", out, *AUDIT, "--json", *words)
    return done.returncode, json.loads(done.stdout)


def test_a_run_that_was_killed_is_proven(base: Path, audited: Path) -> None:
    before = sorted(audited.rglob("*"))
    code, found = verify(base, audited, "--iterations", 5)
    assert (code, found["verdict"], found["wrong"]) == (0, "BIT-EXACT", [])
    assert found["trained"] >= 5 and found["snapshots"] >= 5 and found["proofs"] > 10  # type: ignore[operator]
    assert sorted(audited.rglob("*")) == before, "nothing is written"


def test_one_changed_digest_in_the_log_is_found(base: Path, audited: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(audited, tmp_path / "out"))
    lines = (out / "log.jsonl").read_text().splitlines(keepends=True)
    at = max(n for n, line in enumerate(lines) if '"Proof"' in line and '"cyc1"' in line)
    state = re.search(r'"state": "(\w+)"', lines[at])
    assert state is not None
    lines[at] = lines[at].replace(state[1], f"{int(state[1], 16) ^ 1:016x}")
    (out / "log.jsonl").write_text("".join(lines))
    code, found = verify(base, out, "--iterations", 0)
    assert code == 80 and found["verdict"] == "DIFFERS"
    assert "the proof of `cyc1` at iteration 5 does not follow from the one before it" in found["wrong"]  # type: ignore[operator]


def test_one_changed_bit_of_a_snapshot_with_a_mended_manifest_is_found(
    base: Path, audited: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(audited, tmp_path / "out"))
    (snapshot,) = (out / "snapshots").glob("early-00000003-*")
    forged = Forged(snapshot, tmp_path, random.Random(1))
    data = bytearray(forged.read("model.safetensors"))
    data[-5] ^= 1
    forged.write("model.safetensors", bytes(data))
    forged.finish()
    code, found = verify(base, out, "--iterations", 0)
    assert code == 80 and found["wrong"] == [f"snapshot {snapshot.name} holds another state than the log proves"]
    assert hashlib.sha256(bytes(data)).hexdigest() in (snapshot / "MANIFEST.json").read_text()
