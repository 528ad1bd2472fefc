"""`stagerun diff`: two folders, and a folder and what a run was made from; and the hours that such a run has left."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stagerun import store
from stagerun.base.recipe import Schedule
from stagerun.cli import main
from stagerun.language import canonical, read
from stagerun.store.layout import MANIFEST, snapshots_folder
from stagerun.tools.diff.command import Difference, FieldDifference, compare, difference

SCHEDULE = """
name: "tree"
model { name: "resnet_small" num_classes: 10 }
data { train { source: "train" images: 1000 } val { source: "/d/val" images: 300 } }
solver {
  batch_size: 100 device_batch_size: 50 momentum: 0.9
  transform_param { crop_size: 28 random_resize_param { min_size: 32 } }
}
stage { name: "trunk" }
stage { name: "long" }
stage { name: "collapse" from: "trunk@12" }
"""
STAGES = {
    "trunk": 'base_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 20\n',
    "long": 'base_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 30\n',
    "collapse": 'base_lr: 0.1\nlr_policy: "poly"\npower: 2\nmax_iter: 10\n',
}


def schedule(shared: str = SCHEDULE, root: str = "/s", **stages: str) -> Schedule:
    texts = {"schedule.prototxt": shared.encode()}
    texts |= {f"{name}.prototxt": text.encode() for name, text in {**STAGES, **stages}.items()}
    return read(texts, root, [], root[1:])


def named(found: Difference) -> dict[str, FieldDifference]:
    return {f"{f.stage}.{f.field}": f for f in found.fields}


def test_another_way_of_writing_is_no_difference() -> None:
    other = schedule(long='# a comment\nmax_epoch: 3 lr_policy: "fixed" base_lr: 1e-1')
    assert difference(schedule(), other) == difference(schedule(), schedule())


def test_a_field_with_its_places_in_the_words_of_the_file() -> None:
    found = difference(schedule(), schedule(long='base_lr: 5e-2\nlr_policy: "fixed"\nmax_epoch: 2.5\n', root="/t"))
    assert not found.same
    fields = named(found)
    assert list(fields) == ["long.base_lr", "long.max_iter"]
    rate, length = fields["long.base_lr"], fields["long.max_iter"]
    assert (rate.a.text, rate.a.place, rate.b.text, rate.b.place) == (
        "0.1",
        "s/long.prototxt:1",
        "5e-2",
        "t/long.prototxt:1",
    )
    assert (length.a.text, length.b.text, length.b.written) == (
        "30 = 3.00 epochs",
        "25 = 2.50 epochs",
        "max_epoch: 2.5",
    )
    assert rate.trains


def test_what_changes_no_training() -> None:
    shared = (
        SCHEDULE.replace('"tree"', '"other"')
        .replace("images: 300", "images: 299")
        .replace("momentum", "snapshot: 7 momentum")
    )
    found = difference(schedule(), schedule(shared.replace('"/d/val"', '"/e/val"')))
    assert found.same and not any(f.trains for f in found.fields)
    assert {".name", ".data.val.source", ".data.val.images", "trunk.snapshot", "collapse.snapshot"} <= named(
        found
    ).keys()
    assert difference(schedule(), schedule(SCHEDULE + "seed: 2")).same is False


def test_a_message_that_one_has_not() -> None:
    found = difference(schedule(), schedule(SCHEDULE.replace("random_resize_param { min_size: 32 }", "")))
    field = named(found)["trunk.transform_param.random_resize_param"]
    assert field.a.text == "{ min_size: 32 max_size: 32 resize_param.interp_mode: LINEAR }"
    assert field.a.place == "s/schedule.prototxt:7" and (field.b.text, field.b.default) == ("none", True)
    inside = difference(schedule(), schedule(SCHEDULE.replace("min_size: 32", "min_size: 33")))
    assert "trunk.transform_param.random_resize_param.min_size" in named(inside)


def test_stages_and_what_they_start_from() -> None:
    shared = SCHEDULE.replace("trunk@12", "trunk@13").replace('"long"', '"longer" solver: "long.prototxt"')
    found = difference(schedule(), schedule(shared))
    assert (found.only_a, found.only_b) == (("stage long",), ("stage longer",)) and not found.same
    start = named(found)["collapse.from"]
    assert (start.a.text, start.b.text, start.a.place) == ("trunk@12", "trunk@13", "s/schedule.prototxt:11")
    renamed = difference(schedule(), schedule(SCHEDULE.replace('"long"', '"longer" solver: "long.prototxt"')))
    assert renamed.same, "names train nothing"
    off = difference(schedule(), schedule(SCHEDULE.replace('"long"', '"long" enabled: false')))
    assert off.same and named(off)["long.enabled"].b.text == "false"


def test_ensembles() -> None:
    def with_ensemble(rule: str) -> Schedule:
        return schedule(f'{SCHEDULE}ensemble {{ name: "all" members: ["long", "collapse"] rule: {rule} }}')

    found = difference(with_ensemble("MEAN_LOGIT"), with_ensemble("MEAN_PROBABILITY"))
    assert found.same and [f.field for f in found.fields] == ["ensemble all.rule"]
    assert difference(schedule(), with_ensemble("MEAN_LOGIT")).only_b == ("ensemble all",)


def test_members_are_in_the_order_in_which_they_are_written() -> None:
    """Wherever the blocks of their stages stand; the first says which images BatchNorm's statistics are taken from, the last where the data goes on."""

    def averaged(members: str, blocks: str) -> Schedule:
        stages = {
            n: f'stage {{ name: "{n}" from: "trunk" solver_param {{ base_lr: 0.{n} lr_policy: "fixed" max_iter: 10 }} }}'
            for n in "12"
        }
        shared = SCHEDULE + "".join(stages[n] for n in blocks)
        average = f'ensemble {{ name: "all" members: {members} rule: WEIGHT_AVERAGE }}'
        return schedule(shared + average + 'stage { name: "on" from: "all" solver: "collapse.prototxt" }')

    one, other = averaged('["2", "1"]', "12"), averaged('["2", "1"]', "21")
    assert one.ensembles[0].members == other.ensembles[0].members == ("2", "1") and one.stage("on").parent == "1"
    assert (difference(one, other).same, difference(one, other).fields) == (True, ())
    assert one.stage("on").identity == other.stage("on").identity
    (field,) = difference(one, averaged('["1", "2"]', "12")).fields[:1]
    assert (field.field, field.trains) == ("ensemble all.members", True)
    assert not difference(one, averaged('["1", "2"]', "12")).same
    along = averaged('["trunk@12", "trunk@4", "trunk@8..10/2"]', "12").ensembles[0]
    assert along.members == ("trunk@12", "trunk@4", "trunk@8", "trunk@10")


