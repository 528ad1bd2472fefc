"""Connections to other hosts, as far as one machine shows them: tests/cluster has the rest."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import small
from click.testing import CliRunner

from stagerun.base.caffe_file import state_bytes
from stagerun.base.errors import UsageError
from stagerun.cli import main
from stagerun.language import load
from stagerun.launch.bundle import BAD_STREAM, CANT_WRITE, MOST_BYTES, Bundle, bundle, named_files
from stagerun.launch.hostfile import Host
from stagerun.launch.hosts import Printed
from stagerun.launch.remote import Remote
from stagerun.launch.ssh import Way, passed_on
from stagerun.store.given import find


@pytest.fixture(scope="module")
def schedule(base: Path) -> Path:
    return base / "schedule"


def ssh_that(tmp_path: Path, *lines: str) -> str:
    """A command in the place of ssh."""
    script = tmp_path / "ssh"
    script.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    script.chmod(0o755)
    return str(script)


# Of the words that ssh gets the host is the last but one.
HOST = 'for host; do [ "$host" = a ] && break; [ "$host" = b ] && break; [ "$host" = c ] && break; done'


def test_why_there_is_no_agent_is_reported_of_each_host(schedule: Path, tmp_path: Path) -> None:
    ssh = ssh_that(
        tmp_path, HOST, "case $host in",
        'a) echo "ssh: connect to host a port 22: No route to host" >&2; exit 255;;',
        "b) exit 200;;",
        'c) echo "Welcome to c"; sleep 5;;',
        "esac",
    )  # fmt: skip
    done = small.stagerun("run", schedule, "--hosts", "a,b,c", "--ssh", ssh, "--out", tmp_path / "out")
    assert done.returncode == 69, done.stderr
    assert "a can't be reached: ssh: connect to host a port 22: No route to host\n  hint: `" in done.stderr
    assert f"b has no folder {Path.cwd()}" in done.stderr and "--sync" in done.stderr
    assert "c says `Welcome to c`, which no agent says" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, told",
    [
        (["--hosts", "a,b", "--min-nodes", "3"], "--min-nodes 3, but --hosts names 2 hosts"),
        (["--workers-per-node", "2"], "--workers-per-node without --hosts"),
        (["--hosts", "a,b", "--nproc", "2"], "--nproc and --hosts exclude each other"),
        (["--hosts", "a", "--sync-code"], "--sync-code without --sync"),
        (["--hosts", "a", "--sync", "here"], "--sync here is not an absolute path"),
        (["--hosts", "a,a"], "--hosts:1:3: `a` stands already"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(words: list[str], told: str, schedule: Path) -> None:
    done = CliRunner().invoke(main, ["run", str(schedule), *words])
    assert done.exit_code == 64 and told in done.output, done.output


def test_an_agent_tells_what_its_host_is(schedule: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Remote([Host("localhost")], Way(folder=os.getcwd()), lambda *words: None) as remote:
        question: dict[str, Any] = {"folder": str(schedule), "overrides": [], "out": None, "writes": False}
        found = remote.ask(["localhost"], "facts", **question)["localhost"]
        assert found["devices"] >= 1 and found["facts"]["host"] == os.uname().nodename
        process = remote._lines["localhost"].process
    assert process.wait(60) is not None, "it ends with the launcher's connection"


def lost(ssh: str, question: str, bundle: Bundle | None = None, hosts: Sequence[str] = "a") -> dict[str, Any]:
    """What is said of a host that doesn't answer as it should; nothing where all do."""
    with Remote([Host(name) for name in hosts], Way((ssh,), bundle=bundle), lambda *words: None) as remote:
        if len(remote.ask(hosts, question)) == len(hosts):
            return {}
        return remote.receive(0.0)[0].words


def test_a_bundle_of_some_megabytes_leaves_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagerun.launch.remote.START_S", 20.0)
    data = bytes(24 << 20)
    ssh = ssh_that(
        tmp_path,
        f"head -c {len(data)} >/dev/null",
        """echo '{"is": "answer", "question": "port", "port": 1}'; cat >/dev/null""",
    )
    assert lost(ssh, "port", Bundle("/x", data), "abc") == {}


