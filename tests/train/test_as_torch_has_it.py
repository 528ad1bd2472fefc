"""What torch or torchvision would do, done without them: the names of parameters and the items of a folder; and the memory that a rehearsal may have."""

import os

import net_texts
import pytest
from facade import Model, net_of, open_source, torchvision_part
from on_meta import on_meta
from test_host import group as group
from test_host import roots as roots
from test_host import v2 as v2
from test_sources import NONE as NONE
from test_sources import items as items
from test_sources import write as write

from stagerun.language.caffe_names import PLAIN_LAYERS, parameter_prefix
from stagerun.models import build
from stagerun.system.host import whole_memory


@pytest.mark.parametrize("model", ["resnet50_intel_caffe", *sorted(PLAIN_LAYERS)])
def test_parameters_of_known_networks_are_named_as_in_torch(model):
    if model in PLAIN_LAYERS:
        named = {*PLAIN_LAYERS[model].values(), parameter_prefix(model, "fc8", "fc8")}
    else:
        layers = net_of(net_texts.resnet50(intel=True), (3, 224, 224)).train.layers
        named = {parameter_prefix(model, layer.name, "fc1000") for layer in layers} - {""}
    with on_meta():
        network = build(Model(name=model, num_classes=10))
    assert named == {name.rpartition(".")[0] for name, _ in network.named_parameters()}


def test_the_same_items_as_torchvisions_own_code(tmp_path):
    names = [f"{c}/{d}{n}.jpg" for c in ("x", "y z", "B") for d in ("", "s/", "s-/", "s/t/", "Z/") for n in (1, 10, 9)]
    root = write(tmp_path / "set", *names)
    theirs = torchvision_part("torchvision.datasets").ImageFolder(str(root))
    assert items(open_source(str(root), NONE)) == [(os.path.relpath(p, root), label) for p, label in theirs.samples]


def test_what_may_be_had_in_all_is_the_least_limit(roots):
    """Slurm's limit is on the job's group, below the root and above the step's."""
    group(roots, "0::/slurm/job_7/step_0\n")
    machine = whole_memory(roots)
    assert machine > 1 << 28
    v2(roots, "slurm/job_7/step_0", "max", 10)
    v2(roots, "slurm/job_7", "3000000", 1000000)
    assert whole_memory(roots) == 3000000
    group(roots, "3:memory:/slurm\n")
    assert whole_memory(roots) == machine
    v1 = roots.cgroup / "memory" / "slurm"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text("2000000\n")
    assert whole_memory(roots) == 2000000
