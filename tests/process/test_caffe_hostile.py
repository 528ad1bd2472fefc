"""Files that are no .caffemodel, read by a process that may have 1 GB."""

import resource
import subprocess
import sys

from caffe_lies import LIES


def test_a_file_that_lies_is_refused_in_bounded_memory(tmp_path):
    for i, data in enumerate(LIES.values()):
        (tmp_path / str(i)).write_bytes(data)
    code = (
        "import sys\nfrom pathlib import Path\nfrom stagerun.caffe import binary\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n        binary.shapes(Path(path).read_bytes())\n        print('read')\n"
        "    except ValueError as error:\n        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *(str(tmp_path / str(i)) for i in range(len(LIES)))],
        capture_output=True, text=True, timeout=100,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1_000_000_000,) * 2),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for wanted, said in zip(LIES, done.stdout.splitlines(), strict=True):
        assert wanted in said
