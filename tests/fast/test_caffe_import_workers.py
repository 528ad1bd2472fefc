"""How many workers `stagerun import caffe` takes a batch times: `mpirun -np`, `--gpu`, and what they leave open."""

from pathlib import Path

import pytest
from test_caffe_import_starts import here as here  # the fixture
from test_caffe_import_starts import imported, mistakes, solver, write

from stagerun.language import load
from stagerun.tools.caffe.train_lines import train_lines

MAIN = "caffe train --solver=solver.prototxt"
COLLAPSE = "caffe train --solver solver_collapse.prototxt --weights x/a_iter_8040.caffemodel"
FOUR = "iter_size: 4 clip_gradients: 8"


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


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            f"mpirun -np 8 {MAIN} --gpu all",
            f"mpirun -np 8 {COLLAPSE}",
            "how many workers stage main had",
        ),
        (f"mpirun {MAIN}", f"mpirun -np 8 {COLLAPSE}", "how many workers stage main had isn't known"),
        (f"srun -N 4 {MAIN}", "", "how many workers stage main had isn't known"),
        (f"mpiexec -n $RANKS {MAIN}", "", "how many workers stage main had isn't known"),
        (f"mpirun -np 0 {MAIN}", "", "how many workers stage main had isn't known"),
        (f"$MPI {MAIN}", "", "how many workers stage main had isn't known"),
        (f"A=1 $MPI --n=$N {MAIN}", "", "how many workers stage main had isn't known"),
        (f"mpirun -np 8 {MAIN}", COLLAPSE, "stage collapse had isn't known: commands have 8"),
        (
            f"mpirun -np 8 {MAIN}\nmpirun -np 4 {MAIN} --snapshot x/a_iter_402.solverstate",
            f"mpirun -np 8 {COLLAPSE}",
            "stage main had isn't known: commands have 4 or 8",
        ),
    ],
)
def test_a_number_that_commands_leave_open_is_asked_for(first: str, second: str, said: str, here: Path) -> None:
    folder(first, *([second] if second else []))
    error = mistakes()
    assert said in error and "hint: give `--workers N`" in error
    assert sizes("--workers", "8", out="told")[0] == 3200


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ('RUN="mpirun -np 8"\n$RUN caffe train --solver a', 8),
        ("$MPI -np 8 caffe train --solver a --gpu 0,1", 16),
        ("$ caffe train --solver a", None),
        ("cd $CAFFE_ROOT && ./build/tools/caffe train --solver a --gpu 3", 1),
        ("mpirun -np 8 caffe train --solver a --gpu all", 0),
        # A launcher's line without a backslash, and `caffe` below it.
        (
            'mpiexec.hydra -PSM2 -l -n 896 -ppn 2 -f hosts -genv A 22  -genv B "f,1"  \n\t./tools/caffe train --solver a',
            896,
        ),
        ("mpirun -np 4 -x PATH\ncaffe train --solver a", 4),
        ("mpirun -np 4\n\ncaffe train --solver a", None),
        ("mpirun -np 4 ./prepare\ncaffe train --solver a", None),
        ("srun -N 2 -n 4 hostname -f\ncaffe train --solver a", None),
        ("mpirun -np 4 ; cd ..\ncaffe train --solver a", None),
    ],
)
def test_launches(line: str, number: int | None) -> None:
    (found,) = train_lines("train.sh", line)
    assert found.workers == number


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


def test_numbers_that_are_said_may_differ(here: Path) -> None:
    folder(f"mpirun -np 8 {MAIN}", f"{COLLAPSE} --gpu 0")
    assert sizes() == [3200, 400]


def test_a_readme_that_leaves_the_launcher_out(here: Path) -> None:
    said = f"mpirun -np 8 {MAIN}\nmpirun -np 8 {COLLAPSE}\n"
    folder(*said.splitlines(), readme=f"\t{MAIN}\n")
    assert sizes() == [3200, 3200]
    folder(MAIN, COLLAPSE, readme=said)
    assert sizes(out="b") == [3200, 3200]


def test_two_files_with_two_numbers(here: Path) -> None:
    folder(f"mpirun -np 8 {MAIN}", readme=f"\tmpirun -np 4 {MAIN}\n")
    assert "how many workers stage main had isn't known" in mistakes()
    folder(f"mpirun -np 8 {MAIN}", readme=f"\tmpirun -np 8 {MAIN}\n")
    assert sizes() == [3200]


def test_a_stage_that_no_line_trains(here: Path) -> None:
    folder(f"mpirun -np 8 {MAIN}")
    stages, listed = imported("--order", "main,collapse")
    assert [s.solver.batch_size for s in stages.values()] == [3200, 400]
    assert "batch_size: stage collapse: taken for a whole update, of one worker; other stages had several" in listed


def test_no_commands(here: Path) -> None:
    note = "net.prototxt:5: batch_size: taken for a whole update, since nothing says how many workers there were"
    folder()
    stages, listed = imported("--order", "main,collapse")
    assert note in listed and [s.solver.batch_size for s in stages.values()] == [400, 400]
    folder(MAIN, COLLAPSE)  # nor do these
    stages, listed = imported(out="b")
    assert note in listed and [s.solver.batch_size for s in stages.values()] == [400, 400]


def test_several_nodes_do_not_clip(here: Path) -> None:
    folder(f"mpirun -np 8 {MAIN}", f"{COLLAPSE} --gpu 0,1")
    stages, listed = imported()
    assert [stage.solver.clip_gradients for stage in stages.values()] == [None, 2]  # 8 on the sum of four
    assert listed.count("clip_gradients: left out: Intel's Caffe on several nodes does not clip") == 1


def test_rates_of_overlapped_gradients(here: Path) -> None:
    folder(f"mpirun -np 8 {MAIN}", f"mpirun -np 8 {COLLAPSE.replace('8040', '7638')}")
    policy = 'lr_policy: "multistep" gamma: 0.5 stepvalue: 10 stepvalue: 8039 test_interval: 4000 test_iter: 1'
    write(solver=solver("a", "0.4", 8040, 402, policy))
    _, listed = imported()
    assert listed.count("applies the gradient of iteration i with the rate of i + 1, and a snapshot in mid-") == 1
    stages, listed = imported("--overlap", out="b")
    assert "rate of i + 1" not in listed and stages["collapse"].parent_iter == 7637
    knobs = {name: [(k.iter, k.factor) for k in stage.solver.knot] for name, stage in stages.items()}
    assert knobs["collapse"] == [(0, 0.1), (402, 0.1)]
    assert knobs["main"] == [(0, 0.4), (8, 0.4), (9, 0.2), (8037, 0.2), (8038, 0.1), (8040, 0.1)]
    write(solver=solver("a", "0.4", 8040, 402, policy.replace("4000", "7638")))
    assert imported("--overlap", out="c")[0]["collapse"].parent_iter == 7638  # an evaluation waits for the update
    folder(MAIN)
    assert "`--overlap`, and no stage has several processes" in mistakes("--overlap", "--order", "main", out="d")
    assert load("b").stages[0].solver.base_lr == 1
