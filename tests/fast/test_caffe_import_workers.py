"""How many workers `stagerun import caffe` takes a batch times: `mpirun -np`, `--gpu`, and what they leave open."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from test_caffe_import_starts import here as here  # the fixture
from test_caffe_import_starts import imported, run, solver, write

from stagerun.base.errors import ExitCode
from stagerun.cli import main
from stagerun.tools.caffe.train_lines import train_lines

MAIN = "caffe train --solver=solver.prototxt"
COLLAPSE = "caffe train --solver solver_collapse.prototxt --weights x/a_iter_8040.caffemodel"
FOUR = "iter_size: 4"


def folder(*lines: str, readme: str = "") -> None:
    """Two stages, of 100 images x iter_size 4 for each worker."""
    for file in ("train.sh", "README"):
        Path(file).unlink(missing_ok=True)
    write(solver=solver("a", "0.4", 8040, 402, more=FOUR), solver_collapse=solver("b", "0.1", 402, 402, more=FOUR))
    if lines:
        write(train_sh="#!/bin/sh\n" + "\n".join(lines) + "\n")
    if readme:
        write(README=readme)


def sizes(*arguments: str, out: str = "out") -> list[int]:
    return [stage.solver.batch_size for stage in imported(*arguments, out=out)[0].values()]


def asked(*arguments: str, out: str = "out") -> tuple[list[str], str]:
    """The questions about batches, and what is listed, in one line; the written folder does not pass `check`."""
    result = run(*arguments, out=out)
    assert result.exit_code == ExitCode.RECIPE, result.output
    check = CliRunner().invoke(main, ["check", out])
    assert check.exit_code == ExitCode.RECIPE and "`batch_size` must be at least 1, not 0" in check.output
    questions = [line.partition("#")[2].strip() for line in result.stderr.splitlines() if " batch_size: 0 " in line]
    return questions, " ".join(result.stdout.split())


def test_gpu_all_is_asked(here: Path) -> None:
    folder(f"mpirun -np 8 {MAIN} --gpu all", f"mpirun -np 8 {COLLAPSE}")
    questions, listed = asked()
    assert questions == ["100 x 8 processes x the GPUs of each x iter_size 4?"]
    assert "train.sh:2: `--gpu all`: stage main: the command does not say how many GPUs each of the 8" in listed
    assert "batch_size: 0" in Path("out/main.prototxt").read_text()
    assert "batch_size: 3200 " in Path("out/collapse.prototxt").read_text()
    for name in ("main", "schedule"):
        path = Path(f"out/{name}.prototxt")
        path.write_text(
            path.read_text()
            .replace(" batch_size: 0 ", " batch_size: 6400 ")
            .replace("\nbatch_size: 0 ", "\nbatch_size: 6400 ")
        )
    assert CliRunner().invoke(main, ["check", "out"]).exit_code == 0
    assert sizes("--workers", "16", out="told") == [6400, 6400]


def test_the_same_question_is_asked_once(here: Path) -> None:
    folder(f"{MAIN} -gpu all", f"{COLLAPSE} -gpu all")
    questions, listed = asked()
    assert questions == ["100 x the GPUs x iter_size 4?"]
    assert "stage main: the command does not say how many GPUs it had" in listed and "stage collapse: " in listed


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        ("mpirun", "`mpirun`"),
        ("srun -N 4", "`srun`"),
        ("mpiexec -n $RANKS", "`-n $RANKS`"),
        ("mpirun -np 0", "`-np 0`"),
        ("$MPI", "`$MPI`"),
        ("A=1 $MPI --n=$N", "`--n $N`"),
    ],
)
def test_processes_that_are_not_counted_are_asked(launcher: str, said: str, here: Path) -> None:
    folder(f"{launcher} {MAIN}")
    questions, listed = asked()
    assert questions == ["100 x the processes x iter_size 4?"]
    assert f"train.sh:2: {said}: stage main: the command does not say how many processes it starts" in listed


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ('RUN="mpirun -np 8"\n$RUN caffe train --solver a', 8),
        ("$MPI -np 8 caffe train --solver a --gpu 0,1", 16),
        ("$ caffe train --solver a", 1),
        ("cd $CAFFE_ROOT && ./build/tools/caffe train --solver a --gpu 3", 1),
        ("mpirun -np 8 caffe train --solver a --gpu all", None),
        # A launcher's line without a backslash, and `caffe` below it.
        (
            'mpiexec.hydra -PSM2 -l -n 896 -ppn 2 -f hosts -genv A 22  -genv B "f,1"  \n\t./tools/caffe train --solver a',
            896,
        ),
        ("mpirun -np 4 -x PATH\nA=1 caffe train --solver a", 4),
        ("mpirun -np 4\n\ncaffe train --solver a", 1),
        ("mpirun -np 4 ./prepare\ncaffe train --solver a", 1),
        ("srun -N 2 -n 4 hostname -f\ncaffe train --solver a", 1),
        ("mpirun -np 4 ; cd ..\ncaffe train --solver a", 1),
        ("mpirun -np 4 --what ever\ncaffe train --solver a", None),
    ],
)
def test_launches(line: str, number: int | None) -> None:
    (found,) = train_lines("train.sh", line)
    assert found.launch.number == number


def test_the_448_node_folder_whose_lines_have_no_backslash(here: Path) -> None:
    """SURFsara's: variables, launcher and program on three lines."""

    def command(line: str) -> list[str]:
        return [
            '\tMLSL_NUM_SERVERS=2 KMP_AFFINITY="granularity=fine,compact,1,0"  ',
            '\t\tmpiexec.hydra -PSM2 -l -n 896 -ppn 2 -f hostfile -genv OMP_NUM_THREADS 22  -genv KMP "granularity=fine,compact,1,0"  ',
            f"\t\t./build/tools/{line}",
        ]

    folder(*command(MAIN), "", *command(COLLAPSE))
    assert sizes() == [400 * 896, 400 * 896]
    folder(readme="\n".join(["# Two parts", *command(MAIN), "", "Part 2.", *command(COLLAPSE)]))
    assert sizes(out="b") == [400 * 896, 400 * 896]