# -- the command


def written(folder: Path, shared: str = SCHEDULE, stages: Mapping[str, str] = STAGES) -> Path:
    folder.mkdir()
    (folder / "schedule.prototxt").write_text(shared)
    for name, text in stages.items():
        (folder / f"{name}.prototxt").write_text(text)
    return folder


def diff(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["diff", *map(str, arguments)])


def test_a_folder_and_an_edited_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("a"))
    shared = SCHEDULE.replace("0.9", "0.875").replace('train"', '/d/train"').replace("momentum", "display: 7 momentum")
    written(Path("b"), shared, {**STAGES, "collapse": STAGES["collapse"].replace("0.1", "0.08")})
    assert diff("a", "b").stdout == (
        "A  a (a schedule)\n"
        "B  b (a schedule)\n"
        "\n"
        "trunk, long, collapse\n"
        "  momentum  0.9 (a/schedule.prototxt:6)  ->  0.875 (b/schedule.prototxt:6)\n"
        "\n"
        "collapse\n"
        "  base_lr  0.1 (a/collapse.prototxt:1)  ->  0.08 (b/collapse.prototxt:1)\n"
        "\n"
        "what changes no training:\n"
        "\n"
        "the schedule\n"
        '  data.train.source  "train" (a/schedule.prototxt:4)  ->  "/d/train" (b/schedule.prototxt:4)\n'
        "\n"
        "trunk, long, collapse\n"
        "  display  100 = 10.00 epochs (a default)  ->  7 = 0.70 epochs (b/schedule.prototxt:6)\n"
        "\n"
        "they train different things\n"
    )
    record = json.loads(diff("a", "b", "--json").stdout)
    assert record["same"] is False
    assert [f["field"] for f in record["fields"] if f["trains"]] == ["momentum", "momentum", "base_lr", "momentum"]
    assert diff("a", "a").stdout.endswith("\n\nthey train the same thing: nothing differs\n")


def test_json_has_values_that_a_program_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("a"))
    shared = SCHEDULE.replace("trunk@12", "trunk@13").replace("random_resize_param { min_size: 32 }", "mirror: true")
    stages = {**STAGES, "long": 'base_lr: 5e-2 base_lr_batch: 50 lr_policy: "fixed" max_epoch: 2.5 average_loss: 3'}
    written(Path("b"), shared.replace("momentum: 0.9", "carry { momentum: KEEP }"), stages)
    fields = {f"{f['stage']}.{f['field']}": f for f in json.loads(diff("a", "b", "--json").stdout)["fields"]}
    values = {name: (field["a"]["value"], field["b"]["value"]) for name, field in fields.items()}
    assert (fields["long.max_iter"]["a"]["text"], values["long.max_iter"]) == ("30 = 3.00 epochs", (30, 25))
    assert values["long.momentum"] == (0.9, 0.0)
    assert values["long.transform_param.mirror"] == (False, True)
    assert values["long.carry.momentum"] == ("ZERO", "KEEP")
    assert values["long.transform_param.random_resize_param"] == (
        {"min_size": 32, "max_size": 32, "resize_param.interp_mode": "LINEAR"}, None,
    )  # fmt: skip
    assert values["collapse.from"] == ("trunk@12", "trunk@13")