def test_a_host_that_hangs_while_it_says_that_it_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagerun.launch.remote.ANSWER_S", 0.5)
    ssh = ssh_that(tmp_path, """while sleep 0.1; do echo '{"is": "alive", "starting": true}'; done""")
    told = lost(ssh, "facts")
    assert told["text"].startswith("a has not answered for") and "df` comes back" in told["hint"]


@pytest.mark.parametrize(
    "said",
    [
        '{"is": "answer"}',
        '{"is": "answer", "question": "facts", "facts": {}}',
        '{"is": "ended", "reports": [[0]], "deaths": [], "late": false}',
        '{"is": "failed", "code": "x", "text": ""}',
    ],
)
def test_words_that_miss_something(said: str, tmp_path: Path) -> None:
    told = lost(ssh_that(tmp_path, f"""echo '{{"is": "alive"}}'; sleep 0.2; echo '{said}'; sleep 5"""), "facts")
    assert "which no agent says" in told["text"] and "another stagerun" in told["hint"]


def test_a_pause_of_the_launcher_is_not_the_others_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_ASLEEP_S", 0.3), ("SILENCE_S", 0.5), ("ALIVE_S", 0.1)):
        monkeypatch.setattr(f"stagerun.launch.remote.{name}", seconds)
    ssh = ssh_that(tmp_path, """echo '{"is": "alive", "starting": false}'; exec sleep 60""")
    with Remote([Host("a")], Way((ssh,)), lambda *words: None) as remote:
        while not remote.heard("a"):
            assert remote.receive(0.05) == []
        time.sleep(0.9)
        assert remote.receive(0.0) == [] and remote.slept > 0.8
        last = time.monotonic() + 50
        while not (told := remote.receive(0.05)):
            assert time.monotonic() < last
        assert "was not heard of" in told[0].words["text"], "from then on it is"


def test_what_no_one_reads_holds_up_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr("stagerun.launch.hosts._MOST_UNREAD", 200_000)
    with open(writing, "w", encoding="ascii") as full, open(reading) as reader:
        monkeypatch.setattr("sys.stdout", full)
        monkeypatch.setattr("sys.stderr", full)
        printed = Printed()
        printed.plain = "a"
        printed.show("a", "out", "caf\u00e9\n")
        printed.show("b", "out", "x" * 70_000)
        for number in range(30_000):
            printed.show("a", "out", f"line {number}\n")
        closing = threading.Thread(target=printed.close, daemon=True)
        closing.start()
        text = ""
        while "left out here" not in text:
            text += os.read(reader.fileno(), 1 << 16).decode()
        closing.join(60)
        assert not closing.is_alive()
    assert text.startswith("caf\\xe9\nb: xxx") and "line 100\n" in text and "line 29999\n" not in text


def test_no_secret_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "NCCL_DEBUG", "STAGERUN_REPORT_DIR", "RANK"):
        monkeypatch.setenv(name, "x")
    assert {"NCCL_DEBUG"} == {"AWS_SECRET_ACCESS_KEY", "NCCL_DEBUG", "STAGERUN_REPORT_DIR", "RANK"} & set(passed_on())


def unpacked(data: bytes, command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["sh", "-c", f"{command}; echo $?; cat"], input=data, capture_output=True, timeout=120)


