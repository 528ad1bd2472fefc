"""What `run --sync` hands to rsync of a schedule whose net lies elsewhere."""

import os

import contract
import small

SCHEDULE = """
model { channels: 1 } data { train { source: "/d" images: 9 } }
stage { name: "main" solver_param {
  net: "../nets/net.prototxt" batch_size: 4 device_batch_size: 4 base_lr: 0.1 lr_policy: "fixed" max_iter: 2
  transform_param { crop_size: 8 }
} }
"""


def test_sync_carries_the_net(tmp_path, monkeypatch):
    contract.Case.read(contract.CASES / "plan_net.txt").write(tmp_path / "nets")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "schedule.prototxt").write_text(SCHEDULE)
    copier = tmp_path / "bin" / "rsync"
    copier.parent.mkdir()
    copier.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/copied\nexit 1\n')
    copier.chmod(0o755)
    monkeypatch.setenv("PATH", f"{copier.parent}:{os.environ['PATH']}")
    done = small.stagerun("run", tmp_path / "one", "--hosts", "far", "--ssh", "true", "--sync")
    assert done.returncode, done.stdout
    assert f"{tmp_path}/./nets/net.prototxt" in (tmp_path / "copied").read_text().split(), done.stderr
