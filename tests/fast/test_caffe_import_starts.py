"""What the stages of `stagerun import caffe` start from: `--weights`, `--snapshot`, --order, and several scripts."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stagerun.base import recipe
from stagerun.base.errors import ExitCode
from stagerun.cli import main
from stagerun.language import load
from stagerun.language.proto import caffe_pb2
from stagerun.schedule import make_knobs
from stagerun.tools.caffe.train_lines import train_lines

NET = """name: "small"
layer {
  name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { crop_size: 8 mean_value: 1 mean_value: 2 mean_value: 3 }
  data_param { source: "/data/cifar10_train_lmdb" batch_size: 100 backend: LMDB }
}
layer {
  name: "data" type: "Data" top: "data" top: "label" include { phase: TEST }
  transform_param { crop_size: 8 mean_value: 1 mean_value: 2 mean_value: 3 }
  data_param { source: "/data/cifar10_test_lmdb" batch_size: 100 backend: LMDB }
}
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 10 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
FIXED = 'lr_policy: "fixed"'


def solver(prefix: str, rate: str, length: int, every: int, policy: str = FIXED, more: str = "") -> str:
    return (
        f'net: "net.prototxt" base_lr: {rate} {policy} momentum: 0.9 weight_decay: 0.004 max_iter: {length}\n'
        f'snapshot: {every} snapshot_prefix: "x/{prefix}" {more}\n'
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    return tmp_path


def write(**texts: str) -> None:
    """Files of the working folder: `a` is a.prototxt, `a_sh` is a.sh, `README` is itself."""
    for name, text in texts.items():
        is_script = name.endswith("_sh")
        file = name.removesuffix("_sh") + ".sh" if is_script else name if name == "README" else f"{name}.prototxt"
        Path(file).write_text(text)


def run(*arguments: str, folder: str = ".", out: str = "out") -> Result:
    told = ("--images", "50000", "--val-images", "10000")
    return CliRunner().invoke(main, ["import", "caffe", folder, "--out", out, *told, *arguments], prog_name="stagerun")


def imported(*arguments: str, out: str = "out") -> tuple[dict[str, recipe.Stage], str]:
    """The stages by name, and what is listed, in one line."""
    result = run(*arguments, out=out)
    assert result.exit_code == 0, result.output
    return {stage.name: stage for stage in load(out).stages}, " ".join(result.stdout.split())


def mistakes(*arguments: str, out: str = "out") -> str:
    result = run(*arguments, out=out)
    assert result.exit_code == ExitCode.RECIPE and not Path(out).exists(), result.output
    return result.stderr


def rates(stage: recipe.Stage) -> list[float]:
    knobs = make_knobs(stage.solver)
    return [knobs(i).lr for i in range(stage.solver.max_iter)]


def starts(stages: dict[str, recipe.Stage]) -> dict[str, tuple[str | None, int | None]]:
    return {name: (stage.parent, stage.parent_iter) for name, stage in stages.items()}


# ---- --snapshot of another solver


def quick() -> None:
    """BVLC's examples/cifar10, with its numbers."""
    write(
        cifar10_quick_solver=solver("quick", "0.001", 4000, 4000),
        cifar10_quick_solver_lr1=solver("quick", "0.0001", 5000, 5000, more="test_interval: 300 test_iter: 100"),
        train_quick_sh="""TOOLS=./build/tools
$TOOLS/caffe train \\
  --solver=examples/cifar10/cifar10_quick_solver.prototxt $@
$TOOLS/caffe train \\
  --solver=examples/cifar10/cifar10_quick_solver_lr1.prototxt \\
  --snapshot=examples/cifar10/quick_iter_4000.solverstate $@
""",
    )


@pytest.mark.parametrize(
    "order", [(), ("--order", "cifar10_quick_solver,cifar10_quick_solver_lr1")], ids=["script", "order"]
)
def test_a_run_that_goes_on_with_another_solver(order: tuple[str, ...], here: Path) -> None:
    quick()
    stages, listed = imported(*order)
    assert starts(stages) == {"main": (None, None), "lr1": ("main", None)}
    main_, lr1 = stages["main"].solver, stages["lr1"].solver
    assert (main_.max_iter, lr1.max_iter) == (4000, 1000)  # 5000 together, as Caffe ran
    assert (main_.carry_momentum, lr1.carry_momentum, lr1.carry_data) == (False, True, False)
    assert rates(stages["main"]) + rates(stages["lr1"]) == [0.001] * 4000 + [0.0001] * 1000
    assert "snapshot_prefix: 2 solvers" not in listed  # one went on from the other's, as it is here
    assert "stage lr1: intervals count from the start of the stage, Caffe's iteration 4000" in listed
    text = Path("out/lr1.prototxt").read_text()
    assert "max_iter: 1000                    # 5000 of Caffe's, from 4000 on" in text
    assert "policy_start_iter" not in text  # a fixed rate does not read it


def test_a_chain_of_them(here: Path) -> None:
    """Where each begins counts for what it saves, and for the `from` of the next."""
    write(
        full_solver=solver("full", "0.001", 60000, 5000),
        full_solver_lr1=solver("full", "0.0001", 65000, 5000),
        full_solver_lr2=solver("full", "0.00001", 70000, 5000),
        train_sh="""caffe train --solver=full_solver.prototxt
caffe train --solver=full_solver_lr1.prototxt --snapshot=full_iter_55000.solverstate.h5
caffe train --solver=full_solver_lr1.prototxt --snapshot=full_iter_55000.solverstate.h5
caffe train --solver=full_solver_lr2.prototxt --snapshot=full_iter_65000.solverstate.h5
""",
    )
    stages, _ = imported()
    assert starts(stages) == {"main": (None, None), "lr1": ("main", 55000), "lr2": ("lr1", None)}
    assert [s.solver.max_iter for s in stages.values()] == [60000, 10000, 5000]
    text = Path("train.sh").read_text().replace("65000", "60000").replace("full_solver.prototxt", "other.prototxt")
    write(other=solver("full", "0.001", 57000, 55000), train_sh=text)
    stages, _ = imported(out="other")
    assert starts(stages)["full_lr2"] == ("full_lr1", 5000)  # 60000 of Caffe's, which lr1 is at after 5000


POLICIES = {
    "multistep": "gamma: 0.1 stepvalue: 300 stepvalue: 700 stepvalue: 900",
    "step": "gamma: 0.5 stepsize: 130",
    "poly": "power: 2",
    "poly_cyc": "power: 2 lr_iter: 1300",
    "inv": "gamma: 0.01 power: 0.75",
    "exp": "gamma: 0.999",
    "sigmoid": "gamma: -0.01 stepsize: 500",
}


@pytest.mark.parametrize("warm_up", [0, 400, 700])
@pytest.mark.parametrize("policy", POLICIES)
def test_its_rates_are_read_where_caffe_reads_them(policy: str, warm_up: int, here: Path) -> None:
    said = f'lr_policy: "{policy}" {POLICIES[policy]}'
    said += f" warmup_iter: {warm_up} warmup_start_lr: 0.01" if warm_up else ""
    write(
        solver=solver("a", "0.1", 1000, 200, said),
        solver_more=solver("a", "0.1", 1200, 200, said),
        README="caffe train --solver solver.prototxt\ncaffe train --solver solver_more.prototxt --snapshot a_iter_600.solverstate",
    )
    more, listed = imported()
    whole, told = imported("--order", "solver_more", out="whole")  # the same solver from its iteration 0
    assert "`--snapshot` names `a_iter_600.solverstate`: no single stage before makes it" in told
    assert rates(more["more"]) == rates(next(iter(whole.values())))[600:]  # to the last bit
    assert ("warmup_iter of more, warmup_start_lr of more: the stage begins at" in listed) == (0 < warm_up <= 600)


def test_momentum_of_another_kind_is_a_mistake_at_its_line(here: Path) -> None:
    quick()
    path = Path("cifar10_quick_solver_lr1.prototxt")
    path.write_text(path.read_text() + 'type: "AdaDelta"')
    said = mistakes()
    assert "train_quick.sh:6:3: stage `lr1` keeps the momentum of `main`" in said and "1 mistake" in said


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("iter_4000", "iter_3500", "quick_iter_3500.solverstate"),
        ("quick_iter_4000", "slow_iter_4000", "slow_iter_4000.solverstate"),
        (".solverstate", ".caffemodel", "quick_iter_4000.caffemodel"),
        ("--solver=examples/cifar10/cifar10_quick_solver.prototxt $@", "--help", "quick_iter_4000.solverstate"),
    ],
)
def test_snapshots_that_no_stage_makes(before: str, after: str, names: str, here: Path) -> None:
    quick()
    text = Path("train_quick.sh").read_text()
    assert before in text
    write(train_quick_sh=text.replace(before, after))
    error = mistakes()
    assert f"{names}`: no single stage before makes it" in error and error.endswith("1 mistake\n")


