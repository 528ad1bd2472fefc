"""What a schedule, a snapshot or a log of someone else names is neither run nor opened without consent (`language.consent`)."""

import dataclasses
import enum
import json
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import stored_help
from click.testing import CliRunner
from facade import SCHEDULE, Event, RunStarted, StageFinished, StagerunError, recipe
from google.protobuf.descriptor import Descriptor
from PIL import Image
from reliability.forging import Forged

import stagerun
from stagerun.cli import main
from stagerun.language import canonical, tree
from stagerun.language.consent import NEEDED, Consent
from stagerun.language.stored import read_foreign
from stagerun.language.values import layout
from stagerun.tools.language_server import look

pytestmark = pytest.mark.long

MODEL = 'name: "resnet_small" num_classes: 10 channels: 1'
# Texts that name neither code nor a file: names, patterns, and words of a list.
INERT = {
    "Schedule.name", "StageEntry.name", "StageEntry.from", "Sweep.name", "Sweep.from", "Ensemble.name", "Ensemble.members", "Ensemble.shape",
    "FillerParameter.type", "Source.name", "Solver.clear", "Solver.lr_policy", "Solver.type", "Solver.regularization_type",
    "Solver.freeze", "LossParameter.teacher", "ParamSpec.name", "CompressionRule.name", "OuterParameter.type",
    "WeightsParameter.drop", "Rename.from", "Rename.to",
}  # fmt: skip
# Of a recipe alone: the places that those fields mean on the machine that trained, and a net of Caffe's itself.
DERIVED = {
    "Source.path": "Source.source", "Source.labels_path": "Source.labels", "TransformParameter.mean_path": "TransformParameter.mean_file",
    "WeightsParameter.path": "WeightsParameter.file",
}  # fmt: skip
IN_RECIPE = {"Model.net", "StageEntry.average", "StageEntry.group", "StageEntry.parent_at", "Source.labels_digest", *DERIVED}  # fmt: skip

_watched: list[str] = []
_touched: list[str] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event.startswith(("open", "import", "os.", "subprocess.Popen")) and any(
        word in str(args[0]) for word in _watched
    ):
        _touched.append(f"{event} {args[0]}")


sys.addaudithook(_hook)


@dataclass
class Stranger:
    """A snapshot of someone else's in an output folder, with what nobody has asked for in `lures`."""

    out: Path
    snapshot: Path
    schedule: recipe.Schedule
    lures: Path

    def write(self, **changes: object) -> None:
        """Its recipe with other values."""
        self.recipe(replace(self.schedule, **changes))

    def recipe(self, schedule: recipe.Schedule) -> None:
        made = Forged(self.snapshot, self.lures, random.Random(1))
        made.write("recipe.prototxt", canonical(schedule).encode())
        made.finish()

    @property
    def commands(self) -> dict[str, list[object]]:
        return {
            "eval": ["eval", self.snapshot],
            "predict": ["predict", self.snapshot, self.out.parent / "p.png"],
            "export": ["export", self.snapshot, "--force", self.out.parent / "x.pth"],
            "verify": ["verify", self.out],
            "status": ["status", self.out],
            "snapshots": ["status", "--snapshots", self.out, "--verify"],
            "report": ["report", self.out],
            "view": ["view", self.out, "--save", self.out.parent / "page.html"],
            "diff": ["diff", self.out, self.out],
        }

    def tried(self, *names: str) -> dict[str, tuple[int, str, list[str]]]:
        """By command, of these or of all: its exit code, what it says, and what it touched of the lures."""
        found = {}
        for name in names or self.commands:
            words = self.commands[name]
            _touched.clear()
            done = stored_help.stagerun(*words)
            found[name] = done.exit_code, done.output, sorted(set(_touched))
        _touched.clear()
        try:
            stagerun.Snapshot(self.snapshot).model()
            found["model"] = 0, "", sorted(set(_touched))
        except StagerunError as error:
            found["model"] = int(error.exit_code), error.render(), sorted(set(_touched))
        return found


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    lures = tmp_path / "lures"
    (lures / "classes" / "a").mkdir(parents=True)
    images, labels = stored_help.pictures(6, 8, 8, 1, 10)
    for picture in (tmp_path / "p.png", lures / "classes" / "a" / "1.png"):
        Image.fromarray(images[0][:, :, 0]).save(picture)
    stored_help.make_lmdb(lures / "lmdb", images, labels)
    shutil.copytree(lures / "classes" / "a", lures / "lmdb" / "a")  # it is a folder of class folders, too
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "lure_code.py").write_text("import sys\nsys.lured = True\nbuild = print\n")
    (lures / "file").write_text("x")
    data = stored_help.make_lmdb(tmp_path / "lmdb", images, labels)
    schedule = stored_help.make_schedule(tmp_path / "dir", MODEL, "", data, 6)
    snapshot = stored_help.make_snapshot(tmp_path / "out", schedule)
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    monkeypatch.chdir(tmp_path)
    _watched[:] = [str(lures), "lure_code"]
    yield Stranger(tmp_path / "out", snapshot, schedule, lures)
    _watched.clear()


