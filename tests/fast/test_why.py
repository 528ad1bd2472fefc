"""`stagerun plan --why`: each layer that says something of a field, the value that counts, and what it means."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagerun.base.errors import UsageError
from stagerun.cli import main
from stagerun.language import load
from stagerun.language.proto import stagerun_pb2
from stagerun.language.tree import SOLVER, retired
from stagerun.language.values import identity, leaves, unsaid
from stagerun.manual import fields as topics
from stagerun.manual import pages
from stagerun.manual.fields import help_text
from stagerun.tools.plan import why
from stagerun.tools.plan.history import history

SCHEDULE = """name: "layers"
model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } val { source: "/d/val" images: 300 } }
solver {
  batch_size: 100  device_batch_size: 50
  momentum: 0.9
  max_iter: 40
  transform_param { crop_size: 28 mirror: true }
  base_lr: 0.1  base_lr_batch: 50
}
stage { name: "trunk" }
stage { name: "cool" from: "trunk@12"
  sweep { name: "low" solver { base_lr: 0.05 } }
  sweep { name: "high" }
}
stage { name: "off" from: "trunk" enabled: false }
"""
STAGES = {
    "trunk": 'lr_policy: "fixed"\nweight_decay: 5e-4\n',
    "cool": 'lr_policy: "poly"\npower: 2\nmax_epoch: 1.5\nclear: "momentum"\ntransform_param { scale: 0.5 }\n',
    "off": 'lr_policy: "fixed"\n',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "schedule.prototxt").write_text(SCHEDULE)
    for name, text in STAGES.items():
        (tmp_path / "s" / f"{name}.prototxt").write_text(text)
    monkeypatch.chdir(tmp_path)
    return "s"


def explain_text(folder: str, name: str, overrides: Sequence[str]) -> str:
    return why.explained(load(folder, overrides), name, overrides)


def explained(folder: str, name: str, *overrides: str) -> str:
    """Without the manual's entry, which comes last."""
    return explain_text(folder, name, overrides).rpartition("\n\n")[0]


def test_from_the_stages_file_in_place_of_the_schedules(folder: str) -> None:
    assert explain_text(folder, "cool_high.max_iter", ()) == (
        "cool_high.max_iter   15 = 1.50 epochs (max_epoch: 1.5)\n"
        "\n"
        "s/cool.prototxt:3:12: set in the file of stage cool_high\n"
        "  max_epoch: 1.5\n"
        "             ^^^\n"
        "\n"
        "s/schedule.prototxt:7:13: replaced: set for all stages\n"
        "    max_iter: 40\n"
        "              ^^\n"
        "\n"
        "raised once the stage is trained, that is stale: lr_policy `poly` reads max_iter\n"
        "\n"
        "Solver.max_iter   whole number\n"
        "  Iterations (weight updates) of the stage. 1 or more. This or max_epoch is required. Caffe's. A trained stage that is given more goes on\n"
        "  from its end, and one that is given fewer from its newest snapshot before, where nothing that it was trained with depends on its length; or\n"
        "  else it is stale.\n"
        "  See `max_epoch`: one of the two can be given."
    )
    assert (
        "trained, it goes on from iteration 40; what started from its end is stale, unless it says `@40`"
        in explain_text(folder, "trunk.max_iter", ())
    )
    # Asked by its other name, too.
    assert explain_text(folder, "cool_high.max_epoch", ()) == explain_text(folder, "cool_high.max_iter", ())


def test_from_the_schedule(folder: str) -> None:
    assert explained(folder, "trunk.momentum") == (
        "trunk.momentum   0.9\n\ns/schedule.prototxt:6:13: set for all stages\n    momentum: 0.9\n              ^^^"
    )


