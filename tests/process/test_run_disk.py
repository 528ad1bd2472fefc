"""A disk that fills up during training: nothing old is lost, and the same command goes on when there is room again."""

import shutil
import subprocess

import processes
import pytest
import small

SIZE_MB = 14  # of the disk; a snapshot of the small model takes 2.5 MB
BALLAST_MB = 10.3  # one fits beside it


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of SIZE_MB. Skips where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full(disk, tmp_path, data):
    # The second and third snapshots are periodic ones that find no room.
    longer = small.STAGES["init"].replace("max_iter: 6", "max_iter: 7")
    schedule = small.make_schedule(tmp_path / "schedule", data, init=longer)
    straight = small.run(schedule, tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr

    out = disk / "out"
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(int(BALLAST_MB * 1e6)))
    full = small.run(schedule, out)
    assert full.returncode == 74, full.stdout + full.stderr
    # A periodic snapshot that fails is a warning; the stage's last one is needed.
    assert "warning: no snapshot of init at 4" in full.stdout
    assert "warning: no snapshot of init at 6" in full.stdout
    assert "init  7/7" in full.stdout, "training went on"
    assert "No space left on device" in full.stderr and "free some space" in full.stderr
    assert sorted(processes.content(out)) == ["init-00000002"]

    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
    again = small.run(schedule, out)
    assert again.returncode == 0, again.stderr
    assert "init: iterations 2 to 7" in again.stdout and "BIT-EXACT" in again.stdout
    assert processes.ends(out) == processes.ends(tmp_path / "straight")