def test_a_solver_that_is_at_its_end_already(here: Path) -> None:
    quick()
    write(cifar10_quick_solver_lr1=solver("quick", "0.0001", 4000, 5000))
    assert "quick_iter_4000.solverstate`: no single stage before makes it" in mistakes()


def test_two_that_make_one_snapshot(here: Path) -> None:
    write(
        solver_a=solver("x", "0.1", 100, 50),
        solver_b=solver("x", "0.1", 100, 50),
        solver_c=solver("x", "0.1", 200, 70),
        README="".join(f"caffe train --solver solver_{n}.prototxt\n" for n in "ab")
        + "caffe train --solver solver_c.prototxt --snapshot x_iter_100.solverstate\n",
    )
    assert "`x_iter_100.solverstate`: no single stage before makes it" in mistakes()


def test_two_ways_to_start(here: Path) -> None:
    quick()
    with open("train_quick.sh", "a") as file:
        file.write("caffe train --solver=cifar10_quick_solver_lr1.prototxt --weights=quick_iter_4000.caffemodel\n")
    said = mistakes()
    assert (
        "train_quick.sh:7:13: `cifar10_quick_solver_lr1.prototxt` starts here from something else than in a line"
        in said
    )


def state(name: str, weights: str = "", iteration: int = 200) -> None:
    said = caffe_pb2.SolverState(iter=iteration, learned_net=f"x/{name}.caffemodel")
    Path(f"{name}.solverstate").write_bytes(said.SerializeToString())
    if weights:
        Path(f"{name}.caffemodel").write_bytes(caffe_pb2.NetParameter(name=weights).SerializeToString())