def test_a_default(folder: str) -> None:
    assert explained(folder, "trunk.momentum_form").startswith("trunk.momentum_form   CAFFE\n\nthe default")
    assert explained(folder, "trunk.clip_gradients") == "trunk.clip_gradients   none\n\nnot set"
    assert explained(folder, "trunk.random_seed") == "trunk.random_seed   1\n\na default that follows from other fields"
    assert "a default: transform_param without what is drawn at random" in explained(
        folder, "trunk.test_transform_param"
    )


def test_what_is_cleared_and_what_a_message_inherits(folder: str) -> None:
    assert explained(folder, "cool_high.momentum") == (
        "cool_high.momentum   0.0\n"
        "\n"
        "the default\n"
        "\n"
        "s/cool.prototxt:4:8: taken away in the file of stage cool_high\n"
        '  clear: "momentum"\n'
        "         ^^^^^^^^^^\n"
        "\n"
        "s/schedule.prototxt:6:13: replaced: set for all stages\n"
        "    momentum: 0.9\n"
        "              ^^^"
    )
    said = explained(folder, "cool_high.transform_param.mirror")
    assert said.startswith("cool_high.transform_param.mirror   true\n\ns/schedule.prototxt:"), "messages merge"


def test_sweep_and_the_command_line(folder: str) -> None:
    overrides = ("cool.base_lr=0.3", "cool_low.base_lr=0.4", "solver.base_lr=0.2")
    said = explained(folder, "cool_low.base_lr", *overrides)
    places = [line.partition(": ")[0] for line in said.splitlines() if line.startswith(("s/", "--set"))]
    assert places == ["--set:2:18", "--set:1:14", "s/schedule.prototxt:13:41", "--set:3:16", "s/schedule.prototxt:9:12"]
    assert "replaced: set in its `sweep`" in said
    assert said.startswith("cool_low.base_lr   0.8 for 100 (0.4 for 50)\n")
    assert "set in its `sweep`" in explained(folder, "cool_low.base_lr").split("replaced")[0]


def test_a_stage_inside_the_schedule(folder: str) -> None:
    schedule = Path(folder) / "schedule.prototxt"
    inside = f'stage {{ name: "trunk"\n solver_param {{ {STAGES["trunk"]} }} }}'
    schedule.write_text(SCHEDULE.replace('stage { name: "trunk" }', inside))
    (Path(folder) / "trunk.prototxt").unlink()
    said = explain_text(folder, "trunk.lr_policy", ())
    assert "s/schedule.prototxt:12:28: set in `solver_param` of stage trunk" in said
    assert explain_text(folder, "trunk.max_iter", ()).count("set for all stages") == 1
    test_what_counts_is_where_the_value_came_from(folder, OVERRIDES)


def test_inside_a_message_on_the_command_line(folder: str) -> None:
    overrides = ("solver.transform_param.mirror=false", "trunk.transform_param.crop_size=24")
    said = explained(folder, "trunk.transform_param.mirror", *overrides)
    assert said.startswith("trunk.transform_param.mirror   false\n\n--set:1:31: set on the command line")
    assert said.count("replaced") == 1
    assert "--set:2:33" in explained(folder, "trunk.transform_param.crop_size", *overrides)


def test_fields_of_the_schedule(folder: str) -> None:
    assert explained(folder, "data.train.images").startswith(
        "data.train.images   1000\n\ns/schedule.prototxt:3:43: set in the"
    )
    assert "--set:1:6: set on the command line" in explained(folder, "seed", "seed=7")
    assert explained(folder, "seed") == "seed   1\n\nthe default"
    assert "model.batch_norm_param" in explained(folder, "model.batch_norm_param.eps")
    assert "batch_norm_param.eps" in explained(folder, "model")


def test_knots_in_epochs(folder: str) -> None:
    stage = Path(folder, "off.prototxt")
    stage.write_text('lr_policy: "piecewise_linear" knot { iter: 0 factor: 1 } knot { epoch: 2.5 factor: 0 }')
    assert explained(folder, "off.knot").startswith(
        "off.knot   [{ iter: 0.0 factor: 1.0 }, { iter: 25.0 factor: 0.0 }] = at epochs 0.00, 2.50\n"
    )


