"""Data and processes: what is killed, stopped, cut off or left open while it makes, copies or reads an LMDB."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import made_images
import pytest
from click.testing import CliRunner
from facade import SIDE_FILE, CopyStopped, write_lmdb
from test_data_lmdb import VALUES as VALUES
from test_data_scratch import BLOCK as BLOCK
from test_data_scratch import HOME as HOME
from test_data_scratch import disk as disk
from test_data_scratch import folders as folders
from test_data_scratch import one as one
from test_data_scratch import small_blocks as small_blocks
from test_data_scratch import source as source
from test_import_engine import content as content
from test_import_engine import expected as expected
from test_import_engine import small_commits as small_commits

from stagerun.cli import main
from stagerun.data.scratch import Progress, look

TESTS = Path(__file__).parents[1]
PATH = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS / "fast", TESTS / "help", TESTS.parent)))}


def python(program: str, *arguments: object) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=PATH)


def ended(program: str, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    with python(program, *arguments) as process:
        out, errors = process.communicate(timeout=600)
    return process.returncode, out, errors


SIGNALLED = """
import os, sys
from stagerun.cli import main
from stagerun.data.importing import engine
commits, number = map(int, sys.argv[1:3])
sys.argv[:3] = ["stagerun"]
engine.RECORDS_PER_COMMIT = 5
whole = engine._commit
def commit(*chunk):
    global commits
    whole(*chunk)
    commits -= 1
    if commits == 0:
        os.kill(os.getpid(), number)
engine._commit = commit
main()
"""


def signalled(commits: int, number: int, *words: str | Path) -> tuple[int, str]:
    """(exit code, stderr) of a command that gets the signal behind so many commits; with 0 it gets none."""
    return ended(SIGNALLED, commits, int(number), "data", *words)[::2]


def test_killed_stopped_and_gone_on_with(tmp_path):
    rng = random.Random(4)
    images = made_images.class_folders(tmp_path / "images", 20)
    for i in range(20, 200):  # the same pictures, under other names
        (images / f"n{i % 3:08d}" / f"{i}.JPEG").write_bytes(made_images.jpeg(i % 7))
    words = ("import", images, tmp_path / "out", "--threads", "2")
    assert signalled(rng.randint(3, 12), signal.SIGKILL, *words)[0] == -signal.SIGKILL
    for number in (signal.SIGTERM, signal.SIGINT):
        code, errors = signalled(rng.randint(3, 12), number, *words)
        assert code == 75 and "resumes behind" in errors and "the same command resumes" in errors
    assert signalled(0, 0, *words)[0] == 0
    assert signalled(0, 0, *words[:2], tmp_path / "whole", "--threads", "1")[0] == 0
    assert (tmp_path / "out" / SIDE_FILE).read_bytes() == (tmp_path / "whole" / SIDE_FILE).read_bytes()
    assert CliRunner().invoke(main, ["data", "verify", str(tmp_path / "out")]).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out", "whole"]


def test_a_kill_half_way_leaves_no_lmdb_under_the_final_name(tmp_path):
    program = """
import os, signal, sys
from stagerun.tools.data.records import write_lmdb
def values():
    yield from [bytes(1000)] * 5000
    os.kill(os.getpid(), signal.SIGKILL)
write_lmdb(sys.argv[1], values())
"""
    assert ended(program, tmp_path / "db")[0] == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["db.partial"]
    assert write_lmdb(str(tmp_path / "db"), VALUES) == 300


def test_an_interpreter_with_an_open_stream_exits():
    program = """
from test_data_loader import endless, loader
stream = loader(depth=1, threads=3).stream(endless())
next(stream)
print('done')
"""
    assert ended(program) == (0, "done\n", "")


SMALL_BLOCKS = (
    f"from stagerun.data.scratch import look, stage; from stagerun.data import scratch; scratch.BLOCK = {BLOCK}\n"
)


def test_many_processes_at_once_make_one_copy(source, disk):
    program = "import sys; c, = stage([look(sys.argv[1])], sys.argv[2], 0); print(c.path, bool(c.bytes))"
    running = [python(SMALL_BLOCKS + program, source, disk) for _ in range(4)]
    lines = [process.communicate(timeout=300)[0].split() for process in running]
    assert len({path for path, _ in lines}) == 1 and len(folders(disk)) == 1
    assert sorted(copied for _, copied in lines) == ["False"] * 3 + ["True"]


def test_a_killed_copy_is_gone_on_from(source, disk):
    program = """
import sys, threading
def watch(progress):
    if progress.done > 5 * scratch.BLOCK:
        print("half", flush=True)
        threading.Event().wait()
stage([look(sys.argv[1])], sys.argv[2], 0, watch=watch)
"""
    with python(SMALL_BLOCKS + program, source, disk) as process:
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        assert folders(disk) == [look(source).name + ".partial"]
        process.send_signal(signal.SIGKILL)
    copy = one(source, disk)
    size = look(source).size
    assert size - 6 * BLOCK <= copy.bytes <= size - 5 * BLOCK, "what was written and checked is not copied again"
    assert Path(copy.path, "data.mdb").read_bytes() == Path(source, "data.mdb").read_bytes()
    assert folders(disk) == [look(source).name]


def test_waiting_ends_when_the_other_is_killed_or_one_is_told_to_stop(source, disk):
    (disk / HOME).mkdir(mode=0o700)
    lock = disk / HOME / f"{look(source).name}.lock"
    program = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(1, flush=True); time.sleep(60)"
    )
    with python(program, lock) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen: list[Progress] = []
        with pytest.raises(CopyStopped):
            one(source, disk, watch=seen.append, stop=lambda: len(seen) > 1)
        assert seen[0] == Progress(0, look(source).size, waiting=True)

        def kill(progress: Progress) -> None:
            process.kill()

        copy = one(source, disk, watch=kill)
    assert copy.bytes


KILLER = """
import json, os, signal, sys, threading
from pathlib import Path
import test_import_engine as t
from stagerun.data import index, write
from stagerun.data.importing import engine, partial
engine.RECORDS_PER_COMMIT = 9
FILES = {m.__file__ for m in (index, write, engine, partial)}
root = Path(sys.argv[1])

def life(out, kill_at):
    # Lines until the end, or 0 where it was killed.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        lines = 0
        def trace(frame, event, argument):
            nonlocal lines
            if frame.f_code.co_filename not in FILES:
                return None
            if event == "line":
                lines += 1
                if lines == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace
        threading.settrace(trace); sys.settrace(trace)
        t.run(t.Numbers(), str(out), t.job())
        os.write(write, str(lines).encode())
        os._exit(0)
    os.close(write)
    text = os.read(read, 100).decode()
    os.close(read)
    os.waitpid(child, 0)
    return int(text or 0)

lines = life(root / "count", 0)
report = {"lines": lines, "killed": 0}
for n, kill_at in enumerate([*range(20, lines, lines // 12), *range(lines - 240, lines, 16)]):
    out = root / f"out{n}"
    report["killed"] += life(out, kill_at) == 0
    if n < 12:
        report["killed"] += life(out, kill_at // 2) == 0
    if life(out, 0) == 0:
        print("failed at", kill_at)
print(json.dumps(report))
"""


def test_killed_anywhere(tmp_path, expected):
    code, out, errors = ended(KILLER, tmp_path)
    assert code == 0, errors
    report = json.loads(out)
    outs = sorted(tmp_path.glob("out*"))
    assert report["killed"] > len(outs) > 25
    assert not [path for path in outs if "partial" in path.name]
    assert all(content(out) == expected for out in outs)