def test_what_is_copied_arrives_and_nothing_else_is_read(tmp_path: Path) -> None:
    made, there = tmp_path / "made", tmp_path / "there"
    made.mkdir()
    for name in ("schedule.prototxt", "init.prototxt", ".hidden"):
        (made / name).write_text(name)
    first, name = bundle(str(there), str(made), code=False)
    assert name == "made"
    done = unpacked(first.data + b"the rest", first.unpack(sys.executable))
    assert done.stdout == b"0\nthe rest", done
    (there / "made" / "mine").write_text("of the user's")
    (made / "init.prototxt").unlink()
    (made / "schedule.prototxt").write_text("edited")
    second, _ = bundle(str(there), str(made), code=False)
    assert unpacked(second.data, second.unpack(sys.executable)).stdout == b"0\n"
    assert sorted(os.listdir(there / "made")) == ["mine", "schedule.prototxt"], "a file that is gone here is gone there"
    assert (there / "made" / "schedule.prototxt").read_text() == "edited"
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "schedule.prototxt").write_text("another")
    third, _ = bundle(str(there), str(beside), code=False)
    assert unpacked(third.data, third.unpack(sys.executable)).stdout == b"0\n"
    assert (there / "made" / "schedule.prototxt").read_text() == "edited", "each schedule has its own"
    damaged = bytes([second.data[0] ^ 1]) + second.data[1:]
    assert unpacked(damaged, second.unpack(sys.executable)).stdout == f"{BAD_STREAM}\n".encode()
    assert unpacked(second.data[:-1], second.unpack(sys.executable)).stdout == f"{BAD_STREAM}\n".encode()
    barred, _ = bundle(str(made / "schedule.prototxt" / "below"), str(made), code=False)
    done = unpacked(barred.data, barred.unpack(sys.executable))
    assert done.stdout == f"{CANT_WRITE}\n".encode() and b"Not a directory" in done.stderr


def test_files_that_the_schedule_names_are_copied_too(tmp_path: Path) -> None:
    made, there = tmp_path / "here" / "made", tmp_path / "there"
    made.mkdir(parents=True)
    (made / "schedule.prototxt").write_text(
        """
        model { name: "resnet_small" num_classes: 2 }
        data { train { source: "/data/train" images: 10 labels: "../labels.txt" } }
        solver { loss { type: BINARY } batch_size: 2 device_batch_size: 2 base_lr: 0.1 lr_policy: "fixed" max_iter: 2 transform_param { crop_size: 28 } }
        stage { name: "far" solver_param { weights { file: "/data/far.pt" } } }
        stage { name: "run" solver_param { weights { file: "../out:trunk" } } }
        stage { name: "gone" solver_param { weights { file: "../gone.pt" } } }
        stage { name: "init" solver_param { weights { file: "../weights/net.pt" } } }
        stage { name: "on" from: "" solver_param { solverstate: "../weights/x.solverstate" } }
        """
    )
    (tmp_path / "here" / "weights" / "deep").mkdir(parents=True)
    (tmp_path / "here" / "weights" / "x.solverstate").write_bytes(state_bytes(1, "deep/x.caffemodel", []))
    (tmp_path / "here" / "weights" / "deep" / "x.caffemodel").write_text("tensors")
    with open(tmp_path / "here" / "weights" / "net.pt", "wb") as file:
        file.truncate(MOST_BYTES + 1)
    (tmp_path / "here" / "labels.txt").write_text("0 1\n")
    (there / "weights").mkdir(parents=True)
    (there / "weights" / "mine").touch()
    (there / ".stagerun-sync.weights").write_text('["weights/mine"]')
    named = named_files(load(made))
    sent, _ = bundle(str(there), str(made), code=False, named=named)
    assert unpacked(sent.data, sent.unpack(sys.executable)).stdout == b"0\n"
    assert load(there / "made").data.train.labels_digest == load(made).data.train.labels_digest
    assert (there / "weights" / "net.pt").stat().st_size == MOST_BYTES + 1
    files = ["net.pt", "x.caffemodel", "x.solverstate"]
    assert sorted(named) == ["../gone.pt", "../labels.txt", *(f"../weights/{file}" for file in files)]
    state = load(there / "made").stage("on").solver.start
    assert state is not None and find(state).path.read_text() == "tensors", "beside the state, where it looks, too"
    assert (there / "weights" / "mine").exists(), "of another schedule's, perhaps"
    with pytest.raises(UsageError, match=r"`../../net.pt` would lie outside ~/x on the hosts"):
        bundle("~/x", str(made), code=False, named={"../../net.pt": str(tmp_path / "net.pt")})


