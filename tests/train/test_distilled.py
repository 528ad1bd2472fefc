"""A stage that another one teaches: what makes it stale, kills, and numbers of workers; and a loss of the user's own. See tests/cases/distill.txt."""

import shutil
from pathlib import Path

import pytest
import small
import tiny
from facade import Event, Iterated, Note, RecipeError, ResumeRefused, StageStarted, UsageError
from nan_help import lives
from test_run_trees import command, go, ids, names, of

pytestmark = pytest.mark.long

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
def base(tmp_path_factory):
    """data/, schedule/, and its output out/."""
    base = tmp_path_factory.mktemp("distilled")
    tiny.make_data(base / "data")
    go(make(base / "schedule", base / "data"), base / "out")
    return base


def trained(events: list[Event]) -> list[str]:
    return [event.stage for event in of(events, StageStarted)]


def test_what_a_teacher_says_counts(base, tmp_path):
    assert "0 to do" in command("plan", base / "schedule", "--out", base / "out")
    alone = make(tmp_path / "s", base / "data", student=FILES["student"].replace("0.9", "0"))
    go(alone, tmp_path / "out")
    plain = make(tmp_path / "p", base / "data", student=FILES["student"].split("loss")[0] + "\n")
    go(plain, tmp_path / "plain")
    same, other, taught = ids(tmp_path / "plain"), ids(tmp_path / "out"), ids(base / "out")
    assert same["student@6"] == other["student@6"] != taught["student@6"]
    assert same["teach@4"] == taught["teach@4"]


def test_killed_in_the_midst_of_the_lesson_it_goes_on_to_the_same_bits(base, tmp_path):
    def stop(seen: list[Event]) -> bool:
        return any(e.stage == "student" and e.iter >= 3 for e in of(seen, Iterated))

    go(base / "schedule", tmp_path / "out", stop=stop)
    assert "after" not in "".join(names(tmp_path / "out"))
    assert trained(go(base / "schedule", tmp_path / "out")) == ["student", "after"]
    assert ids(tmp_path / "out")["after@2"] == ids(base / "out")["after@2"]


def test_one_to_three_workers_have_the_same_bits_and_end_at_the_same_place(base, tmp_path):
    student = FILES["student"].replace("max_iter: 6", "max_iter: 20 test_interval: 2")
    student = student.replace("loss", "early_stop { metric: LOSS patience_iter: 3 min_delta: 10 } loss")
    folder = make(tmp_path / "s", base / "data", head="determinism: ELASTIC\n", student=student)
    go(folder, tmp_path / "1")
    for workers in (2, 3):
        said = [event.text for event in of(lives(folder, tmp_path / str(workers), workers), Note)]
        assert any("ends after 6 of 20 iterations" in text for text in said)
        assert ids(tmp_path / str(workers)) == ids(tmp_path / "1")


def test_another_teacher_makes_the_student_stale_and_what_follows(base, tmp_path):
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


def test_a_lost_teacher_is_trained_again_to_the_same_bits_and_the_student_stays(base, tmp_path):
    shutil.copytree(base / "out", tmp_path / "out")
    for name in names(tmp_path / "out", "teach"):
        shutil.rmtree(tmp_path / "out" / "snapshots" / name)
    assert trained(go(base / "schedule", tmp_path / "out")) == ["teach"]
    assert ids(tmp_path / "out") == ids(base / "out")


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


def test_a_loss_of_ones_own_is_trained_and_an_edit_of_it_is_stale(base, tmp_path):
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
def test_what_is_wrong_with_it_is_said_before_the_first_update(base, tmp_path, name):
    old, new, message = MISTAKES[name]
    folder = own(tmp_path / "s", base / "data", OWN.replace(old, new))
    with pytest.raises((UsageError, RecipeError)) as error:
        go(folder, tmp_path / "out")
    assert message in error.value.render()
    assert not (tmp_path / "out" / "snapshots").exists() or names(tmp_path / "out") == []
