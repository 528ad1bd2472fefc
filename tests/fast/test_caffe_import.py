"""`stagerun import caffe`: folders of Caffe's in, folders of stagerun's out. Run as a program it writes the expected ones anew."""

import os
import re
import shutil
import struct
import sys
from pathlib import Path

import pytest
from caffe_folders import FIVE, real_folder, resnet50
from click.testing import CliRunner, Result
from google.protobuf import text_format

from stagerun.base import recipe
from stagerun.base.errors import ExitCode
from stagerun.cli import main
from stagerun.language import load
from stagerun.language.proto import caffe_pb2
from stagerun.schedule import make_knobs
from stagerun.tools.caffe import settings
from stagerun.tools.caffe.text import SOLVER, Findings, read_solver

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = GOLDEN / "caffe_import"
# Each folder, and what is told besides.
CASES: dict[str, list[str]] = {
    "branches": ["--images", "50000", "--val-images", "10000"],
    "fine_tuning": ["--val-images", "20"],
    "lenet": [],
    "mistakes": [],
    "old_net": [],
    "resumed": ["--images", "50000", "--val-images", "10000"],
}


def run(*arguments: str, cwd: Path = FOLDERS) -> Result:
    before = os.getcwd()
    os.chdir(cwd)
    try:
        return CliRunner().invoke(main, ["import", "caffe", *arguments], prog_name="stagerun")
    finally:
        os.chdir(before)


def imported(folder: Path, out: Path, *arguments: str) -> recipe.Schedule:
    """The schedule that a folder becomes."""
    result = run(str(folder), "--out", str(out), *arguments)
    assert result.exit_code == 0, result.output
    return load(out)


def golden(name: str, out: Path) -> tuple[str, dict[str, str]]:
    """What is printed, but for the plan's table, and the files that are written."""
    result = run(name, "--out", str(out), *CASES[name])
    said = result.stdout.split(f"\n{out.name}: ")[0] + result.stderr
    text = f"exit code {result.exit_code}\n\n{said}".replace(str(out), "OUT")
    return text, {p.name: p.read_text() for p in sorted(out.glob("*"))}


@pytest.mark.parametrize("name", CASES)
def test_folder(name: str, tmp_path: Path) -> None:
    text, files = golden(name, tmp_path / name)
    assert text == (FOLDERS / f"{name}.txt").read_text(), "run tests/fast/test_caffe_import.py and read the difference"
    assert files == {p.name: p.read_text() for p in (FOLDERS / f"{name}.out").glob("*")}


def five(folder: Path) -> Path:
    return real_folder(folder, tuple(f"custom_lr_{name}" for name in FIVE), GOLDEN)


def rates(schedule: recipe.Schedule) -> dict[str, list[float]]:
    found = {}
    for stage in schedule.stages:
        knobs = make_knobs(stage.solver)
        found[stage.name] = [knobs(i).lr for i in range(stage.solver.max_iter)]
    return found


def test_the_five_solvers_are_resnet50_72ep(tmp_path: Path) -> None:
    out = tmp_path / "imported"
    ours = imported(five(tmp_path / "five"), out, "--order", ",".join(FIVE), "--workers", "128")
    theirs = load(ROOT / "solvers" / "resnet50_72ep")
    made, expected = rates(ours), rates(theirs)
    assert sum(len(v) for v in made.values()) == 22610
    assert made == expected  # to the last bit
    # So is all else that training depends on.
    for stage, other in zip(ours.stages, theirs.stages, strict=True):
        if stage.name != "collapse":  # whose own net is not in this folder
            assert_alike(stage, other)
    assert "# 25 epochs" in (out / "init.prototxt").read_text()


def assert_alike(stage: recipe.Stage, other: recipe.Stage) -> None:
    for name in ("batch_size", "device_batch_size", "momentum", "weight_decay", "type", "transform", "test_transform"):
        assert getattr(stage.solver, name) == getattr(other.solver, name), (stage.name, name)


