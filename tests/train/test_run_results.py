"""What stands in OUT/results after a stage."""

import errno
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from facade import EnsembleTested, SnapshotRef, StageFinished, StorageError

from stagerun.store import LocalDisk
from stagerun.store.logged import result_of
from stagerun.train import results
from stagerun.train.finish import finite

FINISHED = StageFinished(
    stage="a", iterations=1, epochs=1.0, first_lr=0.1, last_lr=0.1, weight_decay=0.0, augmentation="none", loss=1.0,
    top1=0.1, top5=0.5, test_loss=finite(float("nan")), train_seconds=1.0, images_per_second=1.0, snapshot="s",
)  # fmt: skip


def test_a_test_loss_that_is_no_number_is_evaluated_once() -> None:
    """Finite weights can give it; the result must be readable, or each plan would ask for the evaluation again."""
    assert result_of(json.dumps(asdict(FINISHED)).encode()) == FINISHED
    assert finite(float("inf")) is None and finite(2.5) == 2.5


REF = SnapshotRef(name="s", stage="a", iter=1, attempt=1, id="", parent="")
TESTED = EnsembleTested(
    name="both", images=1, top1=0.1, top5=0.5, loss=1.0, seconds=1.0, best="a", best_top1=0.1, mean_top1=0.1,
    members=("a",), snapshots=("s",), rule="MEAN_PROBABILITY", batch_norm_iter=0, tested_on="t",
)  # fmt: skip


@pytest.mark.parametrize("linked", ["results", "results/ensembles"])
def test_the_folder_of_the_results_may_be_a_link(tmp_path: Path, linked: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / linked).parent.mkdir(exist_ok=True)
    (tmp_path / linked).symlink_to(tmp_path / "elsewhere")
    results.write_result(LocalDisk(), tmp_path, FINISHED)
    results.write_ensemble(LocalDisk(), tmp_path, TESTED)
    assert results.read_result(tmp_path, REF) == FINISHED and results.read_ensemble(tmp_path, "both") == TESTED


def test_a_result_that_cannot_be_read_back_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the stage would be evaluated again and again, for ever."""

    def broken(path: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(results, "_read", broken)
    for write in (
        lambda: results.write_result(LocalDisk(), tmp_path, FINISHED),
        lambda: results.write_ensemble(LocalDisk(), tmp_path, TESTED),
    ):
        with pytest.raises(StorageError, match="can't be read back"):
            write()
