"""Output folders that someone else has touched or a disk has damaged: no command hangs, ends with a traceback, or follows what was planted."""

import json
import os
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from facade import DataError, Event, ExitCode, Iterated, JsonLines, StorageError, tensors_in
from nan_help import lives, make_data, make_schedule

from stagerun.cli import main

pytestmark = pytest.mark.long

STRANGER = 65534


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a schedule `s`, its finished run `out`, and a file of the victim's."""
    base = tmp_path_factory.mktemp("base")
    data = make_data(base / "lmdb")
    folder = make_schedule(base / "s", data, "snapshot: 4", shared="")
    with JsonLines(base / "log.jsonl", print) as log:
        for event in lives(folder, base / "out"):
            log(event)
    shutil.move(base / "log.jsonl", base / "out" / "log.jsonl")
    (base / "victim").write_text("the victim's file\n")
    return base


def newest(out: Path) -> Path:
    return sorted((out / "snapshots").iterdir())[-1]


def in_place(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Something else in the place of a file of the output folder; `*` is the newest snapshot."""

    def change(out: Path) -> None:
        path = newest(out) / name[2:] if name.startswith("*/") else out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        make(path)

    return change


def line(**changes: object) -> Callable[[Path], None]:
    """A line of the log with other values in it, behind the others."""

    def change(out: Path) -> None:
        log = out / "log.jsonl"
        lines = [json.loads(text) for text in log.read_text().splitlines()]
        kinds = {record["event"]: record for record in lines}
        with log.open("a") as file:
            for kind in ("RunStarted", "StageStarted", "Iterated", "SnapshotWritten", "StageFinished"):
                known = {name: value for name, value in changes.items() if name in kinds.get(kind, ())}
                if known:
                    file.write(json.dumps(kinds[kind] | known) + "\n")

    return change


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)


HOSTILE: dict[str, Callable[[Path], None]] = {
    "log is a FIFO": in_place("log.jsonl", os.mkfifo),
    "log is a link to /dev/zero": in_place("log.jsonl", lambda p: p.symlink_to("/dev/zero")),
    "log is a link to a victim's file": in_place("log.jsonl", lambda p: p.symlink_to(p.parents[1] / "victim")),
    "log is a folder": in_place("log.jsonl", Path.mkdir),
    "log is a link to nowhere": in_place("log.jsonl", lambda p: p.symlink_to("nowhere")),
    "log is binary": in_place("log.jsonl", lambda p: p.write_bytes(bytes(range(256)) * 400)),
    "log is 3 MB of ]": in_place("log.jsonl", lambda p: p.write_text("]" * 3_000_000)),
    "log is nested deep": in_place("log.jsonl", lambda p: p.write_text('{"event": ' * 100_000 + "\n")),
    "numbers beyond all": line(time=1e308, seconds=1e308, loss=1e308, images=2**62, iter=2**62, lr=1e308, iterations=2**62),
    "numbers below all": line(time=-1e308, seconds=-1e308, loss=-1e308, images=-1, iter=-1, train_seconds=-1e308),
    "no numbers": line(time="now", seconds=[], loss={}, images=None, iter="x", stage=3, out=[], schedule=None),
    "a torn line": lambda out: os.truncate(out / "log.jsonl", (out / "log.jsonl").stat().st_size - 7),
    "results are a FIFO": in_place("results", os.mkfifo),
    "a manifest is a FIFO": in_place("*/manifest.json", os.mkfifo),
    "a manifest is 3 MB of ]": in_place("*/manifest.json", lambda p: p.write_text("]" * 3_000_000)),
    "a manifest is a link": in_place("*/manifest.json", lambda p: p.symlink_to(p.parents[3] / "victim")),
    "a state is a FIFO": in_place("*/state.json", os.mkfifo),
    "a recipe is nested deep": in_place("*/recipe.prototxt", lambda p: p.write_text("a { " * 100_000)),
    "weights are 10 GB of nothing": in_place("*/model.safetensors", huge),
    "weights are /dev/zero": in_place("*/model.safetensors", lambda p: p.symlink_to("/dev/zero")),
    "a snapshot is a link": lambda out: (shutil.move(newest(out), out / "moved"), (out / "snapshots" / "main-00000012-a0001").symlink_to("../moved"))[1],
    "rehearsal is a FIFO": in_place("rehearsal.json", os.mkfifo),
}  # fmt: skip
COMMANDS = {
    "status": ["status", "{out}"],
    "status --json": ["status", "{out}", "--json"],
    "report": ["report", "{out}"],
    "view --save": ["view", "{out}", "--save", "{page}"],
    "plan": ["plan", "{folder}", "--out", "{out}"],
    "diff": ["diff", "{folder}", "{out}"],
    "snapshots": ["status", "--snapshots", "{out}"],
    "snapshots --verify": ["status", "--snapshots", "{folder}", "--out", "{out}", "--verify"],
    "eval": ["eval", "{out}"],
    "export": ["export", "{out}", "{page}.safetensors"],
    "predict": ["predict", "{out}", "{page}"],
    "verify": ["verify", "{out}"],
}


@pytest.fixture
def alarmed():
    """An end to what hangs."""

    def late(*_: object) -> None:
        raise AssertionError("it takes longer than 15 s")

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("what", HOSTILE)
def test_every_command_says_what_is_wrong(what, finished, tmp_path, alarmed):
    shutil.copytree(finished, tmp_path / "base")
    out, victim = tmp_path / "base" / "out", tmp_path / "base" / "victim"
    HOSTILE[what](out)
    for name, words in COMMANDS.items():
        places = {"out": out, "folder": finished / "s", "page": tmp_path / "page.html"}
        signal.alarm(15)
        result = CliRunner().invoke(main, [word.format(**places) for word in words])
        signal.alarm(0)
        assert result.exit_code != ExitCode.BUG, f"{name}: {result.output}"
        assert result.exception is None or isinstance(result.exception, SystemExit), f"{name}: {result.exception!r}"
        assert "Traceback" not in result.output and "the victim's" not in result.output, name
    assert victim.read_text() == "the victim's file\n"


def test_a_log_is_not_written_through_a_link(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(StorageError, match="is a link"):
        JsonLines(tmp_path / "link", print)


@pytest.mark.skipif(os.geteuid() != 0, reason="plants links as another user")
@pytest.mark.parametrize("name", ["log.jsonl", "snapshots", "results", "tensorboard"])
def test_a_run_writes_through_no_link_of_another_user(name, finished, tmp_path):
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir(mode=0o777)
    victim.mkdir()
    (out / name).symlink_to(victim)
    os.lchown(out / name, STRANGER, STRANGER)
    run = ["run", str(finished / "s"), "--out", str(out), "--nproc", "1", "--set", "main.max_iter=1"]
    result = CliRunner().invoke(main, run)
    assert result.exit_code == ExitCode.PERMISSION, result.output
    assert f"{out / name} is a link that another user made" in result.output and not list(victim.iterdir())


@pytest.mark.parametrize(
    ("how", "data"),
    [(zipfile.ZIP_DEFLATED, b"\0" * (1 << 26)), (zipfile.ZIP_STORED, b"]" * (3 << 20))],
    ids=["deflated", "long"],
)
def test_a_zip_that_unpacks_to_much_is_refused_first(how, data, tmp_path, alarmed):
    with zipfile.ZipFile(tmp_path / "w.pth", "w", how) as archive:
        archive.writestr("x/data.pkl", data)
    signal.alarm(2)
    with pytest.raises(DataError, match=r"is compressed|holds more than tensors"):
        tensors_in((tmp_path / "w.pth").read_bytes(), "w.pth")
    signal.alarm(0)
    torch.save({"a": torch.ones(2)}, tmp_path / "plain.pth")
    assert torch.equal(tensors_in((tmp_path / "plain.pth").read_bytes(), "plain.pth")["a"], torch.ones(2))


def test_a_folder_that_is_removed_in_mid_run_is_said_to_be(finished, tmp_path):
    def remove(event: Event) -> None:
        if isinstance(event, Iterated) and event.iter == 7:  # no snapshot is being written
            shutil.rmtree(tmp_path / "out")

    with pytest.raises(StorageError, match=r"was removed while|No such file"):
        lives(finished / "s", tmp_path / "out", ask=remove)
