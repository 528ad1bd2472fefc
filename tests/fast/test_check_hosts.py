"""What `stagerun rehearse --hosts` says of hosts: from their facts and from what was measured, without any."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from facade import caffe_pb2
from hypothesis import given
from hypothesis import strategies as st

from stagerun.data.scratch import look, stage
from stagerun.language import load
from stagerun.system.image_sets import Glance
from stagerun.system.machine import arithmetic
from stagerun.tools.rehearse.facts import Facts, differences, host_facts, scratch_room, troubles
from stagerun.tools.rehearse.hosts import HostSpeed, Measured, page, slow_ones
from stagerun.train.compare import Finding, Images, Reads, odd_ones, settings_digest, worst

GOLDEN = Path(__file__).parents[1] / "golden" / "hosts"
SEEN = Glance(records=60000, size=47_000_000, fingerprint="a" * 64, ends="1" * 32)
READS = Reads(
    settings="5" * 64,
    files={"schedule.prototxt": "1", "cyc1.prototxt": "2"},
    images=(Images(role="train", path="/data/train_lmdb", seen=SEEN),),
)
HOST = Facts(
    machine={
        "python": "3.11.7",
        "stagerun": "0.1.0",
        "torch": "2.13.0+cpu",
        "numpy": "2.4.6",
        "processor": "AMD EPYC 9654",
        "instruction set": "AVX512",
        "processor flags": "avx2 fma avx512f",
        "cores": "96",
        "memory": "768 GB",
        "GPUs": "none",
        "GPU driver": "none",
    },
    reads=READS,
    output="out/x on nfs4, which other hosts may see, too, 1.0 TB free",
    scratch_free=200_000_000_000,
)
HOSTS = dict.fromkeys(("node1", "node2", "node3"), HOST)
GONE = Finding(code=65, text="/data/train_lmdb: no such folder", hint="check `source`")


def but(host: str, **changes: object) -> dict[str, Facts]:
    return {**HOSTS, host: replace(HOST, **changes)}


def images(path: str, **changes: object) -> tuple[Images, ...]:
    return (Images(role="train", path=path, seen=replace(SEEN, **changes)),)


# -- facts


def test_hosts_that_are_alike_have_nothing_to_tell():
    """The golden page of them says so; and memory may differ a little."""
    assert differences(but("node2", machine={**HOST.machine, "memory": "767 GB"})) == [] and worst([]) == 0


def test_a_copy_with_a_side_file_of_its_own_is_told_from_other_images():
    """Where a host has no side file the files themselves are compared: alike in all bytes, or not known to be the same."""
    assert differences(but("node2", reads=replace(READS, images=images("/x", fingerprint="")))) == []
    (found,) = differences(but("node2", reads=replace(READS, images=images("/x", fingerprint="", ends="2" * 32))))
    assert found.code == 65 and "stagerun data index" in found.hint


def test_a_mistake_in_the_files_comes_before_what_follows_from_it():
    found = troubles(but("node2", troubles=(GONE, Finding(code=64, text="a mistake"))))
    assert worst(found) == 64


@given(st.dictionaries(st.integers(1, 9).map("node{}".format), st.sampled_from("xyz"), min_size=2))
def test_each_host_that_is_not_like_most_is_in_one_finding(values):
    found = odd_ones(values, "what")
    kinds = sorted((list(values.values()).count(kind) for kind in set(values.values())), reverse=True)
    blamed = [host for finding in found for host in finding.hosts]
    assert len(blamed) == len(set(blamed))
    if len(kinds) == 1:
        assert not found
    elif kinds[0] == kinds[1]:
        assert blamed == list(values)
    else:
        assert len(blamed) == len(values) - kinds[0]


# -- this machine


def test_what_kernels_are_chosen_by_is_named(monkeypatch):
    """oneDNN and MKL look at the processor, and at their own variables."""
    for name in [n for n in os.environ if n.startswith(("MKL_", "ONEDNN_", "DNNL_", "OMP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # `threads`
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # `instruction set`
    flags = Path("/proc/cpuinfo").read_text().partition("flags\t\t:")[2].partition("\n")[0].split()
    found = arithmetic()
    assert found["math settings"] == "none"
    assert not flags or set(found["processor flags"].split()) <= set(flags)
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")
    assert arithmetic()["math settings"] == "MKL_CBWR='AVX2,STRICT' ONEDNN_DEFAULT_FPMATH_MODE='BF16'"


def test_facts_of_a_host_that_is_as_it_should_be(base):
    found = host_facts(str(base / "schedule"), ["seed=3"], str(base / "out"), writes=True)
    plain = host_facts(str(base / "schedule")).reads
    assert found.troubles == () and found.reads is not None and plain is not None
    assert [i.role for i in found.reads.images if i.seen] == ["train", "val"]
    assert found.reads.settings != plain.settings, "an option is part of the schedule"
    assert not (base / "out").exists(), "nothing is left behind"


def settings(folder: Path, *overrides: str) -> str:
    return settings_digest(load(str(folder), overrides))


def test_what_a_host_may_have_otherwise_is_no_other_schedule(base, tmp_path):
    here = base / "schedule"
    plain, copied = settings(here), settings(here, f"data.scratch={tmp_path}")
    assert settings(here, "data.loader_threads=3", "data.cache=DISK") == plain != settings(here, "data.shuffle=false")
    assert settings(here, "data.scratch=/other", "data.scratch_reserve=9") == copied != plain, "all copy, or none"
    # Where it has the files that a schedule names.
    there = shutil.copytree(here, tmp_path / "schedule")
    own, same, other = (
        settings(folder, f'init.weights={{file: "{name}"}}')
        for folder, name in ((here, "w.pt"), (there, "w.pt"), (there, "v.pt"))
    )
    assert own == same != other
    text = (there / "schedule.prototxt").read_text().replace("solver {", "solver { loss { type: BINARY }")
    for name in ("train", "val"):
        (there / f"{name}.txt").write_text("00000000 1\n")
        text = text.replace(f"{name} {{ source:", f'{name} {{ labels: "{name}.txt" source:')
    (there / "schedule.prototxt").write_text(text)
    elsewhere = shutil.copytree(there, tmp_path / "elsewhere" / "schedule")
    assert settings(there) == settings(elsewhere) != settings(here)


def test_another_mean_file_is_another_schedule(base, tmp_path):
    facts, channels = {}, load(base / "schedule").model.channels
    for host, mean in (("node1", 1), ("node2", 1), ("node3", 2)):
        folder = shutil.copytree(base / "schedule", tmp_path / host)
        blob = caffe_pb2.BlobProto(num=1, channels=channels, height=1, width=1, data=[mean] * channels)
        (folder / "mean.binaryproto").write_bytes(blob.SerializeToString())
        param = "solver.test_transform_param"
        facts[host] = host_facts(str(folder), [f"{param}.mean_file=mean.binaryproto", f"{param}.mean_value=[]"])
        assert facts[host].reads
    found = differences(facts)[0]
    assert "node3" in found.text and found.text.endswith("another than on node1, node2: mean.binaryproto"), found


@pytest.mark.parametrize(
    "options, out, code, text",
    [
        (["data.train.source={0}/train"], None, 65, "{0}/train: no such folder"),
        (["data.train.images=7"], None, 65, "but the schedule says images: 7"),
        (["init.base_lr=x"], None, 64, "init.base_lr"),
        (["data.scratch={0}/none"], None, 74, "no such folder"),
        # More must stay free than any disk has: the copies, that need little, don't fit.
        (["data.scratch={0}", "data.scratch_reserve=1e9"], None, 74, "needed for copies of the images"),
        ([], "{0}/file/out", 74, "is a file"),
    ],
)
def test_what_is_wrong_on_a_host(base, tmp_path, options, out, code, text):
    (tmp_path / "file").write_text("")
    options, out = [option.format(tmp_path) for option in options], out and out.format(tmp_path)
    (found,) = host_facts(str(base / "schedule"), options, out, writes=True).troubles
    assert found.code == code and text.format(tmp_path) in found.text
    assert os.listdir(tmp_path) == ["file"]


def test_room_is_looked_at_without_leaving_anything(base, tmp_path):
    home = tmp_path / f"stagerun-{os.getuid()}"
    home.mkdir(mode=0o700)
    schedule = load(str(base / "schedule"), [f"data.scratch={tmp_path}"])
    assert scratch_room(schedule)[2] == 0 and list(home.iterdir()) == []
    [copy] = stage([look(schedule.data.train.path)], str(tmp_path), 0)
    copy.close()
    other = schedule.with_data(lambda data: replace(data, train=data.val[0], val=()))
    assert scratch_room(other)[2] > 0


# -- measured


def measured(seconds: list[float], **rates: float) -> Measured:
    """`rates` of hosts that send or receive more slowly than the others: `sends3`."""
    sends, receives = ({n: rates.get(f"{way}{n}", 1.2e8) for n in range(1, 9)} for way in ("sends", "receives"))
    hosts = tuple(HostSpeed(f"node{n}", 2, s, sends[n], receives[n]) for n, s in enumerate(seconds, 1))
    return Measured(
        stage="cyc1", device="cpu", workers=2 * len(hosts), device_batch_size=32, hosts=hosts, gradient_bytes=102_400_000,
        together_seconds=max(seconds) + 0.4,
    )  # fmt: skip


SLOW = "slow: a training step alone takes 2.5 s (median of the hosts 1 s): 2.5 times"
LINK = "slow link: sends 9.6 Mbit/s at best (median of the hosts 960 Mbit/s): 100 times as slow"


@pytest.mark.parametrize(
    "seconds, rates, said",
    [
        ([1.0, 1.1, 1.4], {}, []),
        ([1.0, 1.0], dict.fromkeys(("sends1", "sends2", "receives1", "receives2"), 1e6), []),
        ([1.0, 2.5, 1.0], {}, [f"node2: {SLOW}"]),
        ([1.0, 2.5], {}, [f"node2: {SLOW}"]),
        ([1.0, 1.0, 2.9, 2.9], {}, ["node3: slow: ", "node4: slow: "]),
        ([1.0] * 3, {"sends2": 1.2e6}, [f"node2: {LINK}"]),
        ([1.0] * 4, {"receives3": 1.2e6}, ["node3: slow link: receives 9.6 Mbit/s"]),
    ],
)
def test_a_slow_host_or_port_is_named_with_its_factor(seconds, rates, said):
    found = list(slow_ones(measured(seconds, **rates).hosts))
    assert [f.code for f in found] == [69] * len(said)
    assert all(f.text.startswith(s) for f, s in zip(found, said, strict=True))


# -- the page

OTHERS = {"torch": "2.13.0+cu130", "numpy": "1.26.4", "instruction set": "AVX2", "GPUs": "2 x H200"}
OTHERS["processor flags"] = "avx2 fma avx512f x"
UNREAD = replace(READS, images=(Images(role="train", path="/data/train_lmdb", seen=None),))
PAGES = {
    "ready.txt": (HOSTS, measured([1.0, 1.04, 0.98])),
    "slow.txt": (HOSTS, measured([1.0, 1.04, 2.6], sends2=1.2e6, receives2=1.2e6)),
    "different.txt": (but("node2", machine={**HOST.machine, "cores": "48"}, reads=UNREAD, troubles=(GONE,)), None),
    # The odd host is named against the others.
    "odd.txt": (but("node2", machine={**HOST.machine, **OTHERS}), None),
    "other_schedule.txt": (but("node2", reads=replace(READS, settings="6", files={**READS.files, "cyc1.prototxt": "3"})), None),
    "other_options.txt": (but("node2", reads=replace(READS, settings="6")), None),
    "other_images.txt": (but("node2", reads=replace(READS, images=images("/x", fingerprint="b" * 64))), None),
    "two.txt": ({"a": HOST, "b": replace(HOST, machine={**HOST.machine, "cores": "4"})}, None),
    "everywhere.txt": ({name: replace(one, troubles=(GONE,)) for name, one in HOSTS.items()}, None),
    # One that could not read its schedule is not compared by it.
    "unread.txt": (but("node3", reads=None, troubles=(Finding(code=64, text="x/schedule.prototxt:1:1: there is no such folder"),)), None),
}  # fmt: skip


def shown(name: str) -> str:
    facts, found = PAGES[name]
    findings = [*troubles(facts), *differences(facts), *(slow_ones(found.hosts) if found else [])]
    return f"{page('resnet50_72ep', facts, found, findings)}\n{worst(findings)}\n"


@pytest.mark.parametrize("name", PAGES)
def test_page(name):
    """A page, and the exit code."""
    assert shown(name) == (GOLDEN / name).read_text(), "run this file as a program and read the difference"


if __name__ == "__main__":
    for name in PAGES:
        (GOLDEN / name).write_text(shown(name))
