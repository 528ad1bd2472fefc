"""A stage that another one teaches: its order, what makes it stale, kills, and numbers of workers; and a loss of the user's own."""

import shutil
from pathlib import Path

import pytest
import small
import tiny
import torch
from click.testing import CliRunner
from test_run_trees import command, go, ids, names, of

from stagerun.base.errors import RecipeError, ResumeRefused, UsageError
from stagerun.base.events import Event, Iterated, StageStarted
from stagerun.cli import main
from stagerun.language import load
from stagerun.models import build
from stagerun.plan.hours import Measured, at_images_per_second, hours_of_run
from stagerun.plan.rehearsal import cost_key

TREE = 'stage { name: "student" }\nstage { name: "teach" from: "" }\nstage { name: "after" from: "student" }\n'
FILES = {
    "student": 'base_lr: 0.05 lr_policy: "fixed" max_iter: 6 loss { type: DISTILL teacher: "teach" weight: 0.9 }\n',
    "teach": 'base_lr: 0.05 lr_policy: "fixed" max_iter: 4 loss { type: BINARY }\n',
    "after": 'base_lr: 0.02 lr_policy: "fixed" max_iter: 2\n',
}

ONE = 'stage { name: "student" from: "" }\n'


def make(folder: Path, data: Path, head: str = "", stages: str = TREE, **files: str) -> Path:
    small.make_schedule(folder, data)
    file = folder / "schedule.prototxt"
    text = file.read_text()
    file.write_text(head + text[: text.index("stage {")] + stages)
    for name, solver in {**FILES, **files}.items():
        (folder / f"{name}.prototxt").write_text(solver)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/, schedule/, and its output out/."""
    base = tmp_path_factory.mktemp("distilled")
    tiny.make_data(base / "data")
    go(make(base / "schedule", base / "data"), base / "out")
    return base


def trained(events: list[Event]) -> list[str]:
    return [event.stage for event in of(events, StageStarted)]


def test_a_teacher_is_trained_before_and_what_it_says_counts(base: Path, tmp_path: Path) -> None:
    schedule = load(base / "schedule")
    assert [stage.name for stage in schedule.stages] == ["teach", "student", "after"]
    text = command("plan", base / "schedule", "--out", base / "out")
    assert "loss: DISTILL, taught by `teach`, temperature 4, weight 0.9" in text and "0 to do" in text
    alone = make(tmp_path / "s", base / "data", student=FILES["student"].replace("0.9", "0"))
    go(alone, tmp_path / "out")
    plain = make(tmp_path / "p", base / "data", student=FILES["student"].split("loss")[0] + "\n")
    go(plain, tmp_path / "plain")
    same, other, taught = ids(tmp_path / "plain"), ids(tmp_path / "out"), ids(base / "out")
    assert same["student@6"] == other["student@6"] != taught["student@6"]
    assert same["teach@4"] == taught["teach@4"]


def test_killed_in_the_midst_of_the_lesson_it_goes_on_to_the_same_bits(base: Path, tmp_path: Path) -> None:
    def stop(seen: list[Event]) -> bool:
        return any(e.stage == "student" and e.iter >= 3 for e in of(seen, Iterated))

    go(base / "schedule", tmp_path / "out", stop=stop)
    assert "after" not in "".join(names(tmp_path / "out"))
    assert trained(go(base / "schedule", tmp_path / "out")) == ["student", "after"]
    assert ids(tmp_path / "out")["after@2"] == ids(base / "out")["after@2"]


@pytest.mark.long
def test_one_to_three_workers_have_the_same_bits_and_end_at_the_same_place(base: Path, tmp_path: Path) -> None:
    student = FILES["student"].replace("max_iter: 6", "max_iter: 20 test_interval: 2")
    student = student.replace("loss", "early_stop { metric: LOSS patience_iter: 3 min_delta: 10 } loss")
    folder = make(tmp_path / "s", base / "data", head="determinism: ELASTIC\n", student=student)
    go(folder, tmp_path / "1")
    for workers in (2, 3):
        done = small.run(folder, tmp_path / str(workers), nproc=workers)
        assert "ends after 6 of 20 iterations" in done.stdout
        assert ids(tmp_path / str(workers)) == ids(tmp_path / "1")


def test_another_teacher_makes_the_student_stale_and_what_follows(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "out", tmp_path / "out")
    edited = make(tmp_path / "s", base / "data", teach=FILES["teach"].replace("0.05", "0.04"))
    with pytest.raises(ResumeRefused) as error:
        go(edited, tmp_path / "out")
    assert "base_lr 0.05 -> 0.04" in error.value.message and "its teacher `teach` is stale" in error.value.message
    assert "--redo teach`" in (error.value.hint or "")
    assert trained(go(edited, tmp_path / "out", redo=["teach"])) == ["teach", "student", "after"]
    assert trained(go(edited, tmp_path / "out", redo=["teach"])) == []
    assert trained(go(edited, tmp_path / "out")) == []
    assert ids(tmp_path / "out")["student@6"] != ids(base / "out")["student@6"]


def test_a_lost_teacher_is_trained_again_to_the_same_bits_and_the_student_stays(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "out", tmp_path / "out")
    for name in names(tmp_path / "out", "teach"):
        shutil.rmtree(tmp_path / "out" / "snapshots" / name)
    assert trained(go(base / "schedule", tmp_path / "out")) == ["teach"]
    assert ids(tmp_path / "out") == ids(base / "out")


def test_a_student_alone_is_refused_while_its_teacher_is_left_out(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="teach"):
        go(base / "schedule", tmp_path / "out", only=["student"])
    assert trained(go(base / "schedule", tmp_path / "out", only=["teach", "student"])) == ["teach", "student"]


def test_a_teacher_that_is_not_enabled_takes_its_students_with_it(base: Path, tmp_path: Path) -> None:
    tree = TREE.replace('from: "" }', 'from: "" enabled: false }')
    schedule = load(make(tmp_path / "s", base / "data", stages=tree))
    assert not any(stage.enabled for stage in schedule.stages)


# -- a teacher that is a file

BY_FILE = FILES["student"].replace('teacher: "teach"', 'teacher_weights { file: "teacher.safetensors" }')


def by_file(folder: Path, data: Path, weights: Path, student: str = BY_FILE, head: str = "") -> Path:
    """The student alone, taught by a copy of these weights."""
    make(folder, data, stages=ONE, student=student, head=head)
    shutil.copyfile(weights, folder / "teacher.safetensors")
    return folder


@pytest.fixture(scope="module")
def weights(base: Path) -> Path:
    """Those of the stage `teach` at its end."""
    return base / "out" / "snapshots" / names(base / "out", "teach")[-1] / "model.safetensors"


def test_a_file_teaches_as_the_stage_that_it_is_from(base: Path, tmp_path: Path, weights: Path) -> None:
    folder, out = by_file(tmp_path / "s", base / "data", weights), tmp_path / "out"
    taught = [e.loss for e in of(go(base / "schedule", tmp_path / "stages", only=["teach", "student"]), Iterated)]
    events = go(folder, out)
    assert [e.loss for e in of(events, Iterated)] == taught[-len(of(events, Iterated)) :]
    text = command("plan", folder, "--out", out)
    assert "loss: DISTILL, taught by teacher.safetensors, temperature 4, weight 0.9" in text and "0 to do" in text
    small.run(by_file(tmp_path / "e", base / "data", weights, head="determinism: ELASTIC\n"), tmp_path / "2", nproc=2)
    (folder / "teacher.safetensors").unlink()
    assert trained(go(folder, out)) == []
    with pytest.raises(RecipeError, match=r"student\.prototxt:1:.*no such file"):
        go(folder, tmp_path / "anew")


def test_a_file_of_other_weights_makes_the_student_stale_and_a_kill_does_not(
    base: Path, tmp_path: Path, weights: Path
) -> None:
    folder, out = by_file(tmp_path / "s", base / "data", weights), tmp_path / "out"
    go(folder, out, stop=lambda seen: len(of(seen, Iterated)) >= 3)
    go(folder, out)
    whole = by_file(tmp_path / "w", base / "data", weights)
    go(whole, tmp_path / "whole")
    assert ids(out)["student@6"] == ids(tmp_path / "whole")["student@6"]
    other = base / "out" / "snapshots" / names(base / "out", "student")[-1] / "model.safetensors"
    shutil.copyfile(other, folder / "teacher.safetensors")
    with pytest.raises(ResumeRefused, match=r"teacher\.sha256 .* \(.*student\.prototxt:1\)"):
        go(folder, out)
    named = f'teacher_weights {{ file: "{base / "out"}:teach" }}'
    go(
        by_file(tmp_path / "n", base / "data", weights, FILES["student"].replace('teacher: "teach"', named)),
        tmp_path / "n",
    )
    assert ids(tmp_path / "n")["student@6"] == ids(tmp_path / "whole")["student@6"]


def test_a_teacher_of_another_network_is_named_and_known_whole(base: Path, tmp_path: Path, weights: Path) -> None:
    larger = BY_FILE.replace(" weight:", ' teacher_model { name: "resnet18" num_classes: 10 channels: 1 } weight:')
    folder = by_file(tmp_path / "s", base / "data", weights, larger)
    for words in (("plan", folder, "--weights"), ("run", folder, "--out", tmp_path / "out")):
        result = CliRunner().invoke(main, [str(word) for word in words])
        assert result.exit_code == 64 and "student.prototxt:1:" in result.output, result.output
        assert "teacher.safetensors" in result.output and "hint" in result.output
    made = build(load(folder).stage("student").solver.loss.teacher_model)
    torch.save(made.state_dict(), folder / "teacher.safetensors")
    events = go(folder, tmp_path / "out")
    assert len(of(events, Iterated)) == 6
    drops = larger.replace('.safetensors" }', '.safetensors" drop: "fc*" }')
    with pytest.raises(RecipeError, match="the teacher would have random numbers there"):
        torch_file = by_file(tmp_path / "d", base / "data", folder / "teacher.safetensors", drops)
        go(torch_file, tmp_path / "dropped")


MISTAKEN = {
    "both": ('teacher: "teach" teacher_weights { file: "x.pt" }', "`teacher` and `teacher_weights` exclude each other"),
    "a network of a stage": ('teacher: "teach" teacher_model { name: "resnet18" }', "a stage that teaches has its own"),
    "a network alone": ('teacher_model { name: "resnet18" }', "`teacher_model` without `teacher_weights`"),
    "neither": ("", "loss `DISTILL` lacks `teacher`"),
    "classes": (
        'teacher_weights { file: "x.pt" } teacher_model { name: "resnet18" num_classes: 7 channels: 1 }',
        "`student` has 10 classes, and its `teacher_model` 7",
    ),
    "channels": (
        'teacher_weights { file: "x.pt" } teacher_model { name: "resnet18" num_classes: 10 }',
        "this network takes 3 channels, and the schedule's 1",
    ),
    "sizes": (
        'teacher_weights { file: "x.pt" } teacher_model { name: "vit_b_16" num_classes: 10 channels: 1 }',
        "`vit_b_16`, which teaches `student`, takes images of 224 x 224 pixels only, not 24 x 24",
    ),
    "stars": ('teacher_weights { file: "x.pt" rename { from: "a.*" to: "a" } }', "don't have as many `*`"),
}


@pytest.mark.parametrize("name", MISTAKEN)
def test_what_is_wrong_with_a_teacher_is_said_by_check(base: Path, tmp_path: Path, name: str) -> None:
    said, message = MISTAKEN[name]
    student = FILES["student"].replace('teacher: "teach"', said) + "transform_param { crop_size: 24 }\n"
    with pytest.raises(RecipeError) as error:
        load(make(tmp_path / "s", base / "data", student=student))
    assert message in error.value.render() and "student.prototxt:" in error.value.render()


def test_the_teachers_pass_is_in_the_hours_of_plan(base: Path) -> None:
    schedule = load(base / "schedule")
    hours = at_images_per_second(schedule, 100)
    each = {name: speed.iteration for name, speed in hours.speeds.items()}
    assert each["student"] == pytest.approx(4 / 3 * each["teach"])
    assert any("`student`: a teacher's forward pass is counted" in note for note in hours.notes)
    measured = hours_of_run(schedule, Measured(who="by hand"), {"teach": 90.0})
    assert measured.speeds["student"].iteration == pytest.approx(4 / 3 * measured.speeds["teach"].iteration)
    larger = load(base / "schedule", ['teach.model={name: "resnet18" num_classes: 10 channels: 1}'])
    keys = [cost_key(one, one.stage("student")) for one in (schedule, larger)]
    assert keys[0] != keys[1], "what was measured with one teacher is nothing of another"


# -- the user's own

OWN = """import torch.nn.functional as F