def sample(kind: Any) -> Any:
    """A value of a type of the recipe, with no more than it needs."""
    if dataclasses.is_dataclass(kind):
        needed = [m for m in layout(kind) if m.default is dataclasses.MISSING]
        return kind(**{m.attribute: (sample(m.kind),) if m.repeated else sample(m.kind) for m in needed})
    return next(iter(kind)) if issubclass(kind, enum.Enum) else "x" if kind is str else kind(1)


def variants(value: Any, lure: str) -> Iterator[tuple[str, Any]]:
    """The message with `lure` in one field of a text, its own or of a message in it; with the field's name in the language."""
    names = {"Stage": "StageEntry", "ParamRule": "ParamSpec"}
    kind = names.get(type(value).__name__, type(value).__name__)
    kind = kind if kind in SCHEDULE.file.message_types_by_name else f"{kind}Parameter"
    for member in layout(type(value)):
        held = getattr(value, member.attribute)
        if not member.stored or not (member.kind is str or member.is_message):
            continue
        first = held[0] if isinstance(held, tuple) and held else held or sample(member.kind)
        found = variants(first, lure) if member.is_message else [(f"{kind}.{member.name}", lure)]
        for field, one in found:
            yield field, replace(value, **{member.attribute: (one, *(held or ())[1:]) if member.repeated else one})


def texts_of(kind: Descriptor, seen: set[str]) -> Iterator[str]:
    seen.add(kind.name)
    for field in tree.fields(kind):
        if field.type == field.TYPE_STRING:
            yield f"{kind.name}.{field.name}"
        elif field.message_type is not None and field.message_type.name not in seen:
            yield from texts_of(field.message_type, seen)


def test_each_text_of_the_language_is_in_the_table_or_inert(stranger):
    fields = set(texts_of(SCHEDULE, set()))
    assert fields == NEEDED.keys() | INERT and not NEEDED.keys() & INERT
    stored = {field for field, _ in variants(stranger.schedule, "x")}
    assert stored - IN_RECIPE <= fields and stored >= IN_RECIPE
    not_stored = {"StageEntry.solver", "Model.caffe_net", "Solver.net", "Solver.clear", "Sweep.name", "Sweep.from"}
    assert fields - stored == not_stored, "tried below"


MAY: dict[Consent | None, set[str]] = {Consent.IMAGES: {"eval", "predict", "verify"}, Consent.TRAINING: {"verify"}}