def test_the_published_folder_with_its_collapse(tmp_path: Path) -> None:
    """Two nets, order and workers from a README that breaks its lines without backslashes."""
    folder = tmp_path / "models" / "custom"
    folder.mkdir(parents=True)
    (folder / "train_val.prototxt").write_text(resnet50())
    (folder / "train_val_noaug.prototxt").write_text(resnet50(aspect=False, test=False))
    lines = ["## Five stages", "", "- warm-up", "- cycles", ""]
    before = ""
    for name in FIVE:
        text = (GOLDEN / "lr" / "solvers" / f"custom_lr_{name}.prototxt").read_text()
        net = "train_val_noaug" if name == "collapse" else "train_val"
        text = text.replace("nets/tiny_lr_net", f"models/custom/{net}").replace('"lrsnap"', f'"/tmp/r50_{name}"')
        text = text.replace("snapshot_after_train: false\n", "")
        (folder / f"solver_{name}.prototxt").write_text(text)
        lines += [
            "\tOMP_NUM_THREADS=22  mpiexec.hydra -PSM2 -l -n 128 -ppn 2 -f hostfile  ",
            f"\t-genv KMP 1 ./build/tools/caffe train --solver=models/custom/solver_{name}.prototxt ",
            *([f"\t--weights={before} ; '"] if before else []),
            "",
        ]
        length = re.search(r"max_iter: (\d+)", text)
        assert length
        before = f"r50_{name}_iter_{length[1]}.caffemodel"
    (folder / "README.md").write_text("\n".join(lines))
    ours = imported(folder, tmp_path / "resnet50_72ep")
    theirs = load(ROOT / "solvers" / "resnet50_72ep")
    assert [s.name for s in ours.stages] == list(FIVE)
    for stage, other in zip(ours.stages, theirs.stages, strict=True):
        assert_alike(stage, other)
        assert stage.parent == other.parent


def test_branches_carry_everything(tmp_path: Path) -> None:
    schedule = imported(FOLDERS / "branches", tmp_path / "out", *CASES["branches"])
    stages = {s.name: s for s in schedule.stages}
    assert [(s.name, s.parent, s.parent_iter) for s in schedule.stages] == [
        ("main", None, None),
        ("cycle", "main", None),
        ("early", "main", 900),
        ("collapse_main", "main", None),
        ("collapse_cycle", "cycle", None),
    ]
    main_, early, collapse = (stages[n].solver for n in ("main", "early", "collapse_cycle"))
    assert (main_.batch_size, main_.device_batch_size, early.batch_size) == (256, 32, 128)
    assert (main_.clip_gradients, collapse.clip_gradients) == (10.0, None)  # 20 on the sum of two
    assert (main_.weight_decay, early.weight_decay, collapse.random_seed) == (1e-4, 4e-4, 42)
    assert main_.type == "Nesterov"
    assert not main_.carry_data and not main_.carry_momentum and not schedule.data.shuffle
    assert main_.transform.random_resize and not early.transform.random_resize
    assert (main_.test_iter, main_.test_interval, collapse.test_interval) == (50, 250, 0)


def test_images_are_counted_where_they_are(tmp_path: Path) -> None:
    import lmdb

    folder = tmp_path / "caffe"
    shutil.copytree(FOLDERS / "lenet", folder)
    for part, count in (("train", 7), ("test", 5)):
        path = folder / "examples" / "mnist" / f"mnist_{part}_lmdb"
        with lmdb.open(str(path), map_size=1 << 20) as db, db.begin(write=True) as write:
            for i in range(count):
                datum = caffe_pb2.Datum(channels=1, height=28, width=28, data=bytes(784), label=i)
                write.put(b"%08d" % i, datum.SerializeToString())
    schedule = imported(folder, tmp_path / "out")
    assert (schedule.data.train.images, schedule.model.channels) == (7, 1)
    assert schedule.data.val and schedule.data.val[0].images == 5
    assert schedule.data.train.path == str(folder / "examples" / "mnist" / "mnist_train_lmdb")
    assert schedule.stages[0].solver.test_iter is None  # 100 passes of 100 are more than there are


def test_a_mean_image_is_named_where_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "caffe"
    shutil.copytree(FOLDERS / "fine_tuning", folder)
    blob = caffe_pb2.BlobProto(num=1, channels=3, height=1, width=2, data=[1, 3, 10, 20, 7, 7])
    (folder / "mean.binaryproto").write_bytes(blob.SerializeToString())
    schedule = imported(folder, tmp_path / "out", *CASES["fine_tuning"])
    assert schedule.stages[0].solver.transform.mean_path == str(folder / "mean.binaryproto")
    net = folder / "vgg16_train_val.prototxt"
    resized = "transform_param { random_resize_param { min_size: 256 } "
    net.write_text(net.read_text().replace("transform_param {", resized))
    schedule = imported(folder, tmp_path / "resized", *CASES["fine_tuning"])
    assert schedule.stages[0].solver.transform.mean_value == (2, 15, 7)  # of each channel: pixels have no place in it
    (folder / "mean.binaryproto").write_bytes(b"\xff\xff")
    result = run(str(folder), "--out", str(tmp_path / "other"), *CASES["fine_tuning"])
    assert result.exit_code == ExitCode.RECIPE and "mean.binaryproto is not a mean image" in " ".join(
        result.stdout.split()
    )


