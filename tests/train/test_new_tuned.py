"""`stagerun new --model`, `--weights`: schedules of large networks, and fine-tuning. `check` finds nothing in them."""

from importlib.util import find_spec
from pathlib import Path

import made_images
import pytest
import torch
from click.testing import CliRunner
from facade import Model

from stagerun.cli import main
from stagerun.language import load
from stagerun.models import build


def new(folder: Path, *words: str) -> str:
    if not (folder / "photos").exists():
        made_images.class_folders(folder / "photos", 40)
    out, photos = folder / words[-1].replace("/", "_"), str(folder / "photos")
    done = CliRunner().invoke(main, ["new", str(out), "--train", photos, "--split-val", "20%", *words])
    assert done.exit_code == 0, done.output
    checked = CliRunner().invoke(main, ["check", str(out), "--strict"])
    assert checked.exit_code == 0 and "[lr-" not in checked.output + done.output, checked.output
    return str(out)


@pytest.mark.parametrize("name", ["resnet18", "timm/convnext_atto"])
def test_the_head_alone_then_all_at_a_tenth_of_its_rate(tmp_path, name):
    if "/" in name and find_spec("timm") is None:
        pytest.skip("without timm")
    file = tmp_path / "tuned.pth"
    torch.save(build(Model(name=name, num_classes=1000)).state_dict(), file)
    schedule = load(new(tmp_path, "--weights", str(file), "--model", name))
    head, everything, collapse = schedule.stages
    owner = "fc.*" if name == "resnet18" else "head.fc.*"
    assert head.solver.weights is not None and head.solver.weights.drop == (owner,)
    assert owner not in head.solver.freeze and not everything.solver.freeze
    assert [rule.lr_mult for rule in everything.solver.param] == [1, 1, 0.1, 0.1]
    assert everything.solver.transform.mean_value == (123.675, 116.28, 103.53)
    assert [s.solver.test_transform.crop_size for s in (head, collapse)] == [224, 224]
    assert head.solver.type == ("SGD" if name == "resnet18" else "AdamW")


def test_published_weights_name_the_network_and_a_large_network_takes_what_the_images_have(tmp_path):
    tuned = load(new(tmp_path, "--weights", "torchvision/resnet50"))
    assert (tuned.model.name, tuned.stages[0].solver.transform.crop_size) == ("resnet50", 224)
    scratch = load(new(tmp_path, "--model", "resnet18"))
    assert [s.solver.transform.crop_size for s in scratch.stages] == [40] * 5
