"""`stagerun import caffe --no-nets`: solver files whose nets are lost; and what is said of nets that aren't there."""

import os
import shutil
from pathlib import Path

import pytest
from caffe_folders import FIVE
from click.testing import CliRunner, Result

from stagerun.base import recipe
from stagerun.base.errors import ExitCode
from stagerun.cli import main
from stagerun.language import load
from stagerun.schedule import make_knobs

ROOT = Path(__file__).parents[2]
SOLVERS = Path(__file__).parents[1] / "golden" / "lr" / "solvers"
TOLD = ("--images", "1281167", "--val-images", "50000")


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


def filled() -> recipe.Schedule:
    """What is written, with an answer to each question."""
    path = Path("X/schedule.prototxt")
    text = path.read_text()
    for before, after in (
        ('name: "?"', 'name: "resnet50_intel_caffe"'),
        ('source: "?"', 'source: "lmdb"'),
        ("num_classes: 0", "num_classes: 1000"),
        ("device_batch_size: 0", "device_batch_size: 32"),
        (" batch_size: 0", " batch_size: 4096"),
    ):
        text = text.replace(before, after)
    path.write_text(text)
    return load("X")


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
    assert result.exit_code == ExitCode.RECIPE, result.output
    asked = [line.split(": ")[1] for line in result.stderr.splitlines() if line.startswith("X/schedule.prototxt:")]
    assert asked == [
        "`name` is still a question",
        "`num_classes` must be at least 1, not 0",
        "`batch_size` must be at least 1, not 0",
        "`device_batch_size` must be at least 1, not 0",
    ]
    schedule, theirs = filled(), load(ROOT / "solvers" / "resnet50_72ep")
    assert rates("X") == rates(
        ROOT / "solvers" / "resnet50_72ep"
    )  # names of the stages, and every rate to the last bit
    for stage, other in zip(schedule.stages, theirs.stages, strict=True):
        for name in ("batch_size", "device_batch_size", "momentum", "weight_decay", "type"):
            assert getattr(stage.solver, name) == getattr(other.solver, name), (stage.name, name)
    assert schedule.data.val and (schedule.data.train.images, schedule.data.val[0].images) == (1281167, 50000)
    listed = " ".join(result.stdout.split())
    assert listed.count("nets were not read: batch, sources, transform and multipliers are not carried") == 1
    assert ("28 other solvers: they are left out" in listed) == many


def test_mistakes_in_solvers_stop_it_as_ever(here: Path) -> None:
    """Those in solvers that are left out don't."""
    Path("five/old.prototxt").write_text("max_iter: x\nnonsense: 1")
    path = Path("five/custom_lr_cyc1.prototxt")
    path.write_text(path.read_text().replace("lr_iter: 7500\n", "lr_itr: 7500\n"))
    result = run("five", "--no-nets", "--order", "custom_lr_init,custom_lr_cyc1", *TOLD)
    assert result.exit_code == ExitCode.RECIPE and "did you mean `lr_iter`?" in result.stderr
    assert "nonsense" not in result.output and not Path("X").exists()


def test_a_solver_that_names_no_net(here: Path) -> None:
    Path("one").mkdir()
    Path("one/solver.prototxt").write_text(
        'base_lr: 0.1 lr_policy: "fixed" max_iter: 100 iter_size: 2 clip_gradients: 8\ntest_iter: 5 test_interval: 50'
    )
    result = run("one", "--no-nets", *TOLD)
    made = filled().stages[0].solver
    assert (made.clip_gradients, made.test_interval, made.test_iter) == (4, 50, None)
    listed = " ".join(result.stdout.split())
    assert "solver.prototxt:1: iter_size: batch_size is that of a whole update, its 2 passes together" in listed
    assert "solver.prototxt:2: test_iter: it counts batches of a size that the net says" in listed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-nets", "--workers", "8"], "`--workers` with `--no-nets`"),
        (["--no-nets", "--overlap"], "`--overlap` with `--no-nets`"),
        (["--no-nets", "--root", "."], "`--root` with `--no-nets`"),
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


def test_a_solver_that_ends_within_its_warm_up_keeps_its_rates(here: Path) -> None:
    """As sara-nl/caffe's benchmark/resnet_50 does."""
    (here / "short").mkdir()
    Path("short/solver.prototxt").write_text(
        'net: "train_val.prototxt"\nbase_lr: 0.8 # per 2048\nlr_policy: "multistep"\nstepvalue: 18750\ngamma: 0.1\n'
        "max_iter: 200\nwarmup_iter: 3125\nwarmup_start_lr: 0.1\nmomentum: 0.9\n"
    )
    run("short", "--no-nets", *TOLD)
    filled()
    (found,) = rates("X").values()
    caffes = [(i * 0.8 + (3125 - i) * 0.1) / 3125 for i in range(200)]
    assert found == pytest.approx(caffes, rel=1e-12, abs=0)
    (text,) = (file.read_text() for file in Path("X").glob("*.prototxt") if file.name != "schedule.prototxt")
    assert "the warm-up of 3125 iterations to 0.8 comes to this; per 2048" in text


def test_layer_wise_rates_are_fitted_to_the_sum_over_the_passes(here: Path) -> None:
    (here / "local").mkdir()
    solver = 'net: "n.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 10 local_lr_auto: true local_gw_ratio: 0.01'
    for passes, expected in (("", 1), ("iter_size: 4", 4)):
        Path("local/solver.prototxt").write_text(f"{solver} {passes}\n")
        shutil.rmtree("X", ignore_errors=True)
        run("local", "--no-nets", *TOLD)
        (stage,) = filled().stages
        assert (stage.solver.local_lr_auto, stage.solver.local_lr_passes) == (True, expected)