@pytest.mark.parametrize("name", ["a_iter_200", "a_iter_123", "y/a_iter_200", "other_iter_5", "interrupted"])
def test_a_snapshot_goes_on_from_its_file_or_is_asked_for(name: str, here: Path) -> None:
    """Caffe writes one at any iteration on Ctrl-C. Nothing is trained from the seed in its place."""
    Path("y").mkdir()
    write(
        solver=solver("a", "0.1", 600, 200),
        README=f"caffe train --solver solver.prototxt --snapshot {name}.solverstate",
    )
    state("b_iter_7")
    said = mistakes()
    assert f"`--snapshot` names `{name}.solverstate`" in said and "hint: there are `b_iter_7.solverstate`" in said
    state(name, "net")
    stages, listed = imported()
    assert stages["main"].solver.solverstate == str(here / f"{name}.solverstate") and "--snapshot" not in listed


def test_a_snapshot_of_a_stage_from_its_beginning(here: Path) -> None:
    """Is one stage with it."""
    start = "caffe train --solver solver.prototxt\n"
    again = "caffe train --solver solver.prototxt --snapshot x/a_iter_123.solverstate\n"
    for number, text in enumerate((start + again, again + start)):
        write(solver=solver("a", "0.1", 600, 200), README=text)
        stages, listed = imported(out=f"out{number}")
        assert starts(stages) == {"main": (None, None)} and stages["main"].solver.solverstate is None
        assert stages["main"].solver.max_iter == 600 and "--snapshot" not in listed


@pytest.mark.parametrize("name", ["$WEIGHTS", "${A}_iter_5.caffemodel"])
def test_a_variable_that_no_line_sets(name: str, here: Path) -> None:
    write(solver=solver("a", "0.1", 600, 200), README=f"caffe train --solver solver.prototxt --weights={name}")
    Path("b.caffemodel").touch()
    said = mistakes()
    assert f"`--weights` names `{name}`: no single stage before makes it" in said
    assert "hint: there are `b.caffemodel`; `--order` trains without it" in said


# ---- --order beside commands


def cluster() -> None:
    write(
        solver=solver("a", "0.4", 8040, 402),
        solver_collapse=solver("b", "0.1", 402, 402),
        README="""Train with
	mpirun -n 896 caffe train --solver solver.prototxt
and then with `mpirun -n 448 caffe train --solver solver_collapse.prototxt --weights ckpt/a_iter_7638.caffemodel`.
""",
    )


