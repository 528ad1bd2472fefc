"""What torch or torchvision would do, done without them: the names of parameters, the items of a folder, colours on a contact sheet; and the
memory that a rehearsal may have."""

import os
from pathlib import Path

import pytest
from caffe_folders import resnet50
from test_contact_sheet import lmdb as lmdb
from test_contact_sheet import make_schedule as make_schedule
from test_contact_sheet import options as options
from test_free_memory import group as group
from test_free_memory import roots as roots
from test_free_memory import v2 as v2
from test_sources import NONE as NONE
from test_sources import items as items
from test_sources import write as write

from stagerun.base import recipe
from stagerun.language import load
from stagerun.language.caffe_names import PLAIN_LAYERS, parameter_prefix
from stagerun.language.net import net_of
from stagerun.system import host
from stagerun.system.host import Roots, whole_memory
from stagerun.tools.data.sources import open_source
from stagerun.tools.rehearse.command import room


def test_parameters_of_the_known_network_are_named_as_in_torch() -> None:
    from on_meta import on_meta

    from stagerun.models import build

    layers = [layer.name for layer in net_of(resnet50(), (3, 224, 224)).train.layers]
    named = {parameter_prefix("resnet50_intel_caffe", layer, "fc1000") for layer in layers} - {""}
    with on_meta():
        model = build(recipe.Model(name="resnet50_intel_caffe", num_classes=1000))
    assert named == {name.rpartition(".")[0] for name, _ in model.named_parameters()}


@pytest.mark.parametrize("model", sorted(PLAIN_LAYERS))
def test_parameters_of_plain_networks_are_named_as_in_torch(model: str) -> None:
    from on_meta import on_meta

    from stagerun.models import build

    with on_meta():
        net = build(recipe.Model(name=model, num_classes=10))
    named = {*PLAIN_LAYERS[model].values(), parameter_prefix(model, "fc8", "fc8")}
    assert named == {name.rpartition(".")[0] for name, _ in net.named_parameters()}


def test_the_same_items_as_torchvisions_own_code(tmp_path: Path) -> None:
    names = [f"{c}/{d}{n}.jpg" for c in ("x", "y z", "B") for d in ("", "s/", "s-/", "s/t/", "Z/") for n in (1, 10, 9)]
    root = write(tmp_path / "set", *names)
    from stagerun.models.vision import torchvision_part

    datasets = torchvision_part("torchvision.datasets")
    theirs = datasets.ImageFolder(str(root))
    assert items(open_source(str(root), NONE)) == [(os.path.relpath(p, root), label) for p, label in theirs.samples]


SOLVERS = Path(__file__).parents[2] / "solvers"


def test_what_may_be_had_in_all_is_the_least_limit(
    roots: Roots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's limit is on the job's group, below the root and above the step's: `rehearse` counts with it."""
    group(roots, "0::/slurm/job_7/step_0\n")
    machine = whole_memory(roots)
    assert machine > 1 << 28
    v2(roots.cgroup / "slurm" / "job_7" / "step_0", "max", 10)
    v2(roots.cgroup / "slurm" / "job_7", "3000000", 1000000)
    assert whole_memory(roots) == 3000000
    monkeypatch.setattr(host, "Roots", lambda: roots)
    assert room(load(str(SOLVERS / "fashion_collapse"), ()), tmp_path).memory == 3000000
    group(roots, "3:memory:/slurm\n")
    assert whole_memory(roots) == machine
    v1 = roots.cgroup / "memory" / "slurm"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text("2000000\n")
    assert whole_memory(roots) == 2000000