def test_batch_norm_over_a_part_of_the_batch(tmp_path: Path) -> None:
    folder = five(tmp_path / "five")
    net = folder / "nets" / "tiny_lr_net.prototxt"
    net.write_text("bn_stats_batch_size: 8\n" + net.read_text())
    solver = imported(folder, tmp_path / "out", "--order", "init", "--workers", "4").stages[0].solver
    assert (solver.batch_size, solver.device_batch_size) == (128, 8)


def changed(folder: Path, *changes: tuple[str, str]) -> Path:
    """The five solvers with another text in each."""
    for path in folder.glob("*.prototxt"):
        text = path.read_text()
        for before, after in changes:
            text = text.replace(before, after)
        path.write_text(text)
    return folder


def test_plateau(tmp_path: Path) -> None:
    plateau = 'lr_policy: "plateau" plateau_winsize: 500 plateau_winsize: 900 average_loss: 20 gamma: 0.5'
    folder = changed(five(tmp_path / "five"), ('lr_policy: "poly_cyc"', plateau))
    made = imported(folder, tmp_path / "out", "--order", "cyc1").stages[0].solver
    assert (made.lr_policy, made.plateau_winsize, made.average_loss) == ("plateau", (500, 900), 20)
    assert "lr_iter, power: lr_policy plateau does not read it" in (tmp_path / "out" / "schedule.prototxt").read_text()


@pytest.mark.parametrize(
    ("said", "kind"),
    [('type: "AdaDelta"', "AdaDelta"), ("solver_type: RMSPROP", "RMSProp"), ("solver_type: 5", "Adam")],
)
def test_solver_types(said: str, kind: str, tmp_path: Path) -> None:
    folder = changed(five(tmp_path / "five"), ("momentum: 0.9", f"{said} delta: 1e-6 rms_decay: 0.95"))
    made = imported(folder, tmp_path / "out", "--order", "cyc1").stages[0].solver
    assert (made.type, made.momentum, made.delta, made.rms_decay) == (kind, 0, 1e-6, 0.95)


@pytest.mark.parametrize(
    ("policy", "made"),
    [('"multistep" gamma: 0.1', ("fixed", None)), ('"poly" power: 0', ("poly", 0)), ('"poly"', ("poly", 0))],
)
def test_what_a_policy_lacks_is_caffes_default(policy: str, made: tuple[str, float | None], tmp_path: Path) -> None:
    folder = five(tmp_path / "five")
    path = folder / "custom_lr_cyc1.prototxt"
    path.write_text(re.sub(r"\npower:.*", "", path.read_text()).replace('"poly_cyc"', policy))
    solver = imported(folder, tmp_path / "out", "--order", "cyc1").stages[0].solver
    assert (solver.lr_policy, solver.power) == made


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"poly_cyc"', '"cosine"', "`lr_policy` has no value `cosine`"),
        ("momentum: 0.9", 'type: "LARS"', "`type` has no value `LARS`"),
        ("momentum: 0.9", 'type: "SGD" solver_type: SGD', "`solver_type` beside `type`, which Caffe refuses"),
        ("momentum: 0.9", "iter_size: 0", "`iter_size` must be at least 1"),
        ("momentum: 0.9", 'train_net: "nets/tiny_lr_net.prototxt"', "`train_net` and `net` both name the net to train"),
        ("momentum: 0.9", 'weights: "x.caffemodel"', "SolverParameter has no field `weights`"),
        ("base_lr: 1.02", "", "the solver has no `base_lr`"),
        ('net: "nets/tiny_lr_net.prototxt"', "", "the solver names no net"),
        ("max_iter: 3750", "max_iter: 99999999999", "`max_iter` is too large for 32 bits"),
    ],
)
def test_mistakes_in_a_solver(before: str, after: str, said: str, tmp_path: Path) -> None:
    folder = changed(five(tmp_path / "five"), (before, after))
    result = run(str(folder), "--out", str(tmp_path / "out"), "--order", "cyc1")
    assert result.exit_code == ExitCode.RECIPE
    assert said in result.stderr and result.stderr.endswith("1 mistake\n"), result.stderr
    assert not (tmp_path / "out").exists()