def test_a_folder_that_others_could_write_to_is_not_trusted(tmp_path: Path) -> None:
    made, there = tmp_path / "made", tmp_path / "there"
    made.mkdir()
    (made / "schedule.prototxt").touch()
    sent, _ = bundle(str(there), str(made), code=True)
    command = sent.unpack(sys.executable)
    there.mkdir()
    for folder, mode in (("", 0o777), ("", 0o720), (sent.code, 0o702)):
        (there / folder).mkdir(exist_ok=True)
        (there / folder).chmod(mode)
        done = unpacked(sent.data, command)
        told = f"{there / folder}: others may write to it (mode {mode:04o}); `chmod go-w` it if no one did\n".encode()
        assert (done.stdout, done.stderr) == (f"{CANT_WRITE}\n".encode(), told)
        assert not list(there.glob("*/*")), "nothing is written"
        (there / folder).chmod(0o755)
    if os.getuid() == 0:
        os.chown(there, 1234, 1234)
        assert b"belongs to another user" in unpacked(sent.data, command).stderr
        os.chown(there, 0, 0)
        os.symlink(there, tmp_path / "link")
        os.chown(tmp_path / "link", 1234, 1234, follow_symlinks=False)
        linked, _ = bundle(str(tmp_path / "link"), str(made), code=True)
        assert b"belongs to another user" in unpacked(linked.data, linked.unpack(sys.executable)).stderr
    assert unpacked(sent.data, command).stdout == b"0\n"
    assert (there / sent.code / "stagerun" / "cli.py").exists()


def test_code_that_another_stagerun_left_is_not_on_the_search_path(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / ".stagerun-code").mkdir()
    (tmp_path / ".stagerun-code" / "selectors.py").touch()
    sent, _ = bundle(str(tmp_path), str(tmp_path / "made"), code=True)
    assert unpacked(sent.data, sent.unpack(sys.executable)).stdout == b"0\n"
    assert os.listdir(tmp_path / sent.code) == ["stagerun"]
    assert f"PYTHONPATH={tmp_path}/{sent.code}$" in Way(bundle=sent).agent(Host("localhost"))[-1]


def test_only_what_was_copied_before_is_deleted(tmp_path: Path) -> None:
    made, there, beside = tmp_path / "made", tmp_path / "there", tmp_path / "beside"
    for folder in (made, there, beside, there / "made"):
        folder.mkdir()
    for victim in (there / "mine", beside / "one", beside / "two", beside / "three", there / "made" / "old"):
        victim.touch()
    (there / "made" / "link").symlink_to(beside)
    names = ["mine", "../beside/one", "made/../../beside/one", str(beside / "two"), "made/link/three", 3, "made/old"]
    (there / ".stagerun-sync.made").write_text(json.dumps(names))
    (made / "schedule.prototxt").touch()
    sent, _ = bundle(str(there), str(made), code=False)
    assert unpacked(sent.data, sent.unpack(sys.executable)).stdout == b"0\n"
    assert sorted(os.listdir(beside)) == ["one", "three", "two"] and (there / "mine").exists()
    assert sorted(os.listdir(there / "made")) == ["link", "schedule.prototxt"]


def test_an_agents_interpreter_may_be_older_than_the_launchers(tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text(f'#!/bin/sh\n[ "$1" = -P ] && echo "Unknown option: -P" >&2 && exit 2\nexec {sys.executable} "$@"\n')
    old.chmod(0o755)
    words = Way(python=str(old), folder=str(tmp_path)).agent(Host("localhost"))
    (tmp_path / "selectors.py").write_text("raise SystemExit('executed')\n")
    done = subprocess.run([*words[:-1], f"{words[-1]} --help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "agent" in done.stdout, done.stderr


def test_images_are_not_copied(tmp_path: Path) -> None:
    with open(tmp_path / "data.mdb", "wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(UsageError, match="larger than"):
        bundle("~/x", str(tmp_path), code=False)
    (tmp_path / "data.mdb").unlink()
    for name in ("pipe", "zeros"):
        os.mkfifo(tmp_path / name) if name == "pipe" else (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(UsageError, match=f"{name} is not a regular file"):
            bundle("~/x", str(tmp_path), code=False)
        (tmp_path / name).unlink()