@pytest.mark.parametrize("lure", ["lmdb", "file", "lure_code:build", "lure_code.py:build"])
def test_no_recipe_runs_or_opens_what_it_names(stranger, lure):
    named = lure if ":" in lure else str(stranger.lures / lure)
    read = set()
    for field, schedule in variants(stranger.schedule, named):
        try:
            read_foreign(canonical(schedule))
        except ValueError:
            continue
        stranger.recipe(schedule)
        # The others look at a recipe as these do.
        found, needed = stranger.tried("eval", "export", "verify", "view"), NEEDED.get(DERIVED.get(field, field))
        touched = {name for name, (_, _, touched) in found.items() if touched}
        assert touched <= MAY.get(needed, set()), (field, found)
        read |= {(field, name) for name in touched}
        if needed is Consent.CODE and field != "Model.name":  # that of the schedule, which its stages have, too
            assert found["verify"][0] == 64 and "--trust-code" in found["verify"][1], field
        if field == "Model.name" and ":" in lure:
            assert {name for name, (_, said, _) in found.items() if "--trust-code" in said} >= {"verify"}
    assert not hasattr(sys, "lured")
    assert lure != "lmdb" or ("Source.path", "eval") in read, "the lures work"
    assert lure != "file" or ("WeightsParameter.path", "verify") in read


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
@pytest.mark.parametrize("args", ["checkpoint_path", "anything"])
def test_timm_is_called_with_listed_arguments_alone(tmp_path, stranger, args):
    timm = stored_help.make_schedule(tmp_path / "timm", 'name: "timm/test_resnet" num_classes: 10 channels: 1', "")
    snapshot = stored_help.make_snapshot(tmp_path / "of_timm", timm)
    other = replace(stranger, out=snapshot.parents[1], snapshot=snapshot, schedule=timm)
    assert other.tried("export")["export"][0] == 0, "timm alone needs no consent"
    other.write(model=replace(timm.model, args=f'{{ {args}: "{stranger.lures / "file"}" }}'))
    found = other.tried()
    assert not any(touched for _, _, touched in found.values())
    for name in ("eval", "predict", "export", "verify", "model"):
        code, said, _ = found[name]
        assert code == 64 and "--trust-code" in said and args in said, (name, said)
    trusting = CliRunner().invoke(main, [str(word) for word in (*other.commands["export"], "--trust-code")])
    assert trusting.exit_code == 0 or "--trust-code" not in trusting.output
    assert args != "checkpoint_path" or f"open {stranger.lures / 'file'}" in _touched, "with consent it is opened"


def test_nets_of_caffe_in_a_recipe_open_nothing(stranger):
    file = stranger.lures / "file"
    data = f'layer {{ name: "d" type: "Data" top: "data" data_param {{ source: "{file}" }} transform_param {{ mean_file: "{file}" }} }}'
    own = 'python_param { module: "lure_code" layer: "build" }'
    python = f'layer {{ name: "p" type: "Python" bottom: "data" top: "p" {own} }}'
    filler = 'layer { name: "i" type: "InnerProduct" bottom: "data" top: "i" inner_product_param { num_output: 10 } }'
    hdf5 = f'layer {{ name: "h" type: "HDF5Data" top: "data" hdf5_data_param {{ source: "{file}" }} }}'
    for layers in (data + filler, data + python, hdf5 + filler, "garbage", str(file)):
        net = {"net": layers, "input_shape": (1, 8, 8), "moving_average_fraction": None, "eps": None}
        stranger.write(model=replace(stranger.schedule.model, name=str(file), **net))
        assert not any(touched for _, _, touched in stranger.tried().values()), layers


def test_links_in_a_snapshot_are_not_followed(stranger):
    (stranger.lures / "recipe.prototxt").write_bytes((stranger.snapshot / "recipe.prototxt").read_bytes())
    for name in ("recipe.prototxt", "model.safetensors", "MANIFEST.json"):
        kept = (stranger.snapshot / name).read_bytes()
        (stranger.snapshot / name).unlink()
        (stranger.snapshot / name).symlink_to(stranger.lures / "recipe.prototxt")
        found = stranger.tried()
        assert found["eval"][0] != 0 and found["export"][0] != 0
        assert not any("lures" in word for _, _, touched in found.values() for word in touched), name
        (stranger.snapshot / name).unlink()
        (stranger.snapshot / name).write_bytes(kept)


