"""Networks from a file: BatchNorm of another class, what makes a stage stale, trust, and mistakes."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import contract
import pytest
import tiny
import torch
from click.testing import CliRunner
from facade import WEIGHTS, BatchStatistics, Model, Note, RecipeError, Sources, UsageError, decode, open_snapshot
from test_run_trees import go
from torch import nn

from stagerun import manual
from stagerun.cli import main
from stagerun.language import load
from stagerun.models import build

GOLDEN = Path(__file__).parents[1] / "golden" / "own_network.txt"
ALONE = ("--nproc", 1, "--threads", 1)
SHORT = """
name: "own"
model {{ name: "mynet.py:build" num_classes: 10 channels: 1 {args} }}
data {{
  train {{ source: "{data}/train_lmdb" images: 600 }}
  val {{ source: "{data}/val_lmdb" images: 100 }}
}}
solver {{
  batch_size: 16 device_batch_size: 4 base_lr: 0.05 lr_policy: "fixed" max_iter: 3 momentum: 0.9 weight_decay: 5e-4 snapshot: 1
  transform_param {{ pad: 2 mirror: true crop_size: 28 mean_value: 73 scale: 0.0111 }}
}}
stage {{ name: "main" solver_param {{ }} }}
stage {{ name: "end" solver_param {{ base_lr: 0.01 }} }}
"""
NET = """import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.fc(self.conv(x).mean((2, 3)))

def build(num_classes):
    return Net(num_classes)
"""
IMPORTS = "from net import build\n"


def make(folder: Path, data: Path, network: str, args: str = "", **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedule.prototxt").write_text(SHORT.format(data=data, args=args))
    (folder / "mynet.py").write_text(network)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def weights(out: Path) -> dict[str, torch.Tensor]:
    newest = max((out / "snapshots").iterdir(), key=lambda path: path.name.rpartition("-a")[2])
    return decode((newest / WEIGHTS).read_bytes())


def built(text: str, args: str | None = None, **settings: object) -> nn.Module:
    torch.manual_seed(3)
    model = Model(name="mynet.py:build", num_classes=10, channels=1, moving_average_fraction=None, eps=None, args=args,
                  sources=Sources("dir", (("mynet.py", text),)))  # fmt: skip
    return build(model)


VARIANT = """
import torch.nn.functional as F
from torch import nn

class Act(nn.BatchNorm2d):
    def forward(self, x):
        return F.relu(super().forward(x))

def build(num_classes, norm="Act"):
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), Act(4) if norm == "Act" else nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()))
    return nn.Sequential(layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
"""


ASSIGNS = """
    def forward(self, x):
        if not self.training:
            return F.relu(super().forward(x))
        mean, var, m = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=True), self.momentum
        self.running_mean = (1 - m) * self.running_mean + m * mean.detach()
        self.running_var = (1 - m) * self.running_var + m * var.detach()
        self.num_batches_tracked = self.num_batches_tracked + 1
        return F.relu(F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps))

