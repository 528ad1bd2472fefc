"""Net prototxts that want time or memory, and damaged ones; tests/cases/net_mistakes_*.txt show what is said of each mistake."""

import time
from pathlib import Path

import contract
import net_texts
import pytest
from facade import RecipeError
from net_texts import DATA, END

GOLDEN = Path(__file__).parents[1] / "golden" / "caffe"
MANY = 2_000  # layers; the reader takes linear time


def chain(layer: str) -> str:
    return DATA + "".join(layer.format(i=i, above=i - 1, below=i + 1) for i in range(MANY))


DOUBLING = 'layer{{name:"a{i}" type:"Concat" bottom:"y{above}" bottom:"y{above}" top:"y{i}"}}'
POOLED = 'layer { name: "p" type: "Pooling" bottom: "data" top: "p" pooling_param { global_pooling: true } }'
INPUT = 'layer { name: "i" type: "Input" top: "data" input_param { shape {'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('layer { type: "ReLU" }\n' * 1_000_000, "the file is larger than 1 MB"),
        ("layer{}" * 21_000, "the net has 21000 layers, and at most 20000 are read"),
        (chain('layer{{name:"a{i}" type:"ReLU" bottom:"y{below}" top:"y{i}"}}'), "more than 100 mistakes"),
        (chain('layer{{name:"a{i}" type:"Nothing"}}'), "more than 100 mistakes"),
        ("layer { " * 30_000, "`{` is never closed"),
        ("layers { layer { x { " + "y { " * 30_000, "`{` is never closed"),
        (DATA + 'layer { name: "c" type: "Concat" top: "c"' + 'bottom: "data" ' * 20_000 + "}", "20000 bottoms"),
        (DATA + 'layer { name: "c" type: "Split" bottom: "data"' + 'top: "c" ' * 20_000 + "}", "20000 tops"),
        (INPUT + "dim: 9 " * 20_000 + "} } }", "a shape of 20000 axes"),
        (DATA.replace("}", "transform_param { emit_constraint: 1 } }"), "write `emit_constraint { ... }`"),
        ('input: "x"\nlayer { name: "r" engine: FOO }', "`input` needs one `input_shape`"),
        (chain(DOUBLING).replace("y-1", "data"), "values for an image, more than 2147483647"),
        (DATA + POOLED + END.replace("LAST", "p").replace("10", "500000000"), "the net has 2,000,000,000 parameters"),
    ],
    ids=("million", "empty", "cyclic", "unknown", "deep", "deep_fields", "bottoms", "tops", "axes", "unread", "engine", "doubling", "outputs"),
)  # fmt: skip
def test_hostile_nets_end_soon_in_few_mistakes(text, expected, tmp_path):
    (tmp_path / "net").write_text(text)
    start = time.process_time()
    done = contract.stagerun(["plan", "--net", "net", "--size", "3x32x32"], tmp_path)
    assert done.exit_code == 64 and expected in done.output and len(done.output) < 50_000
    assert time.process_time() - start < 20


@pytest.mark.parametrize("size", [3_000, 2_000_000])
def test_weights_are_no_net(size, tmp_path):
    (tmp_path / "net.caffemodel").write_bytes(b"\x0a\x05LeNet\x00\xa2" * (size // 9))
    done = contract.stagerun(["plan", "--net", "net.caffemodel"], tmp_path)
    assert (done.exit_code, "is it a .prototxt?" in done.stderr, done.stderr.count("hint:")) == (64, True, 1)


def test_a_net_of_many_layers_is_read():
    text = chain('layer{{name:"a{i}" type:"ReLU" bottom:"data" top:"data"}}') + END.replace("LAST", "data")
    assert len(net_texts.net_from(text).train.layers) == MANY + 3


def test_a_brace_too_few_or_too_many_is_a_mistake_with_a_place():
    """LeNet with each line that has a brace, and each brace alone, left out or doubled."""
    lines = (GOLDEN / "lenet.prototxt").read_text().splitlines(keepends=True)
    found = []
    for i, line in enumerate(lines):
        places = [at for at, c in enumerate(line) if c in "{}"]
        instead = ["", line * 2] if places else []
        for at in places:
            instead += [line[:at] + line[at + 1 :], line[:at] + line[at] * 2 + line[at + 1 :]]
        found += ["".join([*lines[:i], one, *lines[i + 1 :]]) for one in instead]
    refused = 0
    for text in found:
        try:
            net_texts.net_from(text, (1, 28, 28))
        except RecipeError as error:
            assert all(problem.span.line >= 1 and problem.span.column >= 1 for problem in error.problems)
            refused += 1
    assert refused > 50
