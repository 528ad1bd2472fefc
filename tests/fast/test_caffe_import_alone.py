"""`stagerun import caffe --no-nets`: solver files whose nets are lost; and what is said of nets that aren't there."""

import os
import shutil
from pathlib import Path

import pytest
from caffe_folders import FIVE
from click.testing import CliRunner, Result

from stagerun.base.errors import ExitCode
from stagerun.cli import main
from stagerun.language import load
from stagerun.language.proto import caffe_pb2
from stagerun.schedule import make_knobs

ROOT = Path(__file__).parents[2]
SOLVERS = Path(__file__).parents[1] / "golden" / "lr" / "solvers"
TOLD = [
    *("--model", "resnet50_intel_caffe", "--classes", "1000", "--images", "1281167", "--val-images", "50000"),
    *("--batch-size", "4096", "--device-batch-size", "32"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the five solvers in `five` and no net anywhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "five").mkdir()
    for name in FIVE:
        shutil.copy(SOLVERS / f"custom_lr_{name}.prototxt", tmp_path / "five")
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["import", "caffe", *arguments, "--out", "X"], prog_name="stagerun")


def rates(folder: str | Path) -> dict[str, list[float]]:
    found = {}
    for stage in load(folder).stages:
        knobs = make_knobs(stage.solver)
        found[stage.name] = [knobs(i).lr for i in range(stage.solver.max_iter)]
    return found


@pytest.mark.parametrize("many", [False, True], ids=["five", "33 solvers"])
def test_the_five_solvers_alone_are_resnet50_72ep(many: bool, here: Path) -> None:
    order = ",".join(f"custom_lr_{name}" if many else name for name in FIVE)
    result = run(str(SOLVERS) if many else "five", "--no-nets", "--order", order, *TOLD)
    assert result.exit_code == 0, result.output
    made, theirs = rates("X"), rates(ROOT / "solvers" / "resnet50_72ep")
    assert sum(len(v) for v in made.values()) == 22610
    assert made == theirs  # names of the stages, and every rate to the last bit
    schedule = load("X")
    for stage, other in zip(schedule.stages, load(ROOT / "solvers" / "resnet50_72ep").stages, strict=True):
        for name in ("batch_size", "device_batch_size", "momentum", "weight_decay", "type"):
            assert getattr(stage.solver, name) == getattr(other.solver, name), (stage.name, name)
    assert (schedule.model.num_classes, schedule.data.train.images) == (1000, 1281167)
    assert schedule.data.val and schedule.data.val[0].images == 50000
    listed = " ".join(result.stdout.split())
    assert listed.count("nets were not read: transform and multipliers are not carried") == 1
    assert ("28 other solvers: they are left out" in listed) == many
    assert "nets were not read" in Path("X/schedule.prototxt").read_text()


def test_what_is_not_told_is_asked(here: Path) -> None:
    result = run("five", "--no-nets", "--order", "init,cyc1")
    assert result.exit_code == ExitCode.RECIPE
    assert "nets were not read: batch, transform and multipliers are not carried" in " ".join(result.stdout.split())
    asked = [line.split(": ")[1] for line in result.stderr.splitlines() if line.startswith("X/schedule.prototxt:")]
    assert asked == [
        "`name` is still a question",
        "`num_classes` must be at least 1, not 0",
        "`images` must be at least 1, not 0",
        "`batch_size` must be at least 1, not 0",
        "`device_batch_size` must be at least 1, not 0",
    ]
    check = CliRunner().invoke(main, ["check", "X"])
    assert check.exit_code == ExitCode.RECIPE and "5 mistakes" in check.output
    text = Path("X/schedule.prototxt").read_text()
    for before, after in (
        ('"?"', '"resnet18"'),
        ("num_classes: 0", "num_classes: 10"),
        ("images: 0 ", "images: 9 "),
        ("device_batch_size: 0", "device_batch_size: 8"),
        (" batch_size: 0", " batch_size: 8"),
    ):
        text = text.replace(before, after)
    Path("X/schedule.prototxt").write_text(text)
    assert CliRunner().invoke(main, ["check", "X"]).exit_code == 0


def test_other_solvers_do_not_stop_it(here: Path) -> None:
    for name, text in (("exp", 'lr_policy: "polly" base_lr: ['), ("old", "max_iter: x\nnonsense: 1")):
        Path(f"five/{name}.prototxt").write_text(text)
    result = run("five", "--no-nets", "--order", "custom_lr_init,custom_lr_cyc1", *TOLD)
    assert result.exit_code == 0, result.output
    assert [s.name for s in load("X").stages] == ["init", "cyc1"]
    assert "five: 5 other solvers: they are left out" in result.stdout
    assert "nonsense" not in result.output