def test_order_does_not_throw_the_commands_away(here: Path) -> None:
    cluster()
    stages, listed = imported("--order", "solver,solver_collapse")
    assert starts(stages) == {"main": (None, None), "collapse": ("main", 7638)}
    assert [s.solver.batch_size for s in stages.values()] == [89600, 44800]
    assert "nothing says how many workers" not in listed and "--weights" not in listed
    assert imported("--order", "main,collapse", "--workers", "2", out="b")[0]["collapse"].solver.batch_size == 200


def test_what_the_order_contradicts_is_listed(here: Path) -> None:
    cluster()
    write(solver_between=solver("c", "0.2", 402, 402))
    stages, listed = imported("--order", "main,between,collapse")
    assert starts(stages)["collapse"] == ("between", None)
    assert "README:3: --weights: the command starts from something else; with `--order` `collapse` starts" in listed
    stages, listed = imported("--order", "collapse,main", out="b")
    assert starts(stages) == {"collapse": (None, None), "main": ("collapse", None)}
    assert (
        "`ckpt/a_iter_7638.caffemodel`: no single stage before makes it, and no .caffemodel of that name is here; with"
        in listed
    )
    assert "README:2: --solver: the command starts from something else; with `--order` `main` starts from the" in listed


def test_a_wrong_line_does_not_stop_the_order(here: Path) -> None:
    cluster()
    write(README=Path("README").read_text().replace("7638.caffemodel", "7638.solverstate"))
    assert "no .caffemodel of that name is here" in mistakes()
    stages, listed = imported("--order", "main,collapse")
    assert (
        starts(stages)["collapse"] == ("main", None) and "no .caffemodel of that name is here; with `--order`" in listed
    )


# ---- several files with commands

TRUNK = "mpirun -n 4 caffe train --solver solver.prototxt\n"
COLLAPSE = "mpirun -n 2 caffe train --solver solver_collapse.prototxt --weights a_iter_7638.caffemodel\n"


@pytest.mark.parametrize("names", [("1_main", "2_collapse"), ("main", "collapse"), ("2_main", "10_collapse")])
def test_a_script_for_each_stage(names: tuple[str, str], here: Path) -> None:
    cluster()
    write(**{f"{names[0]}_sh": TRUNK, f"{names[1]}_sh": COLLAPSE}, README=f"Begin with\n\t{TRUNK}")
    stages, _ = imported()
    assert list(starts(stages).items()) == [("main", (None, None)), ("collapse", ("main", 7638))]
    assert [s.solver.batch_size for s in stages.values()] == [400, 200]


def test_scripts_that_do_not_belong_together(here: Path) -> None:
    """Two trainings in one folder, as BVLC's examples/cifar10; and two versions of one."""
    quick()
    write(solver=solver("a", "0.1", 600, 200), train_other_sh="caffe train --solver solver.prototxt\n")
    said = mistakes()
    assert "`train_other.sh` and `train_quick.sh` each train something from the beginning" in said
    assert (
        "in its order, with `--order`: solver.prototxt, cifar10_quick_solver.prototxt, cifar10_quick_solver_lr1.prototxt"
        in said
    )
    stages, _ = imported("--order", "cifar10_quick_solver,cifar10_quick_solver_lr1")
    assert starts(stages)["lr1"] == ("main", None)


# ---- commands as they are written


@pytest.mark.parametrize(
    ("between", "after"),
    [
        ("; ", ""),
        (" && ", ""),
        ("&&", " &"),
        (" || ", ""),
        (" 2>&1 | tee log; ", ""),
        (" then ", "."),
        ("`, and `", "`."),
    ],
)
def test_two_commands_in_one_line(between: str, after: str) -> None:
    first = "mpirun -n 4 caffe train --solver=a.prototxt"
    second = "mpirun -np 8 caffe train --solver b.prototxt --weights x/a_iter_5.caffemodel"
    found = train_lines("README.md", f"{first}{between}{second}{after}")
    assert [(c.solver.text, c.start and c.start.text, c.workers) for c in found] == [
        ("a.prototxt", None, 4),
        ("b.prototxt", "x/a_iter_5.caffemodel", 8),
    ]


