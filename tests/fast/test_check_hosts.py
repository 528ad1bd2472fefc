"""What `stagerun rehearse --hosts` says of hosts: from their facts and from what was measured, without any."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from stagerun.data.scratch import look, stage
from stagerun.data.scratch.layout import held
from stagerun.language import load
from stagerun.language.proto import caffe_pb2
from stagerun.launch.compare import Finding, differences, odd_ones, troubles, unlike, worst
from stagerun.launch.facts import (
    Facts,
    Images,
    Place,
    ScratchRoom,
    Trouble,
    from_json,
    host_facts,
    scratch_room,
    settings_digest,
)
from stagerun.system import machine
from stagerun.system.host import meminfo
from stagerun.system.lmdb_file import Glance, glance
from stagerun.system.machine import arithmetic, gpus, processor
from stagerun.tools.rehearse.hosts_page import HostTimes, Link, Measured, bits, page, rounds, verdicts

GOLDEN = Path(__file__).parents[1] / "golden" / "hosts"
SEEN = Glance(records=60000, size=47_000_000, fingerprint="a" * 64, ends="1" * 32)
HOST = Facts(
    host="node1",
    versions={"python": "3.11.7", "stagerun": "0.1.0", "torch": "2.13.0+cpu", "numpy": "2.4.6"},
    code="c" * 64,
    processor="AMD EPYC 9654",
    instruction_set="AVX512",
    flags=("avx2", "fma", "avx512f"),
    cores=96,
    memory=768_000_000_000,
    gpus=(),
    driver="",
    settings="5" * 64,
    files={"schedule.prototxt": "1", "cyc1.prototxt": "2"},
    images=(Images(role="train", path="/data/train_lmdb", seen=SEEN),),
    scratch=ScratchRoom(path="/scratch", needed=0, free=200_000_000_000, reserve=1_000_000_000, removable=0),
    out=Place(path="out/x", there=True, kind="nfs4", source="nas:/home", free=10**12),
)
HOSTS = {name: replace(HOST, host=name) for name in ("node1", "node2", "node3")}


def but(host: str, **changes: object) -> dict[str, Facts]:
    return {**HOSTS, host: replace(HOSTS[host], **changes)}


# -- facts


def test_hosts_that_are_alike_have_nothing_to_tell() -> None:
    assert differences(HOSTS) == [] and troubles(HOSTS) == [] and worst([]) == 0


@pytest.mark.parametrize(
    "changes, code, said",
    [
        ({"versions": {**HOST.versions, "torch": "2.12.1+cpu"}}, 64, "node2: torch: 2.12.1; 2.13.0 on node1, node3"),
        ({"versions": {**HOST.versions, "stagerun": "0.0.9"}}, 64, "node2: stagerun: 0.0.9; 0.1.0 on node1, node3"),
        ({"code": "d" * 64}, 64, "node2: stagerun's code: dddddddddddd; cccccccccccc on node1, node3"),
        (
            {"settings": "6", "files": {**HOST.files, "cyc1.prototxt": "3"}},
            78,
            "node2: the schedule is another than on node1, node3: cyc1.prototxt",
        ),
        (
            {"settings": "6"},
            78,
            "node2: the schedule is another than on node1, node3: the options (`--set`)\n  hint: give the same --set on all hosts",
        ),
        (
            {"images": (Images(role="train", path="/x", seen=replace(SEEN, fingerprint="b" * 64)),)},
            65,
            "node2: train images (/data/train_lmdb): 60000 records, fingerprint bbbbbbbbbbbb; 60000 records, fingerprint "
            "aaaaaaaaaaaa on node1, node3",
        ),
        ({"versions": {**HOST.versions, "torch": "2.13.0+cu130"}}, 0, "node2: torch's build: 2.13.0+cu130"),
        ({"versions": {**HOST.versions, "numpy": "1.26.4"}}, 0, "node2: numpy: 1.26.4; 2.4.6 on node1, node3"),
        ({"instruction_set": "AVX2"}, 0, "node2: instruction set: AVX2; AVX512 on node1, node3"),
        ({"flags": (*HOST.flags, "avx512_bf16")}, 0, "node2: processor flags: avx512_bf16; none on node1, node3"),
        ({"cores": 48}, 0, "node2: cores: 48; 96 on node1, node3"),
        ({"gpus": ("H200", "H200")}, 0, "node2: GPUs: 2 x H200; none on node1, node3"),
        ({"memory": 384_000_000_000}, 0, "node2: memory: 384 GB; 768 GB on node1, node3"),
    ],
)
def test_the_odd_host_is_named_against_the_others(changes: dict[str, object], code: int, said: str) -> None:
    (found,) = differences(but("node2", **changes))
    assert found.hosts == ("node2",) and found.code == code
    assert found.render().startswith(said)


def test_a_copy_with_a_side_file_of_its_own_is_told_from_other_images() -> None:
    """Where a host has no side file the files themselves are compared: alike in all bytes, or not known to be the same."""
    bare = Images(role="train", path="/x", seen=replace(SEEN, fingerprint=""))
    assert differences(but("node2", images=(bare,))) == []
    other = Images(role="train", path="/x", seen=replace(SEEN, fingerprint="", ends="2" * 32))
    (found,) = differences(but("node2", images=(other,)))
    assert found.code == 65 and "stagerun data index" in found.hint


def test_two_hosts_have_no_majority() -> None:
    two = {"a": HOST, "b": replace(HOST, cores=4)}
    (found,) = differences(two)
    assert found.hosts == ("a", "b") and found.text == "cores: 96 on a; 4 on b"


def test_a_host_that_could_not_read_its_schedule_is_not_compared_by_it() -> None:
    mistake = Trouble(code=64, text="x/schedule.prototxt:1:1: there is no such folder")
    facts = but("node3", settings="", files={}, images=(), troubles=(mistake,))
    assert differences(facts) == []
    (found,) = troubles(facts)
    assert found.hosts == ("node3",) and found.render().startswith("node3: x/schedule.prototxt:1:1")


def test_the_same_trouble_everywhere_is_told_once() -> None:
    trouble = Trouble(code=65, text="/data: no such folder", hint="check")
    (found,) = troubles({name: replace(one, troubles=(trouble,)) for name, one in HOSTS.items()})
    assert found.render() == "all 3 hosts: /data: no such folder\n  hint: check"
    mistake = replace(HOSTS["node2"], troubles=(trouble, Trouble(code=64, text="a mistake")))
    assert worst(troubles({**HOSTS, "node2": mistake})) == 64, (
        "a mistake in the files comes before what follows from it"
    )


@given(st.dictionaries(st.integers(1, 9).map("node{}".format), st.sampled_from("xyz"), min_size=2))
def test_each_host_that_is_not_like_most_is_in_one_finding(values: dict[str, str]) -> None:
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


def test_facts_survive_the_wire_and_others_are_refused() -> None:
    assert from_json(json.loads(json.dumps(HOST.as_json()))) == HOST
    for change in ({"cores": None, "more": 1}, {"images": [{"role": "train"}]}, {"scratch": {"path": "x"}}):
        with pytest.raises(ValueError, match="not facts of a host"):
            from_json({**HOST.as_json(), **change})


def test_facts_of_another_stagerun_name_the_odd_host() -> None:
    other = {**HOST.as_json(), "code": "d" * 64, "more": 1}
    (found,) = unlike({"node1": HOST.as_json(), "node2": other, "node3": HOST.as_json()})
    assert found.code == 64 and found.text.startswith("node2: stagerun: 0.1.0 (dddddddddddd); 0.1.0 (cccc")
    assert unlike({"node1": {}, "node2": {"versions": 3}})[0].code == 64


# -- this machine


CPUINFO = """processor\t: 0
model name\t: Intel(R) Xeon(R) Gold 6148
flags\t\t: fpu sse4_2 avx2 fma f16c avx512f avx512dq avx512bw avx512vl
bugs\t\t: spectre_v1