def test_mistakes_in_solvers_stop_it_as_ever(here: Path) -> None:
    path = Path("five/custom_lr_cyc1.prototxt")
    path.write_text(path.read_text().replace("lr_iter: 7500\n", "lr_itr: 7500\n"))
    result = run("five", "--no-nets", "--order", "init,cyc1", *TOLD)
    assert result.exit_code == ExitCode.RECIPE and "did you mean `lr_iter`?" in result.stderr
    assert not Path("X").exists()


def test_a_solver_that_names_no_net(here: Path) -> None:
    Path("one").mkdir()
    Path("one/solver.prototxt").write_text(
        'base_lr: 0.1 lr_policy: "fixed" max_iter: 100 iter_size: 2 clip_gradients: 8\ntest_iter: 5 test_interval: 50'
    )
    result = run("one", "--no-nets", *TOLD)
    assert result.exit_code == 0, result.output
    made = load("X").stages[0].solver
    assert (made.batch_size, made.clip_gradients, made.test_interval, made.test_iter) == (4096, 4, 50, None)
    listed = " ".join(result.stdout.split())
    assert "solver.prototxt:1: iter_size: batch_size is that of a whole update, its 2 passes together" in listed
    assert "solver.prototxt:2: test_iter: it counts batches of a size that the net says" in listed


def test_a_solver_that_evaluates_asks_for_the_images(here: Path) -> None:
    path = Path("five/custom_lr_init.prototxt")
    path.write_text(path.read_text() + "test_interval: 100\ntest_iter: 10\n")
    told = [word for word in TOLD if word not in ("--val-images", "50000")]
    result = run("five", "--no-nets", "--order", "init", *told)
    assert result.exit_code == ExitCode.RECIPE and result.stderr.count("`images` must be at least 1") == 1
    assert "val {" in Path("X/schedule.prototxt").read_text()


def test_sources_are_counted(here: Path) -> None:
    import lmdb

    for part, count in (("train", 7), ("val", 3)):
        with lmdb.open(f"{part}_images", map_size=1 << 20) as db, db.begin(write=True) as write:
            for i in range(count):
                datum = caffe_pb2.Datum(channels=1, height=2, width=2, data=b"1234", label=i)
                write.put(b"%08d" % i, datum.SerializeToString())
    told = [word for word in TOLD if word not in ("--images", "1281167", "--val-images", "50000")]
    sources = ["--train-source", "train_images", "--val-source", "val_images"]
    result = run("five", "--no-nets", "--order", "init", *told, *sources)
    assert result.exit_code == 0, result.output
    schedule = load("X")
    assert schedule.data.val and (schedule.data.train.images, schedule.data.val[0].images) == (7, 3)
    assert (schedule.data.train.path, schedule.data.val[0].path) == (
        str(here / "train_images"),
        str(here / "val_images"),
    )
    assert schedule.model.channels == 1
    assert "a name that stands there" not in result.stdout


def test_a_source_that_is_elsewhere(here: Path) -> None:
    sources = ["--train-source", "/data/train/ilsvrc12_train_lmdb", "--val-source", "/data/train/ilsvrc12_val_lmdb"]
    told = [word for word in TOLD if word not in ("--images", "1281167", "--val-images", "50000")]
    result = run("five", "--no-nets", "--order", "init", *told, *sources)
    assert result.exit_code == 0, result.output
    data = load("X").data
    assert data.val and (data.train.images, data.val[0].images) == (1281167, 50000)
    assert data.val[0].path == "/data/train/ilsvrc12_val_lmdb"
    assert "--val-source: /data/train/ilsvrc12_val_lmdb: there is no LMDB" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-nets", "--workers", "8"], "`--workers` with `--no-nets`"),
        (["--no-nets", "--root", "."], "`--root` with `--no-nets`"),
        (["--batch-size", "8"], "`--batch-size` without `--no-nets`"),
        (["--device-batch-size", "8"], "`--device-batch-size` without `--no-nets`"),
        (["--classes", "8"], "`--classes` without `--no-nets`"),
        (["--train-source", "x"], "`--train-source` without `--no-nets`"),
        (["--val-source", "x"], "`--val-source` without `--no-nets`"),
        (["--no-nets", "--train-source", ""], "`--train-source` is not a path: ''"),
        (["--no-nets", "--val-source", "a\nb"], "`--val-source` is not a path"),
        (["--no-nets", "--batch-size", "8", "--device-batch-size", "3"], "3 does not divide `--batch-size` 8"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], said: str, here: Path) -> None:
    result = run("five", "--order", "init", *arguments)
    assert result.exit_code == ExitCode.RECIPE and said in result.stderr, result.output
    assert not os.path.lexists("X")