@pytest.mark.parametrize("end", [".", ",", ").", ";", "`.", " # --snapshot y_iter_1.solverstate"])
def test_what_follows_a_command_in_a_sentence(end: str) -> None:
    text = f"Run (caffe train --solver a.prototxt --weights a_iter_5.caffemodel{end}"
    (found,) = train_lines("train.sh" if "#" in end else "README", text)
    assert found.start and found.start.text == "a_iter_5.caffemodel" and found.option == "--weights"
    assert text[found.start.span.column - 1 :].startswith("a_iter_5")


# ---- what is said of nets and files


def test_a_net_of_a_folder_above_is_told_of(here: Path) -> None:
    Path("a/b").mkdir(parents=True)
    Path("a/b/solver.prototxt").write_text(solver("a", "0.1", 600, 200))
    result = run(folder="a/b")
    assert result.exit_code == 0, result.output
    listed = " ".join(result.stdout.split())
    assert "a/b/solver.prototxt:1: net `net.prototxt`: net.prototxt, in a folder above, is taken" in listed
    assert "#   main  solver.prototxt  net.prototxt\n" in Path("out/schedule.prototxt").read_text()
    result = run("--root", ".", folder="a/b", out="b")  # which says where it is
    assert result.exit_code == 0 and "in a folder above" not in result.stdout
    Path("a/b/net.prototxt").write_text(NET)
    assert "in a folder above" not in run(folder="a/b", out="c").stdout
    assert "#   main  solver.prototxt  a/b/net.prototxt\n" in Path("c/schedule.prototxt").read_text()


def test_commands_to_paste_are_quoted_and_in_one_line(here: Path) -> None:
    layer = 'type: "ImageData" top: "data" top: "label" include { phase: TRAIN }\n  transform_param { crop_size: 8 mean_value: [1, 2, 3] } image_data_param { source: "my photos/list of $all.txt"'
    layer += ' root_folder: "/data/my photos/" new_height: 256 new_width: 256 batch_size: 100 }\n}'
    start, _, rest = NET.partition('type: "Data" top: "data" top: "label" include { phase: TRAIN }')
    write(net=start + layer + rest.partition("\n}")[2], solver=solver("a", "0.1", 600, 200))
    result = run()
    assert result.exit_code == 0, result.output
    command = (
        "`stagerun data import 'my photos/list of $all.txt' 'my photos/list of $all_lmdb' --format list --no-shuffle "
        "--resize-height 256 --resize-width 256 --root '/data/my photos/'`"
    )
    for text in (result.stdout, Path("out/schedule.prototxt").read_text()):
        assert sum(command in line for line in text.splitlines()) == 1


def test_a_mean_that_is_not_there_is_asked_for(here: Path) -> None:
    """Training without one would go on unnoticed."""
    net = NET.replace("mean_value: 1 mean_value: 2 mean_value: 3", 'mean_file: "mean.binaryproto"')
    write(net=net, solver=solver("a", "0.1", 600, 200))
    result = run()
    assert result.exit_code == ExitCode.RECIPE and "mean.binaryproto is not there" in " ".join(result.stdout.split())
    assert result.stderr.count("`mean_value` is a number, not `?`") == 2
    path = Path("out/schedule.prototxt")
    assert CliRunner().invoke(main, ["check", "out"]).exit_code == ExitCode.RECIPE
    path.write_text(path.read_text().replace("mean_value: ?", "mean_value: [1, 2, 3]"))
    assert load("out", ["model.channels=3"]).stages[0].solver.transform.mean_value == (1, 2, 3)


def test_arguments_that_are_empty(here: Path) -> None:
    write(solver=solver("a", "0.1", 600, 200))
    for arguments, said in (
        (["", "--out", "x"], "FOLDER is empty"),
        ([".", "--out", ""], "`--out` is empty"),
        ([".", "--out", "x", "--order", ""], "`--order` leaves a name out"),
        ([".", "--out", "x", "--order", "main,"], "`--order` leaves a name out"),
        ([".", "--out", "x", "--root", ""], "``: no such folder"),
    ):
        result = CliRunner().invoke(main, ["import", "caffe", *arguments])
        assert result.exit_code in (ExitCode.RECIPE, ExitCode.DATA) and said in result.output, result.output
    assert not Path("x").exists()