def build("""


@pytest.mark.parametrize("own", [VARIANT, VARIANT.replace("\ndef build(", ASSIGNS)], ids=["in place", "assigned"])
def test_a_batch_norm_of_another_class_leaves_the_same_statistics(own):
    nets = [built(own), built(VARIANT, '{ norm: "plain" }')]
    found = []
    for net in nets:
        statistics = BatchStatistics(net)
        net.train()
        for n in range(2):
            torch.manual_seed(n)
            net(torch.randn(4, 1, 8, 8))
            statistics.move(statistics.batch.double(), 1)
        net.eval()
        torch.manual_seed(9)
        found.append((statistics.running.clone(), net(torch.randn(2, 1, 8, 8))))
    assert found[0][0].abs().min() > 0
    assert all(torch.allclose(a, b, rtol=1e-6 * (own != VARIANT), atol=0) for a, b in zip(*found, strict=True))
    assert int(dict(nets[0].named_buffers())["0.1.num_batches_tracked"]) == 2


def test_each_batch_norm_moves_by_its_own_momentum_unless_the_schedule_says_another():
    text = VARIANT.replace("nn.Conv2d(1, 4, 3)", "nn.BatchNorm2d(1, momentum=0.5, eps=0.1), nn.Conv2d(1, 4, 3)")
    net = built(text.replace("Act(4)", "Act(4, momentum=None)"))
    first, second = BatchStatistics(net).layers
    assert (first.moving_average_fraction, first.eps, second.moving_average_fraction) == (0.5, 0.1, 1.0)


def test_a_layer_that_the_network_holds_in_evaluation_keeps_its_statistics():
    net = built(
        VARIANT.replace(
            "super().forward(x))",
            "super().forward(x))\n    def train(self, mode=True):\n        return super().train(False)",
        )
    )
    assert not BatchStatistics(net).layers
    net.train()
    net(torch.randn(4, 1, 8, 8))
    kept = dict(net.named_buffers())
    assert kept["0.1.running_mean"].tolist() == [0.0] * 4 and kept["0.1.running_var"].tolist() == [1.0] * 4


def test_an_edit_of_its_files_makes_a_stage_stale(data, tmp_path):
    folder = make(tmp_path / "own", data, IMPORTS, net=NET)
    changes = ["main.max_iter=1", "end.max_iter=1"]
    go(folder, tmp_path / "out", *changes)
    for name, text, named in (
        ("unused.py", "x = 1\n", ""),
        ("net.py", NET + "\nx = 1\n", "code.net.py sha256:"),
        ("mynet.py", IMPORTS + "# a comment\n", "code.mynet.py sha256:"),
    ):
        (folder / name).write_text(text)
        sets = [word for change in changes for word in ("--set", change)]
        said = contract.stagerun(["plan", folder, "--out", tmp_path / "out", *sets], tmp_path).output
        assert ("stale" in said) == bool(named) and named in said


def test_a_snapshot_runs_its_python_only_where_it_is_trusted(data, tmp_path):
    folder = make(tmp_path / "own", data, IMPORTS, net=NET)
    changes = ["main.max_iter=1", "end.max_iter=1"]
    go(folder, tmp_path / "out", *changes)
    snapshot = str(tmp_path / "out" / "snapshots" / "end-00000001-a0001")
    named = ["eval", str(folder), "--out", str(tmp_path / "out"), *(word for c in changes for word in ("--set", c))]
    done = CliRunner().invoke(main, named)  # of the schedule's own files, which the user names
    assert done.exit_code == 0 and "end-00000001-a0001: top-1" in done.output, done.output
    for name, text in (("net.py", NET + "# a comment\n"), ("spare.py", "from mynet import build\n")):
        (folder / name).write_text(text)
        spare = ['model.name="spare.py:build"'] if name == "spare.py" else []
        other = load(str(folder), [*changes, *spare])
        with pytest.raises(UsageError, match=f"trained with other code than the schedule names now: .*{name}"):
            open_snapshot(Path(snapshot), schedule=other, stage="end")
    shutil.rmtree(folder)  # the snapshot has a copy
    refused = CliRunner().invoke(main, ["eval", str(tmp_path / "out")])
    assert refused.exit_code == 64 and "--trust-code" in refused.output, refused.output
    for words in (["eval", snapshot], ["export", snapshot, str(tmp_path / "x.pth")]):
        refused = CliRunner().invoke(main, words)
        assert refused.exit_code == 64 and "--trust-code" in refused.output, refused.output
        done = CliRunner().invoke(main, [*words, "--trust-code"])
        assert done.exit_code == 0, done.output


def test_a_network_of_timm():
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    model = Model(name="timm/test_resnet", num_classes=7, channels=1, args="{ drop_rate: 0.5 }")
    net = build(model).eval()
    assert net(torch.zeros(2, 1, 64, 64)).shape == (2, 7) and net.drop_rate == 0.5
    with pytest.raises(UsageError, match="has no network `test_resnt`") as refused:
        build(Model(name="timm/test_resnt", num_classes=7))
    assert refused.value.hint == "did you mean `test_resnet`?"
    with pytest.raises(UsageError, match="timm can't make `test_resnet`: TypeError"):
        build(Model(name="timm/test_resnet", num_classes=7, args="{ window_size: 1 }"))


def test_what_a_network_freezes_stays_and_is_said(data, tmp_path):
    frozen = "    net = Net(num_classes)\n    net.conv.weight.requires_grad_(False)\n    net.spare = nn.Linear(2, 2)\n    return net\n"
    folder = make(tmp_path / "own", data, with_(RETURN, frozen))
    events = go(folder, tmp_path / "out")
    notes = [e.text for e in events if isinstance(e, Note)]
    assert "`mynet.py:build` freezes `conv.weight` itself: they stay as they are" in notes
    unused = (
        "the loss of `mynet.py:build` doesn't depend on `spare.weight` and `spare.bias`: weight decay alone moves them"
    )
    assert unused in notes
    torch.manual_seed(load(folder).stages[0].solver.random_seed)
    fresh = build(load(folder).model)
    assert torch.equal(weights(tmp_path / "out")["conv.weight"], fresh.state_dict()["conv.weight"])


@pytest.mark.parametrize(("mean", "kept"), [(5.0, True), (0.0, False)])
def test_statistics_of_training_beside_a_counter_of_zero_are_kept(data, tmp_path, mean, kept):
    """Weights that were converted from TensorFlow have such counters. The first iteration counts whole for a fresh layer alone."""
    folder = make(tmp_path / "own", data, VARIANT)
    held = built(VARIANT).state_dict()
    held["0.1.running_mean"].fill_(mean)
    torch.save(held, folder / "converted.pt")
    schedule = folder / "schedule.prototxt"
    schedule.write_text(
        schedule.read_text().replace(
            '"main" solver_param { }', '"main" solver_param { weights { file: "converted.pt" } }'
        )
    )
    go(folder, tmp_path / "out", "main.max_iter=1", "end.max_iter=1")
    found = weights(tmp_path / "out")
    assert bool((found["0.1.running_mean"] > 3).all()) == kept
    assert (int(found["0.1.num_batches_tracked"]) > 1000) == kept


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('freeze: "fc.*" param { kind: WEIGHT lr_mult: 0 } param { kind: BIAS lr_mult: 0 }', "nothing to train"),
        ("param { lr_mult: 0 }", "there is nothing to train"),
    ],
)
def test_a_stage_without_anything_to_train_is_refused_before_another_is_trained(data, tmp_path, settings, message):
    folder = make(tmp_path / "own", data, IMPORTS, net=NET)
    schedule = folder / "schedule.prototxt"
    schedule.write_text(schedule.read_text().replace("base_lr: 0.01 }", f"base_lr: 0.01 {settings} }}"))
    with pytest.raises(RecipeError) as refused:
        go(folder, tmp_path / "out")
    assert message in refused.value.render() and "schedule.prototxt:1" in refused.value.render()
    assert not list((tmp_path / "out" / "snapshots").iterdir())


def test_the_manuals_example_trains(data, tmp_path):
    page = (Path(manual.__file__).parent / "your-own-network.md").read_text()
    example = page[page.index("<!-- example: mynet.py -->") :].split("```python\n")[1].split("```")[0]
    folder = make(tmp_path / "own", data, example, "args { width: 8 dropout: 0.1 }")
    go(folder, tmp_path / "out", "main.max_iter=1", "end.max_iter=1")
    assert weights(tmp_path / "out")["0.weight"].shape == (8, 1, 3, 3)


def test_a_process_that_a_file_forks_does_not_train_beside_the_worker(capfd):
    built("import os\nchild = os.fork()\nif child:\n    os.waitpid(child, 0)\n" + NET)
    assert capfd.readouterr().err == "dir/mynet.py: a process that it forked ends here\n"


RETURN = "    return Net(num_classes)\n"
FORWARD = "        return self.fc(self.conv(x).mean((2, 3)))\n"
INIT = "        self.conv = nn.Conv2d(1, 4, 3)\n"


def with_(old: str, new: str) -> str:
    assert old in NET
    return NET.replace(old, new)


MISTAKES = {
    "no such file": None,
    "no such function": with_("def build(", "def make("),
    "a syntax error": with_("return self.fc", "retrun self.fc"),
    "an import that isn't there": "import no_such_package\n" + NET,
    "an error at import": NET + "WIDTHS = [1, 2][3]\n",
    "returns nothing": with_(RETURN, "    Net(num_classes)\n"),
    "returns the class": with_(RETURN, "    return Net\n"),
    "returns its layers": with_(RETURN, "    return [Net(num_classes)]\n"),
    "takes other arguments": with_("def build(num_classes)", "def build(num_classes, width)"),
    "wrong classes": with_(RETURN, "    return Net(1000)\n"),
    "a map and no logits": with_(FORWARD, "        return self.conv(x)\n"),
    "answers with a pair": with_(FORWARD, "        x = self.conv(x)\n        return self.fc(x.mean((2, 3))), x\n"),
    "forgets to return": with_(FORWARD, "        self.fc(self.conv(x).mean((2, 3)))\n"),
    "shapes that don't fit": with_("nn.Linear(4,", "nn.Linear(5,"),
    "GPU-only code": with_(FORWARD, "        return self.fc(self.conv(x).mean((2, 3)).cuda())\n"),
    "a lazy layer": with_("nn.Linear(4, num_classes)", "nn.LazyLinear(num_classes)"),
    "layers in a list": with_(INIT + "        self.fc = nn.Linear(4, num_classes)\n", "        self.layers = [nn.Conv2d(1, 4, 3)]\n"),
    "numpy's random numbers": with_(INIT, "        import numpy\n        self.conv = nn.Conv2d(1, 4, 3)\n        self.conv.weight.data *= float(numpy.random.rand())\n"),
    "random numbers now and then": with_(FORWARD, "        import random\n        if random.random() < 1e-9:\n            x = x.flip(3)\n" + FORWARD),
    "draws when it is made": with_(RETURN, "    import random\n    if random.random() < 1e-9:\n        num_classes = 3\n" + RETURN),
    "changes its images": with_(FORWARD, "        x -= 0.5\n" + FORWARD),
    "takes colours": with_("nn.Conv2d(1,", "nn.Conv2d(3,"),
    "changes the folder": with_(RETURN, '    import os\n    os.chdir("/")\n' + RETURN),
    "opens a file": with_(RETURN, '    width = int(open("width.txt").read())\n' + RETURN),
    "reads the clock": with_(FORWARD, "        import time\n        return self.fc(self.conv(x).mean((2, 3))) * (time.perf_counter() % 1)\n"),
    "counts its calls": with_(INIT, INIT + '        self.register_buffer("steps", torch.zeros(()))\n').replace("    def forward(self, x):\n", "    def forward(self, x):\n        self.steps += 1\n"),
    "in-place trouble": with_(FORWARD, "        x = self.conv(x).exp()\n        x += 1\n        return self.fc(x.mean((2, 3)))\n"),
    "detached": with_(FORWARD, "        with torch.no_grad():\n            return self.fc(self.conv(x).mean((2, 3)))\n"),
    "complex numbers": with_(INIT, INIT + "        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))\n"),
    "ends Python": NET + "build(3)\nraise SystemExit(1)\n",
    "the device meta": with_(RETURN, "    return nn.Sequential(Net(num_classes), nn.Linear(num_classes, num_classes, device='meta'))\n"),
}  # fmt: skip
LANGUAGE = {
    "num_classes in args": "args { num_classes: 10 }",
    "no such argument": "args { depth: 3 }",
    "fillers": 'fc_weight_filler { type: "msra" } zero_gamma: ALL',
}


def messages(data: Path, folder: Path) -> str:
    """What `run` says of each mistake."""
    blocks = []
    for name in [*MISTAKES, *LANGUAGE]:
        text = MISTAKES.get(name, NET)
        make(folder / "dir", data, text or "", LANGUAGE.get(name, ""))
        if text is None:
            (folder / "dir" / "mynet.py").unlink()
        words = ["run", "dir", "--out", str(folder / "out"), *map(str, ALONE)]
        done = CliRunner().invoke(main, words)
        lines = done.output.splitlines()
        at = next((i for i, line in enumerate(lines) if line.startswith(("dir/", "mynet.py"))), 0)
        blocks.append("\n".join([f"== {name}: exit {done.exit_code}", *lines[at:]]))
        shutil.rmtree(folder / "out", ignore_errors=True)
    return "\n\n".join(blocks) + "\n"


@pytest.mark.long
def test_a_newcomers_mistakes_have_one_clear_message_each(data, tmp_path, monkeypatch):
    """`python tests/train/test_own_network.py` writes what is said now."""
    monkeypatch.chdir(tmp_path)
    said = messages(data, tmp_path)
    assert "Traceback" not in said and "bug of stagerun" not in said
    assert said == GOLDEN.read_text()


if __name__ == "__main__":
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        tiny.make_data(Path(made) / "data")
        os.chdir(made)
        GOLDEN.write_text(messages(Path(made) / "data", Path(made)))