def test_tables(folder: str) -> None:
    table = explain_text(folder, "cool_low", ())
    assert table.startswith("cool_low: starts from trunk at iteration 12 (s/schedule.prototxt:13)\n\nfield ")
    lines = {line.split()[0]: line for line in table.splitlines() if line}
    assert lines["max_iter"].split() == [
        "max_iter",
        "15",
        "=",
        "1.50",
        "epochs",
        "(max_epoch:",
        "1.5)",
        "s/cool.prototxt:3",
    ]
    assert " ".join(lines["base_lr"].split()) == "base_lr 0.1 for 100 (0.05 for 50) s/schedule.prototxt:13"
    assert table.index("\ndefault") < table.index("\nmomentum ") and lines["momentum"].split() == ["momentum", "0.0"]
    # One field of every stage, or of those that one block makes.
    several = explain_text(folder, "weight_decay", ())
    assert [line.split()[:2] for line in several.splitlines()[:5]] == [
        ["stage", "weight_decay"], ["trunk", "5e-4"], ["cool_low", "0.0"], ["cool_high", "0.0"], ["off", "0.0"],
    ]  # fmt: skip
    assert explain_text(folder, "solver.weight_decay", ()) == several
    members = explain_text(folder, "cool.base_lr", ()).splitlines()
    assert [line.split()[0] for line in members[:3]] == ["stage", "cool_low", "cool_high"] and not members[3]


@pytest.mark.parametrize(
    "name, message, hint",
    [
        ("trnk.base_lr", "`trnk` is neither a stage nor a field", "did you mean `trunk`?"),
        ("trunk.base_lrr", "Solver has no field `base_lrr`", "did you mean `base_lr`?"),
        ("trunk.transform_param.crop", "TransformParameter has no field `crop`", "crop_size"),
        ("trunk.base_lr.x", "`base_lr` is not a message", "leave out `.x`"),
        ("trunk.param.lr_mult", "`param` is a list of messages", "leave out `.lr_mult`"),
        ("trunk.clear", "`clear` takes a field away", "name the field"),
        ("cool", "`cool` makes 2 stages", "`cool_low` or `cool_high`"),
        ("stage", "`stage` stands in schedule.prototxt alone", "name STAGE.FIELD"),
        ("solver", "`solver` stands in schedule.prototxt alone", "name STAGE.FIELD"),
        ("data.trian", "Data has no field `trian`", "did you mean `train`?"),
        ("", "`` is neither", "the stages are"),
        ("trunk.", "Solver has no field ``", "stagerun help Solver"),
        ("trunk.from", "`trunk.from` stands in schedule.prototxt alone", "stagerun help StageEntry"),
        ("cool.sweep.name", "`cool.sweep.name` stands in schedule.prototxt alone", "stagerun help StageEntry"),
        ("ensemble.rule", "`ensemble.rule` stands in schedule.prototxt alone", "stagerun help Ensemble"),
        ("enabledd", "`enabledd` is neither a stage nor a field", "did you mean `enabled`?"),
    ],
)
def test_names_that_are_none(folder: str, name: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        explain_text(folder, name, ())
    assert message in caught.value.message and hint in caught.value.hint


WORDS = st.sampled_from(
    [
        "trunk",
        "cool",
        "off",
        "solver",
        "transform_param",
        "base_lr",
        "data",
        "train",
        "param",
        "clear",
        "from",
        "enabled",
        "sweep",
        "name",
        "ensemble",
        "rule",
        "stage",
        "",
        "é",
    ]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WORDS, max_size=4).map(".".join) | st.text(max_size=8))
def test_any_name_is_explained_or_a_mistake(folder: str, name: str) -> None:
    with contextlib.suppress(UsageError):
        assert explain_text(folder, name, ())