processor\t: 1
model name\t: another
flags\t\t: fpu
"""


def test_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    model, flags, instructions = processor(CPUINFO.splitlines())
    assert (model, flags, instructions) == (
        "Intel(R) Xeon(R) Gold 6148",
        ("avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl"),
        "AVX512",
    )
    assert processor(CPUINFO.replace("avx512vl", "").splitlines())[2] == "AVX2"
    assert processor([])[2] == "DEFAULT"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert processor(CPUINFO.splitlines())[2] == "AVX2 (ATEN_CPU_CAPABILITY)"


def test_what_kernels_are_chosen_by_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the instruction set of torch's own loops: oneDNN and MKL look at the processor, and at their own variables."""
    for name in [n for n in os.environ if n.startswith(("MKL_", "ONEDNN_", "DNNL_", "OMP_"))]:
        monkeypatch.delenv(name)
    text = CPUINFO.replace("model name", "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 85\nmodel name", 1)
    shown = text.replace("avx512vl", "avx512vl avx512_bf16 amx_tile").splitlines()
    monkeypatch.setattr(machine, "lines", lambda path: shown)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # `threads`
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # `instruction set`
    monkeypatch.setenv("ONEDNN_VERBOSE", "1")
    assert arithmetic() == {
        "processor": "Intel(R) Xeon(R) Gold 6148 (GenuineIntel/6/85)",
        "processor flags": "avx2 fma f16c avx512f avx512dq avx512bw avx512vl avx512_bf16 amx_tile",
        "math settings": "none",
    }
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")
    assert arithmetic()["math settings"] == "MKL_CBWR='AVX2,STRICT' ONEDNN_DEFAULT_FPMATH_MODE='BF16'"
    monkeypatch.setattr(machine, "lines", lambda path: [])
    assert (arithmetic()["processor"], arithmetic()["processor flags"]) == ("unknown", "unknown")