def test_both_curves_in_one_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("a"))
    written(Path("b"), SCHEDULE.replace("trunk@12", "trunk@13"))
    assert diff("a", "b", "--plot", "both.svg").exit_code == 0
    assert "B collapse" in Path("both.svg").read_text()
    for words in (["--x", "epochs"], ["--plot", "both.pdf"], ["--plot", "b.svg", "--x", "hours"]):
        result = diff("a", "b", *words)
        assert result.exit_code == 64 and "Traceback" not in result.output, words


def test_what_can_not_be_compared(tmp_path: Path) -> None:
    a, empty = written(tmp_path / "a"), tmp_path / "empty"
    empty.mkdir()
    result = diff(a, empty)
    assert result.exit_code == 64 and "neither a schedule's folder" in result.stderr
    assert diff(a, tmp_path / "nowhere").exit_code == 64
    (a / "long.prototxt").write_text("base_lr: x")
    assert "long.prototxt:1:10" in diff(a, a).stderr


# -- a run


def of_run(out: Path, *trained: tuple[str, Schedule]) -> Schedule:
    """What `diff` compares of a run whose stages were trained, one after the other, by these schedules."""
    store.prepare(store.LocalDisk(), out)
    for clock, (name, of) in enumerate(trained):
        stage = of.stage(name)
        ref = store.commit(
            store.LocalDisk(),
            out,
            store.Metadata(
                place=store.Place(name, stage.solver.max_iter, 1 + clock),
                parent="",
                identity=stage.identity,
                environment={},
            ),
            files={"recipe.prototxt": canonical(of).encode()},
            content=("recipe.prototxt",),
        )
        os.utime(snapshots_folder(out) / ref.name / MANIFEST, (clock, clock))
    return compare(str(out), str(out)).a.schedule


def test_a_run_that_kept_a_changed_stage_is_what_that_was_trained_from(tmp_path: Path) -> None:
    before, now = schedule(), schedule(trunk=STAGES["trunk"].replace("0.1", "0.2"))
    trained = of_run(tmp_path, ("trunk", before), ("long", now))
    assert diff(tmp_path, tmp_path).stdout.endswith("nothing differs\n")
    assert named(difference(trained, now)).keys() == {"trunk.base_lr"}
    assert difference(trained, before).same


def test_a_run_that_kept_a_stage_of_other_images_or_another_network(tmp_path: Path) -> None:
    before = schedule()
    images = schedule(SCHEDULE.replace('"train" images: 1000', '"more" images: 2000'))
    trained = of_run(tmp_path / "images", ("trunk", before), ("long", images))
    assert named(difference(trained, images)).keys() == {"trunk.data"}
    assert not difference(trained, images).same
    network = schedule(SCHEDULE.replace("resnet_small", "resnet18"))
    trained = of_run(tmp_path / "network", ("trunk", before), ("long", network))
    assert named(difference(trained, network)).keys() == {"trunk.model"}
    assert not difference(trained, network).same
    assert difference(of_run(tmp_path / "same", ("trunk", before), ("long", before)), before).same


def test_what_early_stop_hangs_on_is_trained_from(tmp_path: Path) -> None:
    early = "test_interval: 5 early_stop { metric: TOP1 patience_iter: 10 }\n"
    for change in ("test_iter: 2\n", "test_interval: 10\n", "test_transform_param { crop_size: 32 }\n"):
        kept = early.replace("test_interval: 5 ", "") if change.startswith("test_interval") else early
        one, other = schedule(trunk=STAGES["trunk"] + early), schedule(trunk=STAGES["trunk"] + kept + change)
        found = difference(one, other)
        assert not found.same and all(field.trains for field in found.fields), change
    fewer = schedule(SCHEDULE.replace("images: 300", "images: 200"), trunk=STAGES["trunk"] + early)
    found = difference(schedule(trunk=STAGES["trunk"] + early), fewer)
    assert not found.same and named(found)[".data.val.images"].trains
    plain = difference(schedule(), schedule(trunk=STAGES["trunk"] + "test_iter: 2\n"))
    assert plain.same and not named(plain)["trunk.test_iter"].trains