def test_the_command(folder: str) -> None:
    result = CliRunner().invoke(main, ["plan", folder, "--why", "trunk.weight_decay"])
    assert result.exit_code == 0 and "weight_decay: 5e-4\n                ^^^^\n" in result.stdout
    result = CliRunner().invoke(main, ["plan", folder, "--why", "trunk.nothing"])
    assert result.exit_code == 64 and result.stderr.startswith("Solver has no field `nothing`\n")


@pytest.mark.parametrize(
    "name, hint",
    [
        ("desining", "did you mean `designing`?"),
        ("baselr", "did you mean `base_lr`?"),
        ("colapse", "did you mean `collapse`?"),
        ("nothing of that", "`stagerun help` lists what there is"),
    ],
)
def test_help_of_what_is_no_field(name: str, hint: str) -> None:
    result = CliRunner().invoke(main, ["help", name])
    assert result.exit_code == 64
    assert result.stderr == f"the manual has no `{name}`\n  hint: {hint}\n"


OVERRIDES = (
    "cool.base_lr=0.3",
    "cool_low.transform_param.crop_size=20",
    "solver={ momentum: 0.5 }",
    "seed=3",
    "data.train.images=500",
)


@pytest.mark.parametrize(
    "words, said",
    [
        (["own images"], "stagerun new NAME --train LMDB --val LMDB"),
        (["own", "images"], "stagerun new NAME --train LMDB --val LMDB"),
        (["Fine-Tuning"], "freeze"),
        (["freeze"], "running statistics"),
        (["collapse"], "`stagerun help from`"),
        (["resize"], "--resize-shorter N"),
        (["unfreeze"], '`freeze: "layer1.*"`'),
        (["own", "network"], 'name: "mynet.py:build"'),
        (["class", "weights"], "`class_weight` is a factor"),
        (["class", "folders"], "`run` imports it"),
        (["caffe", "weights"], 'file: "x.caffemodel"'),
        (["run"], "`stagerun run --help`"),
        (["rehearse"], "`stagerun rehearse --help`"),
        (["WeightsParameter"], "WeightsParameter Weights from elsewhere"),
        (["Carry"], "Carry What a stage takes over from the stage it starts from"),
        (["Model"], "labels are 0 .. num_classes-1"),
    ],
)
def test_help_of_a_topic(words: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["help", *words])
    assert result.exit_code == 0 and said in " ".join(result.stdout.split())


@pytest.mark.parametrize("words", [["many-machines"], ["many", "machines"], ["Many_Machines"]])
def test_help_of_a_page(words: list[str]) -> None:
    result = CliRunner().invoke(main, ["help", *words])
    assert result.exit_code == 0 and result.stdout == (pages.FOLDER / "many-machines.md").read_text()


def test_pictures_of_a_page_are_shown_by_caption_and_path() -> None:
    text = CliRunner().invoke(main, ["help", "designing"]).stdout
    assert "![" not in text
    assert (
        f"[One trunk, three branches: `stagerun plan solvers/wsd_branches --plot branches.svg`: {pages.FOLDER}/pictures/"
        in text
    )
    assert all(Path(path).exists() for path in re.findall(r": (/[^\]]+)\]", text))


