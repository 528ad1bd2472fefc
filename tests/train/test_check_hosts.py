"""What `stagerun rehearse --hosts` says of hosts: how they differ and which is slow, without any."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from facade import caffe_pb2

from stagerun.language import load
from stagerun.system.host import arithmetic
from stagerun.system.image_sets import Glance
from stagerun.tools.rehearse.hosts import HostSpeed, differences, page, slow_ones
from stagerun.train.compare import Images, Reads, other_schedules, settings_digest, what_is_read, worst

GOLDEN = Path(__file__).parents[1] / "golden" / "hosts"
SEEN = Glance(records=60000, size=47_000_000, fingerprint="a" * 64, ends="1" * 32)
READS = Reads(
    settings="5" * 64,
    files={"schedule.prototxt": "1", "cyc1.prototxt": "2"},
    images=(Images(role="train", path="/data/train_lmdb", seen=SEEN),),
)
NAMES = "node1", "node2", "node3"
HOST = {
    "torch": "2.13.0+cpu",
    "instruction set": "AVX512",
    "processor": "AMD EPYC 9654",
    "processor flags": "avx2 fma avx512f",
    "cores": "96",
    "memory": "768 GB",
    "GPUs": "none",
}


# -- what hosts read


def other(**changes: object) -> list[tuple[int, str, str]]:
    """What is said where node2 reads otherwise."""
    reads = {**dict.fromkeys(NAMES, READS), "node2": replace(READS, **changes)}
    return [(one.code, one.text, one.hint) for one in other_schedules(reads)]


def images(**changes: object) -> tuple[Images, ...]:
    return (Images(role="train", path="/x", seen=replace(SEEN, **changes)),)


def test_a_host_that_reads_otherwise_is_named():
    said = "node2: the schedule is another than on node1, node3: "
    files = {**READS.files, "cyc1.prototxt": "3"}
    assert other() == []
    assert other(settings="6", files=files) == [
        (78, f"{said}cyc1.prototxt", "copy the schedule's folder to every host")
    ]
    assert other(settings="6") == [(78, f"{said}the options (`--set`)", "give the same --set on all hosts")]
    ((code, text, _),) = other(images=images(fingerprint="b" * 64))
    assert code == 65 and text.startswith("node2: train images (/data/train_lmdb): 60000 records, fingerprint bbb")


def test_a_copy_with_a_side_file_of_its_own_is_told_from_other_images():
    """Where a host has no side file the files themselves are compared: alike in all bytes, or not known to be the same."""
    assert other(images=images(fingerprint="")) == []
    ((code, _, hint),) = other(images=images(fingerprint="", ends="2" * 32))
    assert code == 65 and "stagerun data verify --index" in hint


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
    reads, channels = {}, load(base / "schedule").model.channels
    for host, mean in zip(NAMES, (1, 1, 2), strict=True):
        folder = shutil.copytree(base / "schedule", tmp_path / host)
        blob = caffe_pb2.BlobProto(num=1, channels=channels, height=1, width=1, data=[mean] * channels)
        (folder / "mean.binaryproto").write_bytes(blob.SerializeToString())
        param = "solver.test_transform_param"
        schedule = load(str(folder), [f"{param}.mean_file=mean.binaryproto", f"{param}.mean_value=[]"])
        reads[host] = what_is_read(schedule, [])
    (found,) = other_schedules(reads)
    assert "node3" in found.text and found.text.endswith("another than on node1, node2: mean.binaryproto"), found


# -- measured


def measured(seconds: list[float], *slow: int) -> list[HostSpeed]:
    """`slow`: numbers of hosts with a slow link."""
    return [HostSpeed(f"node{n}", 2, s, 1.2e6 if n in slow else 1.2e8) for n, s in enumerate(seconds, 1)]


SLOW = "slow: a training step alone takes 2.5 s (median of the hosts 1 s): 2.5 times"
LINK = "slow link: 1.2 MB/s at best (median of the hosts 120.0 MB/s): 100 times as slow"


@pytest.mark.parametrize(
    "seconds, slow, said",
    [
        ([1.0, 1.1, 1.4], [], []),
        ([1.0, 1.0], [1, 2], []),
        ([1.0, 2.5, 1.0], [], [f"node2: {SLOW}"]),
        ([1.0, 2.5], [], [f"node2: {SLOW}"]),
        ([1.0, 1.0, 2.9, 2.9], [], ["node3: slow: ", "node4: slow: "]),
        ([1.0] * 3, [2], [f"node2: {LINK}"]),
    ],
)
def test_a_slow_host_or_port_is_named_with_its_factor(seconds, slow, said):
    found = list(slow_ones(measured(seconds, *slow)))
    assert [f.code for f in found] == [69] * len(said)
    assert all(f.text.startswith(s) for f, s in zip(found, said, strict=True))


# -- the page

OTHER = {
    **HOST,
    "torch": "2.13.0+cu130",
    "GPUs": "2 x H200",
    "processor flags": "avx2 fma avx512f x",
    "memory": "767 GB",
}
MACHINES = dict.fromkeys(NAMES, HOST)
PAGES = {
    "ready.txt": (MACHINES, measured([1.0, 1.04, 0.98])),
    "slow.txt": (MACHINES, measured([1.0, 1.04, 2.6], 2)),
    "different.txt": ({**MACHINES, "node2": OTHER}, measured([1.0] * 3)),  # the outlier is named against the others
    "two.txt": ({"node1": HOST, "node2": {**HOST, "cores": "4"}}, measured([1.0] * 2)),
}


def shown(name: str) -> str:
    machines, speeds = PAGES[name]
    findings = [*differences(machines), *slow_ones(speeds)]
    return f"{page('resnet50_72ep', machines, speeds, findings)}\n{worst(findings)}\n"


@pytest.mark.parametrize("name", PAGES)
def test_page(name):
    """A page, and the exit code."""
    assert shown(name) == (GOLDEN / name).read_text(), "run this file as a program and read the difference"


if __name__ == "__main__":
    for name in PAGES:
        (GOLDEN / name).write_text(shown(name))