def test_nothing_is_written_to_the_scratch_of_a_recipe(stranger):
    """Where the images are a folder of class folders, nothing imports them."""
    val = replace(stranger.schedule.data.val[0], path=str(stranger.out.parent / "classes"))
    (stranger.lures / "classes").rename(val.path)
    data = replace(stranger.schedule.data, val=(val,), scratch=str(stranger.lures))
    stranger.write(data=data, stages=tuple(replace(stage, data=data) for stage in stranger.schedule.stages))
    before = sorted(stranger.lures.rglob("*"))
    found = stranger.tried()
    assert sorted(stranger.lures.rglob("*")) == before and not any(touched for _, _, touched in found.values())
    assert found["eval"][0] == 65 and not (stranger.out / "data").exists(), found["eval"]


def test_a_log_opens_nothing_that_it_names(stranger):
    kinds = sorted(get_args(Event), key=lambda kind: kind is not RunStarted)
    for lure in (str(stranger.lures / "file"), str(stranger.lures / "lmdb"), "../../lures/file", "lure_code:build"):
        lines = [{"time": 1.0, "event": kind.__name__, **event_with(kind, lure)} for kind in kinds]
        (stranger.out / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = stranger.out / "results" / f"{stranger.snapshot.name}.json"
        result.parent.mkdir(exist_ok=True)
        result.write_text(json.dumps(event_with(StageFinished, lure)))
        assert not any(touched for _, _, touched in stranger.tried().values()), lure


def event_with(kind: Any, lure: str) -> dict[str, Any]:
    """An event, each of whose texts is `lure`."""

    def value(hint: Any) -> Any:
        if get_origin(hint) in (Union, UnionType):
            return value(next(part for part in get_args(hint) if part is not type(None)))
        if get_origin(hint) is tuple:
            return [value(get_args(hint)[0])]
        if dataclasses.is_dataclass(hint):
            return event_with(hint, lure)
        return lure if hint is str else 1.0 if hint is float else hint is not bool if hint in (int, bool) else None

    hints = get_type_hints(kind)
    return {field.name: value(hints[field.name]) for field in dataclasses.fields(kind)}


SCHEDULES = {
    "network": ('name: "lure_code:build" num_classes: 10', ""),
    "file of a network": ('name: "lure_file.py:build" num_classes: 10', ""),
    "transform": (MODEL, 'transform_param { python: "lure_file.py:build" }'),
    "transform of a package": (MODEL, 'transform_param { python: "lure_code:build" }'),
    "loss": (MODEL, 'loss { type: PYTHON function: "lure_file.py:build" }'),
    "loss of a package": (MODEL, 'loss { type: PYTHON function: "lure_code:build" }'),
}


@pytest.mark.parametrize("model, solver", SCHEDULES.values(), ids=SCHEDULES)
def test_what_looks_at_a_schedule_runs_none_of_its_code(stranger, tmp_path, model, solver):
    """Its Python is read; a command that trains runs it. An editor looks at it at each key."""
    folder = tmp_path / "dir"
    text = stored_help.SCHEDULE.format(model=model, solver=solver, data=tmp_path / "lmdb", images=6, val="")
    (folder / "schedule.prototxt").write_text(text)
    (folder / "lure_file.py").write_text("import sys\nsys.lured = True\ndef build(*a, **b): pass\n")
    for words in (
        ["check", folder], ["plan", folder], ["status", folder], ["diff", folder, folder], ["fmt", folder, "--check"],
        ["plan", folder, "--why", "only.base_lr"], ["view", folder, "--save", tmp_path / "page.html"], ["eval", folder, "--out", stranger.out],
    ):  # fmt: skip
        stored_help.stagerun(*words)
    assert stagerun.load(folder).stages and look(str(folder), {}).schedule is not None
    assert not hasattr(sys, "lured") and not [word for word in _touched if word.startswith("import")]