def test_gpus_are_those_that_the_driver_reports(tmp_path: Path) -> None:
    assert gpus(tmp_path) == ((), "")
    for number in range(2):
        folder = tmp_path / "driver/nvidia/gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   16\n")
    (tmp_path / "driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar\nGCC version:  gcc 12.2.0\n"
    )
    assert gpus(tmp_path) == (("NVIDIA H200", "NVIDIA H200"), "550.54.15")


def test_memory_of_the_machine_and_of_a_node(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       2048 kB\nMemFree: 1 kB\n")
    assert (meminfo(file, "MemTotal"), meminfo(file, "MemFree"), meminfo(file, "Mem")) == (2048 * 1024, 1024, None)
    file.write_text("Node 0 MemTotal:       4096 kB\n")
    assert meminfo(file, "MemTotal") == 4096 * 1024 and meminfo(tmp_path / "none", "MemTotal") is None


def said(folder: Path, *overrides: str, out: str | None = None) -> Iterator[tuple[int, str]]:
    for trouble in host_facts(str(folder), overrides, out, writes=True).troubles:
        yield trouble.code, trouble.text


def test_facts_of_a_host_that_is_as_it_should_be(base: Path) -> None:
    found = host_facts(str(base / "schedule"), ["seed=3"], str(base / "out"), writes=True)
    assert found.troubles == () and [i.role for i in found.images if i.seen] == ["train", "val"]
    assert found.settings != host_facts(str(base / "schedule")).settings, "an option is part of the schedule"
    assert not (base / "out").exists(), "nothing is left behind"
    alone = host_facts(None)
    assert alone.code == found.code and alone.settings == ""


def test_what_a_host_may_have_otherwise_is_no_other_schedule(base: Path, tmp_path: Path) -> None:
    def settings(*overrides: str) -> str:
        return settings_digest(load(str(base / "schedule"), overrides))

    plain, copied = settings(), settings(f"data.scratch={tmp_path}")
    assert settings("data.loader_threads=3", "data.cache=DISK") == plain != settings("data.on_bad_record=REPLACE")
    assert settings("data.scratch=/other", "data.scratch_reserve=9") == copied != plain, "all copy, or none"


def test_where_a_host_has_the_files_that_a_schedule_names_is_no_other_schedule(base: Path, tmp_path: Path) -> None:
    def settings(folder: Path, *files: str) -> str:
        changes = [f'{name}={{file: "{files[0]}"}}' for name in ["init.weights"] if files]
        return settings_digest(load(str(folder), changes))

    here, there = base / "schedule", shutil.copytree(base / "schedule", tmp_path / "schedule")
    assert settings(here, "w.pt") == settings(there, "w.pt") != settings(there, "v.pt")
    for folder in (there, shutil.copytree(there, tmp_path / "elsewhere" / "schedule")):
        text = (folder / "schedule.prototxt").read_text()
        for name in ("train", "val"):
            (folder / f"{name}.txt").write_text("00000000 1\n")
            text = text.replace(f"{name} {{ source:", f'{name} {{ labels: "{name}.txt" source:')
        (folder / "schedule.prototxt").write_text(text.replace("solver {", "solver { loss { type: BINARY }"))
    assert settings(there) == settings(tmp_path / "elsewhere" / "schedule") != settings(here)


def test_another_mean_file_is_another_schedule(base: Path, tmp_path: Path) -> None:
    facts, channels = {}, load(base / "schedule").model.channels
    for host, mean in (("node1", 1), ("node2", 1), ("node3", 2)):
        folder = shutil.copytree(base / "schedule", tmp_path / host)
        blob = caffe_pb2.BlobProto(num=1, channels=channels, height=1, width=1, data=[mean] * channels)
        (folder / "mean.binaryproto").write_bytes(blob.SerializeToString())
        overrides = [
            "solver.test_transform_param.mean_file=mean.binaryproto",
            "solver.test_transform_param.mean_value=[]",
        ]
        facts[host] = replace(host_facts(str(folder), overrides), host=host, images=(), troubles=())
        assert facts[host].settings
    (found,) = differences(facts)
    assert "node3" in found.text and found.text.endswith("another than on node1, node2: mean.binaryproto"), found


def test_what_is_wrong_on_a_host(base: Path, tmp_path: Path) -> None:
    train = tmp_path / "train"
    assert [(65, f"{train}: no such folder")] == list(said(base / "schedule", f"data.train.source={train}"))
    ((code, text),) = said(base / "schedule", "data.train.images=7")
    assert code == 65 and "but the schedule says images: 7" in text
    ((code, text),) = said(base / "schedule", "init.base_lr=x")
    assert code == 64 and "init.base_lr" in text
    ((code, text),) = said(base / "schedule", f"data.scratch={tmp_path / 'none'}")
    assert code == 74 and "no such folder" in text
    (tmp_path / "file").write_text("")
    ((code, text),) = said(base / "schedule", out=str(tmp_path / "file" / "out"))
    assert code == 74 and "is a file" in text


def test_scratch_that_is_too_small(base: Path, tmp_path: Path) -> None:
    """More must stay free than any disk has: the copies, that need little, don't fit."""
    ((code, text),) = said(base / "schedule", f"data.scratch={tmp_path}", "data.scratch_reserve=1e9")
    assert code == 74 and "needed for copies of the images" in text
    assert os.listdir(tmp_path) == []


def test_room_is_looked_at_without_waiting_or_leaving_anything(base: Path, tmp_path: Path) -> None:
    """A job that takes room, or hangs in it, is not waited for; what it might remove isn't counted then."""
    home = tmp_path / f"stagerun-{os.getuid()}"
    home.mkdir(mode=0o700)
    schedule = load(str(base / "schedule"), [f"data.scratch={tmp_path}"])
    data = schedule.data
    assert scratch_room(schedule).removable == 0 and list(home.iterdir()) == []
    [copy] = stage([look(data.train.path)], str(tmp_path), 0)
    copy.close()
    other = schedule.with_data(lambda data: replace(data, train=data.val[0], val=()))
    assert scratch_room(other).removable > 0
    with held(home / "lock", lambda: False):
        assert scratch_room(other).removable == 0


def test_an_lmdb_at_a_glance(base: Path, tmp_path: Path) -> None:
    one = glance(str(base / "data" / "train_lmdb"))
    assert one.records == tiny.TRAIN_IMAGES
    tiny.make_data(tmp_path)
    again = glance(str(tmp_path / "train_lmdb"))
    assert again.records == one.records


# -- measured


def links(rates: dict[tuple[str, str], float], trip: float = 1e-4) -> tuple[Link, ...]:
    return tuple(Link(sender=a, receiver=b, rate=rate, round_trip=trip) for (a, b), rate in rates.items())


def uniform(names: list[str], rate: float) -> dict[tuple[str, str], float]:
    return {pair: rate for a, b in combinations(names, 2) for pair in ((a, b), (b, a))}


def measured(seconds: list[float], rates: dict[tuple[str, str], float] | None = None) -> Measured:
    names = [f"node{n + 1}" for n in range(len(seconds))]
    return Measured(
        stage="cyc1",
        device="cpu",
        workers=2 * len(names),
        device_batch_size=32,
        batch_size=4096,
        passes=22,
        hosts=tuple(
            HostTimes(host=n, workers=2, pass_seconds=s * 0.9, update_seconds=s * 0.1)
            for n, s in zip(names, seconds, strict=True)
        ),
        links=links(uniform(names, 1.2e8) if rates is None else rates),
        gradient_bytes=102_400_000,
        all_reduce_bytes=102_400_000,
        all_reduce_seconds=1.6,
        together_seconds=max(seconds) + 0.4,
    )


def test_the_users_function_is_part_of_what_loading_takes() -> None:
    hosts = tuple(replace(host, python_seconds=0.01) for host in measured([1.0, 1.1]).hosts)
    slow = replace(measured([1.0, 1.1]), python="aug.py:augment", hosts=hosts, loader_threads=2, batch_size=40960)
    assert slow.loading_seconds == pytest.approx(0.01 * 40960 / (4 * 2))
    text = page("collapse", {}, slow, [])
    assert "`aug.py:augment` takes 10 ms an image on the slowest host, 51.2 s for those of an iteration" in text
    assert "workers wait for images" in text
    quick = replace(slow, hosts=tuple(replace(host, python_seconds=1e-5) for host in hosts))
    assert "workers wait" not in page("collapse", {}, quick, []) and "aug.py" not in page("c", {}, measured([1.0]), [])


def test_hosts_that_are_as_fast_as_each_other() -> None:
    assert verdicts(measured([1.0, 1.1, 1.4])) == []


def test_slow_host_with_its_factor() -> None:
    (found,) = verdicts(measured([1.0, 2.5, 1.0]))
    assert found.hosts == ("node2",) and found.code == 69
    assert "2.5 times as long" in found.text and "node2: slow" in found.text


def test_two_of_four_hosts_that_are_slow() -> None:
    found = verdicts(measured([1.0, 1.0, 2.9, 2.9]))
    assert [f.hosts for f in found] == [("node3",), ("node4",)] and "2.9 times as long" in found[0].text
    names = ["node1", "node2", "node3", "node4"]
    rates = {pair: 1.2e6 if {"node3", "node4"} & set(pair) else 1.2e8 for pair in uniform(names, 1.0)}
    assert [f.hosts for f in verdicts(measured([1.0] * 4, rates))] == [("node3",), ("node4",)]
    m = measured([1.0] * 4)
    far = tuple(replace(x, round_trip=2e-2) if {"node3", "node4"} & {x.sender, x.receiver} else x for x in m.links)
    assert [f.hosts for f in verdicts(replace(m, links=far))] == [("node3",), ("node4",)]


def test_a_network_that_is_slow_everywhere_is_told_by_what_it_costs() -> None:
    """Two hosts that are slow both ways, or two ports of three: no link is odd."""
    slow = replace(
        measured([1.0, 1.0], uniform(["node1", "node2"], 1.25e6)), together_seconds=None, all_reduce_seconds=82.0
    )
    (found,) = verdicts(slow)
    assert found.code == 0 and found.hosts == ("node1", "node2")
    assert (
        "82 s of communication in each iteration, and 19.9 s of computing" in found.text
        and "carries 10 Mbit/s" in found.text
    )


def test_of_two_hosts_both_are_told() -> None:
    (found,) = verdicts(measured([1.0, 2.5]))
    assert found.hosts == ("node2", "node1") and "node1 1 s: 2.5 times as long" in found.text


def test_a_slow_port_is_its_hosts_though_most_links_are_slow() -> None:
    rates = uniform(["node1", "node2", "node3"], 1.2e8)
    rates |= {pair: 1.2e6 for pair in rates if "node2" in pair}
    (found,) = verdicts(measured([1.0, 1.0, 1.0], rates))
    assert found.hosts == ("node2",) and found.code == 69
    assert "sends 9.6 Mbit/s at best" in found.text and "receives 9.6 Mbit/s" in found.text
    assert "960 Mbit/s" in found.text and "100 times as slow" in found.text


def test_a_port_that_is_slow_one_way() -> None:
    rates = uniform(["node1", "node2", "node3"], 1.2e8)
    rates |= {pair: 1.2e6 for pair in rates if pair[0] == "node2"}
    (found,) = verdicts(measured([1.0, 1.0, 1.0], rates))
    assert found.hosts == ("node2",) and "receives" not in found.text


def test_a_slow_path_between_two_hosts_that_are_fast_with_others() -> None:
    names = ["node1", "node2", "node3", "node4"]
    rates = uniform(names, 1.2e8) | {("node1", "node3"): 1e7, ("node3", "node1"): 1e7}
    found = verdicts(measured([1.0] * 4, rates))
    assert [f.hosts for f in found] == [("node1", "node3"), ("node3", "node1")]
    assert "12 times as slow" in found[0].text


def test_a_link_of_two_hosts_that_is_slow_one_way() -> None:
    (found,) = verdicts(measured([1.0, 1.0], {("node1", "node2"): 1.2e8, ("node2", "node1"): 1.2e6}))
    assert "slow link from node2 to node1" in found.text and "100 times as slow" in found.text


def test_a_host_that_is_far_away_is_a_warning() -> None:
    m = measured([1.0] * 3)
    far = tuple(replace(x, round_trip=2e-2) if "node3" in (x.sender, x.receiver) else x for x in m.links)
    (found,) = verdicts(replace(m, links=far))
    assert found.hosts == ("node3",) and found.code == 0 and "20.0 ms" in found.text


@given(st.integers(1, 80), st.integers(1, 40))
def test_rounds_pair_each_host_at_most_once_and_all_with_all(hosts: int, most: int) -> None:
    found = rounds(hosts, most)
    for one in found:
        met = [host for pair in one for host in pair]
        assert len(met) == len(set(met)) and all(0 <= host < hosts for host in met)
    pairs = [pair for one in found for pair in one]
    assert len(pairs) == len(set(pairs)) and all(a < b for a, b in pairs)
    if len(found) < most:
        assert len(pairs) == hosts * (hosts - 1) // 2
    elif hosts > 1:
        assert {host for pair in pairs for host in pair} == set(range(hosts)) or len(found) == 1


def test_bits() -> None:
    assert [bits(r) for r in (10.0, 1.25e6, 1.175e8, 1.25e9)] == ["80 bit/s", "10 Mbit/s", "940 Mbit/s", "10 Gbit/s"]


# -- the page


SLOW = {pair: 1.2e6 if "node2" in pair else 1.2e8 for pair in uniform(["node1", "node2", "node3"], 1.0)}
PAGES = {
    "ready.txt": (HOSTS, measured([1.0, 1.04, 0.98])),
    "slow.txt": (HOSTS, measured([1.0, 1.04, 2.6], SLOW)),
    "different.txt": (
        but(
            "node2",
            versions={**HOST.versions, "torch": "2.12.1+cpu"},
            cores=48,
            images=(Images(role="train", path="/data/train_lmdb", seen=None),),
            troubles=(Trouble(code=65, text="/data/train_lmdb: no such folder", hint="check `source`"),),
        ),
        None,
    ),
}


def test_a_host_without_facts_is_missing() -> None:
    lost = Finding(hosts=("node4",), text="node4 can't be reached", code=69)
    text = page("x", HOSTS, None, [lost])
    assert text.startswith("hosts for x: 4 hosts, 1 missing\n") and "\nnode4  -" in text


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str) -> None:
    facts, found = PAGES[name]
    findings = [*troubles(facts), *differences(facts), *(verdicts(found) if found else [])]
    text = page("resnet50_72ep", facts, found, findings) + "\n"
    assert text == (GOLDEN / name).read_text(), (
        "run tests/fast/test_check_hosts.py as a program and read the difference"
    )


# -- the command


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, (facts, found) in PAGES.items():
        findings = [*troubles(facts), *differences(facts), *(verdicts(found) if found else [])]
        (GOLDEN / name).write_text(page("resnet50_72ep", facts, found, findings) + "\n")