def test_a_range_is_checked_at_caffes_own_line(tmp_path: Path) -> None:
    folder = five(tmp_path / "five")
    path = folder / "custom_lr_cyc1.prototxt"
    path.write_text(path.read_text().replace("momentum: 0.9", "momentum: 1.5"))
    result = run(str(folder), "--out", str(tmp_path / "out"), "--order", "init,cyc1")
    assert result.exit_code == ExitCode.RECIPE
    assert f"{path}:8:11: `momentum` must be at least 0 and below 1, not 1.5" in result.stderr
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder, out = five(tmp_path / "five"), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    result = run(str(folder), "--out", str(out), "--order", "init")
    assert result.exit_code == ExitCode.RECIPE and "is there already" in result.stderr
    assert [p.name for p in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()
    imported(folder, out, "--order", "init")  # an empty folder is as good as none


def test_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = five(tmp_path / "five")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stagerun.tools.caffe.disk.os.fsync", full)
    result = run(str(folder), "--out", str(tmp_path / "out"), "--order", "init")
    assert result.exit_code == ExitCode.STORAGE and "No space left" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["five"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["five"], "no `caffe train` line says the order of the solvers: custom_lr_collapse.prototxt (collapse), "),
        (["five", "--order", "init,cyc4"], "`cyc4`, which is no of the solver files\n  hint: did you mean `cyc"),
        (["five", "--order", "init,init"], "names `init` twice"),
        (["five", "--order", "init", "--model", "resnet50"], "No such option"),
        (["five/nets"], "there is no solver file in this folder"),
        (["six"], "six: no such folder"),
        (["five", "--order", "init", "--root", "nowhere"], "nowhere: no such folder"),
        (["five", "--order", "init", "--root", "."], "there is no net `nets/tiny_lr_net.prototxt`"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    five(tmp_path / "five")
    result = run(*arguments, "--out", "out", cwd=tmp_path)
    assert result.exit_code in (ExitCode.RECIPE, ExitCode.DATA), result.output
    assert said in result.stderr
    assert not (tmp_path / "out").exists()


def test_nets_are_found_from_the_folder_upward(tmp_path: Path) -> None:
    folder = five(tmp_path / "caffe" / "models" / "five")
    (tmp_path / "caffe" / "nets").mkdir()
    shutil.move(folder / "nets" / "tiny_lr_net.prototxt", tmp_path / "caffe" / "nets")
    imported(folder, tmp_path / "out", "--order", "init")
    shutil.move(tmp_path / "caffe" / "nets", tmp_path / "nets_elsewhere")
    assert run(str(folder), "--out", str(tmp_path / "other"), "--order", "init").exit_code == ExitCode.RECIPE


def test_every_field_of_a_solver_is_thought_of() -> None:
    """A new one in protos/caffe.proto must be carried, or be said to be left out."""
    known = {
        *settings.OF_STAGE,
        *settings.UPDATE,
        *settings.LOOKING,
        *settings.ELSEWHERE,
        *settings.IDLE,
        *settings.NOT_CARRIED,
    }
    assert set(SOLVER.fields_by_name) == known


@pytest.mark.parametrize("path", sorted((GOLDEN / "lr" / "solvers").glob("*")), ids=lambda p: p.stem)
def test_solvers_are_read_as_protobuf_reads_them(path: Path) -> None:
    found = Findings()
    ours = read_solver(path.name, path.read_bytes(), found).block
    theirs = text_format.Parse(path.read_text(), caffe_pb2.SolverParameter())
    assert not found.mistakes
    assert {d.name for d, _ in theirs.ListFields()} == set(ours.entries)
    for descriptor, value in theirs.ListFields():
        values = [v.value for v in ours.entries[descriptor.name].values]
        if descriptor.type == descriptor.TYPE_FLOAT:
            values = [struct.unpack("f", struct.pack("f", v))[0] for v in values]
        if descriptor.enum_type is not None:
            values = [descriptor.enum_type.values_by_name[v].number for v in values]
        assert values == (list(value) if descriptor.is_repeated else [value]), descriptor.name


def test_what_is_written_is_the_same_from_any_place(tmp_path: Path) -> None:
    five(tmp_path / "five")
    assert run("five", "--out", "a", "--order", "init", cwd=tmp_path).exit_code == 0
    assert run(".", "--out", "../b", "--order", "init", cwd=tmp_path / "five").exit_code == 0
    a, b = ((tmp_path / name / "init.prototxt").read_text() for name in "ab")
    assert a == b


def write_golden() -> None:
    for name in CASES:
        shutil.rmtree(FOLDERS / f"{name}.out", ignore_errors=True)
        scratch = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp") / name
        shutil.rmtree(scratch, ignore_errors=True)
        text, files = golden(name, scratch)
        (FOLDERS / f"{name}.txt").write_text(text)
        if files:
            (FOLDERS / f"{name}.out").mkdir()
        for file, content in files.items():
            (FOLDERS / f"{name}.out" / file).write_text(content)
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    write_golden()