def test_a_line_above_that_may_be_a_command_of_its_own_is_asked(here: Path) -> None:
    folder("mpirun -np 8 --what ever", MAIN)
    questions, listed = asked()
    assert questions == ["100 x the processes x iter_size 4?"]
    assert "train.sh:2: `-np 8`: stage main: " in listed


def test_one_line_has_mpirun_and_the_other_not(here: Path) -> None:
    folder(f"mpirun -np 8 {MAIN}", COLLAPSE)
    questions, listed = asked()
    assert questions == ["100 x 1 or 8 workers x iter_size 4?"]
    assert "train.sh:3: batch_size: stage collapse: the command starts one worker, without" in listed
    assert "main had 8 workers" in listed and "nothing says" not in listed
    assert "batch_size: 0" in Path("out/collapse.prototxt").read_text()
    folder(f"mpirun -np 8 {MAIN} --gpu all", COLLAPSE)
    questions, listed = asked(out="b")
    assert sorted(questions) == [
        "100 x 8 processes x the GPUs of each x iter_size 4?",
        "100 x the workers x iter_size 4?",
    ]
    assert "how many main had is not known" in listed
    assert sizes("--workers", "8", out="told") == [3200, 3200]


def test_numbers_that_are_said_may_differ(here: Path) -> None:
    folder(f"mpirun -np 8 {MAIN}", f"{COLLAPSE} --gpu 0")
    assert sizes() == [3200, 400]


def test_lines_of_one_stage_that_differ(here: Path) -> None:
    again = f"{MAIN} --snapshot x/a_iter_402.solverstate"
    for number, other in enumerate((f"mpirun -np 4 {again}", again)):
        folder(f"mpirun -np 8 {MAIN}", other, f"mpirun -np 8 {COLLAPSE}")
        questions, listed = asked(out=f"out{number}")
        few = "4 workers" if number == 0 else "one worker"
        assert questions == [f"100 x {1 if number else 4} or 8 workers x iter_size 4?"]
        assert f"train.sh:3: batch_size: stage main has {few} here and 8 workers in train.sh:2; fill" in listed


def test_a_readme_that_leaves_the_launcher_out(here: Path) -> None:
    said = f"mpirun -np 8 {MAIN}\nmpirun -np 8 {COLLAPSE}\n"
    folder(*said.splitlines(), readme=f"\t{MAIN}\n")
    assert sizes() == [3200, 3200]
    folder(MAIN, COLLAPSE, readme=said)
    assert sizes(out="b") == [3200, 3200]


def test_a_stage_that_no_line_trains(here: Path) -> None:
    folder(f"mpirun -np 8 {MAIN}")
    _, listed = imported("--order", "main,collapse")
    assert sizes("--order", "main,collapse", out="b") == [3200, 400]
    why = "stage collapse: taken for a whole update, of one worker, since nothing says how many it had; main had 8"
    assert f"batch_size: {why} workers" in listed
    folder(f"{MAIN} --gpu 0", COLLAPSE)
    _, listed = imported(out="c")
    assert "train.sh:3: batch_size: stage collapse: taken for a whole update, of one worker" in listed


def test_no_commands(here: Path) -> None:
    note = "net.prototxt:4: batch_size: taken for a whole update, since nothing says how many workers there were"
    folder()
    stages, listed = imported("--order", "main,collapse")
    assert note in listed and [s.solver.batch_size for s in stages.values()] == [400, 400]
    folder(MAIN, COLLAPSE)  # nor do these
    stages, listed = imported(out="b")
    assert note in listed and [s.solver.batch_size for s in stages.values()] == [400, 400]


def test_without_nets_too(here: Path) -> None:
    folder(f"mpirun -np 8 {MAIN} --gpu all", f"mpirun -np 8 {COLLAPSE}")
    assert asked("--no-nets", "--classes", "10")[0] == [
        "images of one update, of 8 workers together?",
        "images of one update, of all workers together?",
    ]