def build(num_classes, power=1.0):
    def loss(logits, targets):
        assert targets.shape == (len(logits), num_classes)
        return power * F.cross_entropy(logits, targets)

    return loss
"""
USES = 'base_lr: 0.05 lr_policy: "fixed" max_iter: 4 loss { type: PYTHON function: "own.py:build" }\n'


def own(folder: Path, data: Path, text: str = OWN, stage: str = USES) -> Path:
    make(folder, data, stages=ONE, student=stage)
    (folder / "own.py").write_text(text)
    return folder


def test_a_loss_of_ones_own_is_trained_and_an_edit_of_it_is_stale(base: Path, tmp_path: Path) -> None:
    folder = own(tmp_path / "s", base / "data")
    go(folder, tmp_path / "out")
    plain = make(tmp_path / "p", base / "data", stages=ONE, student=USES.split("loss")[0] + "\n")
    losses = [e.loss for e in of(go(plain, tmp_path / "plain"), Iterated)]
    other = [e.loss for e in of(go(folder, tmp_path / "again"), Iterated)]
    assert losses == pytest.approx(other, rel=1e-4)
    (folder / "own.py").write_text(OWN + "# a comment\n")
    with pytest.raises(ResumeRefused, match=r"own\.py"):
        go(folder, tmp_path / "out")
    twice = own(tmp_path / "t", base / "data", stage=USES.replace(" }", " args { power: 2 } }"))
    doubled = [e.loss for e in of(go(twice, tmp_path / "twice"), Iterated)]
    assert doubled[0] == pytest.approx(2 * losses[0], rel=1e-4)


MISTAKES = {
    "not a scalar": ("return power * F.cross_entropy(logits, targets)", "return logits", "not a scalar"),
    "no gradient": ("return power * ", "return 0 * power * F.cross_entropy(logits.detach(), targets) #", "gradient"),
    "not finite": ("return power * ", "return (logits - logits).log().sum() #", "not finite"),
    "raises": ("return power * ", "return 1 / 0 #", "own.py:7: ZeroDivisionError"),
    "nothing": ("return loss", "return None", "which can't be called"),
    "argument": ("power=1.0", "force", "needs `force`"),
    "the loss itself": (
        "build(num_classes, power=1.0)",
        "build(logits, targets)",
        "returns the function of (logits, targets)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_wrong_with_it_is_said_before_the_first_update(base: Path, tmp_path: Path, name: str) -> None:
    old, new, message = MISTAKES[name]
    folder = own(tmp_path / "s", base / "data", OWN.replace(old, new))
    with pytest.raises((UsageError, RecipeError)) as error:
        go(folder, tmp_path / "out")
    assert message in error.value.render()
    assert not (tmp_path / "out" / "snapshots").exists() or names(tmp_path / "out") == []


def test_a_file_that_is_not_there_is_said_by_check(base: Path, tmp_path: Path) -> None:
    folder = own(tmp_path / "s", base / "data")
    (folder / "own.py").unlink()
    with pytest.raises(RecipeError) as error:
        load(folder)
    assert "own.py: there is no such file" in error.value.render() and "student.prototxt:1:" in error.value.render()


TEACHER = """from torch import nn

class Net(nn.Sequential):
    def forward(self, x):
        {forward}

def build(num_classes, channels):
    return Net(nn.Flatten(), nn.Linear(channels * 28 * 28, {outputs}))
"""


def test_a_teacher_of_ones_own_need_not_learn(base: Path, tmp_path: Path) -> None:
    by_file = 'teacher_weights { file: "t.pt" } teacher_model { name: "t.py:build" num_classes: 10 channels: 1 }'
    solver = FILES["student"].replace('teacher: "teach"', by_file)
    folder = make(tmp_path / "dir", base / "data", stages=ONE, student=solver)
    torch.save({"1.weight": torch.zeros(10, 28 * 28), "1.bias": torch.zeros(10)}, folder / "t.pt")
    (folder / "t.py").write_text(TEACHER.format(forward="return super().forward(x).detach()", outputs="10"))
    go(folder, tmp_path / "out")
    assert "student@6" in ids(tmp_path / "out")