def test_a_page_is_laid_out_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the marks of Markdown; each line fits."""
    monkeypatch.setattr("stagerun.manual.command.width_of", lambda stream: 80)
    monkeypatch.setenv("COLUMNS", "80")
    for page in pages.PAGES:
        shown = CliRunner().invoke(main, ["help", page])
        assert shown.exit_code == 0 and "](" not in shown.stdout and "|---" not in shown.stdout
        assert max(map(len, shown.stdout.splitlines())) <= 80


def test_the_overview_names_pages_and_topics() -> None:
    text = CliRunner().invoke(main, ["help"]).stdout
    assert all(re.search(rf"^  {page} +{re.escape(says)}$", text, re.M) for page, says in pages.PAGES.items())
    assert not {pages.page_name(word) for word in topics.WORDS} & set(pages.PAGES)


@pytest.mark.parametrize(
    ("words", "leads_to"),
    [("early stop", "early_stop"), ("Weight-Decay", "Solver.weight_decay"), ("adam", "Solver.type"), ("balanced", "Solver.sampling"),
     ("distill", "LossParameter.type"), ("notebook", "stagerun help library"), ("mAP", "EarlyStopParameter.metric"),
     ("timm", "your-own-network"), ("batchnorm", "your-own-network"), ("nn.Module", "your-own-network"), ("top5", "stagerun eval"),
     ("own loss", "stagerun help losses"), ("dataloader", "your-own-images"), ("bf16", "Solver.precision")],
)  # fmt: skip
def test_words_of_other_frameworks_and_spellings_lead_somewhere(words: str, leads_to: str) -> None:
    assert leads_to in CliRunner().invoke(main, ["help", *words.split()]).stdout


def test_every_topic_leads_to_what_there_is_and_hides_no_field() -> None:
    messages = stagerun_pb2.DESCRIPTOR.message_types_by_name.values()
    assert not {field for message in messages for field in message.fields_by_name} & set(topics.WORDS)
    assert len(topics.WORDS) == sum(len(entry.split("\n")[0].split(", ")) for entry in topics.TOPICS.values())
    for topic in topics.TOPICS:
        text = help_text(topic)
        assert (
            text.startswith(f"{topic}\n  ")
            and text.endswith(".")
            and all(len(line) <= 120 for line in text.split("\n"))
        )
        named = re.findall(r"`stagerun ([\w -]+?)(?: --help)?`", " ".join(text[text.index("  See ") :].split()))
        assert named
        for name in named:
            if name.startswith("help "):
                assert name[5:] not in topics.WORDS and (name[5:] in pages.PAGES or help_text(name[5:]))
            else:
                assert CliRunner().invoke(main, [*name.split(), "--help"]).exit_code == 0, name


@pytest.mark.parametrize("overrides", [(), OVERRIDES], ids=["files", "--set"])
def test_what_counts_is_where_the_value_came_from(folder: str, overrides: tuple[str, ...]) -> None:
    """For every field of every stage: the layers are read in the order in which they were applied."""
    schedule = load(folder, overrides)
    for stage in schedule.stages:
        for key, origin in stage.origins.items():
            own = key.startswith("solver.")
            if key == "from_iter":
                continue
            said = history(schedule, overrides, stage.name if own else None, key)
            top = said[-1] if said else None
            if origin.span is None:
                assert top is None or top.name == "clear" or top.name != key.rpartition(".")[2], key
            else:
                assert top is not None and top.span == origin.span and top.layer == origin.layer, key


def test_values_have_the_names_of_the_language(folder: str) -> None:
    """Whatever an identity knows, `explain` and `diff` know by the same name, and what depends on it."""
    for schedule in (load(folder), load(Path(__file__).parents[2] / "solvers" / "resnet50_72ep")):
        shared = [*leaves(schedule.model, "model"), *leaves(schedule.data, "data")]
        for stage in schedule.stages:
            values = dict([*shared, *leaves(stage.solver, "solver")])
            known = {"name", "seed", "determinism", "keep_snapshots", "solver.base_lr_batch", "from_iter"}
            known |= {f"solver.{field.name}" for field in SOLVER.fields if retired(field)}
            whole = {key for key in stage.origins if any(name.startswith(f"{key}.") for name in values)}
            assert stage.origins.keys() - known - whole <= values.keys()
            policy = stage.solver.lr_policy
            told = {key for key in values if identity(key, policy) and not unsaid(key)}
            assert told & stage.origins.keys() <= stage.identity.keys()
            for key in values.keys() & stage.origins.keys():
                assert (key in told) == (key in stage.identity), key