def test_a_missing_net(here: Path) -> None:
    """In each solver that names it there is a mistake."""
    result = run("five", "--order", "init,cyc1")
    assert result.exit_code == ExitCode.RECIPE
    assert result.stderr.count("there is no net `nets/tiny_lr_net.prototxt`") == 2
    assert result.stderr.count("hint: copy the net to five/nets/tiny_lr_net.prototxt") == 2
    assert "`--no-nets`" in result.stderr and "`--root`" in result.stderr
    Path("five/nets").mkdir()
    Path("five/nets/tiny_lr_net.prototxt").mkdir()  # a folder is no net
    assert "there is no net" in run("five", "--order", "init").stderr
    Path("elsewhere").mkdir()
    assert "copy the net to elsewhere/nets/tiny_" in run("five", "--order", "init", "--root", "elsewhere").stderr


def test_train_lines_tell_the_order_as_ever(here: Path) -> None:
    shutil.copytree(ROOT / "tests" / "golden" / "caffe_import" / "branches", "branches")
    for net in Path("branches").glob("net*"):
        net.unlink()
    result = run("branches", "--no-nets", *TOLD)
    assert result.exit_code == 0, result.output
    assert [(s.name, s.parent, s.parent_iter) for s in load("X").stages] == [
        ("main", None, None),
        ("cycle", "main", None),
        ("early", "main", 900),
        ("collapse_main", "main", None),
        ("collapse_cycle", "cycle", None),
    ]
    assert not load("X").stages[0].solver.carry_data  # its seed gave every stage the same order of images
    shutil.rmtree("X")
    run("branches", "--no-nets")
    assert "# images of one update, of all workers together?" in Path("X/schedule.prototxt").read_text()


def test_a_solver_that_ends_within_its_warm_up_keeps_its_rates(here: Path) -> None:
    """As sara-nl/caffe's benchmark/resnet_50 does."""
    (here / "short").mkdir()
    Path("short/solver.prototxt").write_text(
        'net: "train_val.prototxt"\nbase_lr: 0.8 # per 2048\nlr_policy: "multistep"\nstepvalue: 18750\ngamma: 0.1\n'
        "max_iter: 200\nwarmup_iter: 3125\nwarmup_start_lr: 0.1\nmomentum: 0.9\n"
    )
    result = run("short", "--no-nets", *TOLD)
    assert result.exit_code == 0, result.output
    (found,) = rates("X").values()
    caffes = [(i * 0.8 + (3125 - i) * 0.1) / 3125 for i in range(200)]
    assert found == pytest.approx(caffes, rel=1e-12, abs=0)
    (text,) = (file.read_text() for file in Path("X").glob("*.prototxt") if file.name != "schedule.prototxt")
    assert "the warm-up of 3125 iterations to 0.8 comes to this; per 2048" in text


def test_a_long_warm_up_cut_short_is_written_in_whole_numbers(here: Path) -> None:
    (here / "long").mkdir()
    Path("long/solver.prototxt").write_text(
        'net: "train_val.prototxt"\nbase_lr: 0.8\nlr_policy: "fixed"\nmax_iter: 1234567\nwarmup_iter: 12345678\n'
    )
    result = run("long", "--no-nets", *TOLD)
    assert result.exit_code == 0, result.output
    (text,) = (file.read_text() for file in Path("X").glob("*.prototxt") if file.name != "schedule.prototxt")
    assert "warmup_iter: 1234567 " in text and "12345678 of Caffe's, which ends before" in text
    assert "the warm-up of 12345678 iterations to 0.8 comes to this" in text


def test_layer_wise_rates_are_fitted_to_the_sum_over_the_passes(here: Path) -> None:
    (here / "local").mkdir()
    solver = 'net: "n.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 10 local_lr_auto: true local_gw_ratio: 0.01'
    for passes, expected in (("", 1), ("iter_size: 4", 4)):
        Path("local/solver.prototxt").write_text(f"{solver} {passes}\n")
        shutil.rmtree("X", ignore_errors=True)
        result = run("local", "--no-nets", *TOLD)
        assert result.exit_code == 0, result.output
        (stage,) = load("X").stages
        assert (stage.solver.local_lr_auto, stage.solver.local_lr_passes) == (True, expected)
