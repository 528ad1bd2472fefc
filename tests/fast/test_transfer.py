"""The table of a stage's weights: every tensor has one row, every mistake of a pattern is found."""

import fnmatch

import pytest
from drawn import examples
from facade import Origin, Weights, recipe, transfer
from hypothesis import given
from hypothesis import strategies as st

COUNTER = "num_batches_tracked"
NAMES = st.sampled_from(
    ["conv.weight", "conv.bias", "bn.weight", "bn.running_mean", f"bn.{COUNTER}", "fc.weight", "fc.bias", "x"]
)
SHAPES = st.dictionaries(NAMES, st.sampled_from([(), (2,), (2, 3), (5, 3)]), min_size=1)
PATTERNS = st.lists(st.sampled_from(["fc.*", "conv.*", "*", "x", "nothing"]), max_size=2).map(tuple)
RENAMES = st.lists(
    st.sampled_from(
        [
            recipe.Rename(from_="module.*", to="*"),
            recipe.Rename(from_="x", to="fc.bias"),
            recipe.Rename(from_="*.w", to="*.weight"),
        ]
    ),
    max_size=2,
    unique=True,
).map(tuple)
NETWORK = {"conv.weight": (2, 3), f"bn.{COUNTER}": (), "fc.weight": (10, 3), "fc.bias": (10,)}


def fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def weights(drop: tuple[str, ...] = (), rename: tuple[recipe.Rename, ...] = (), strict: bool = True) -> Weights:
    return Weights(file="w.pt", path="/w.pt", drop=drop, rename=rename, strict=strict)


@examples(300)
@given(SHAPES, st.none() | SHAPES, st.dictionaries(st.builds("{}{}".format, st.sampled_from(["", "module."]), NAMES),
       st.sampled_from([(), (2,), (2, 3)])), PATTERNS, RENAMES, st.booleans())  # fmt: skip
def test_every_tensor_is_in_exactly_one_row(network, parent, file, drop, rename, strict):
    made, mistakes = transfer(network, parent, file, weights(drop, rename, strict))
    assert [row.name for row in made.rows] == list(network)
    for row in made.rows:
        assert row.shape == network[row.name]
        if row.origin is Origin.FILE:
            assert file[row.was] == row.shape and not fits(row.name, drop)
        elif row.origin is Origin.PARENT:
            assert parent is not None and parent[row.name] == row.shape
        else:
            assert parent is None or parent.get(row.name) != row.shape
    used = {row.was for row in made.of(Origin.FILE)}
    twice = any(m.field == "rename" and "both become" in m.message for m in mistakes)
    assert used.isdisjoint(one.name for one in made.left)
    assert twice or used | {one.name for one in made.left} == set(file)
    if not mistakes and strict:
        assert all(
            r.origin in (Origin.FILE, Origin.PARENT) or fits(r.name, drop) or COUNTER in r.name for r in made.rows
        )
        if not rename:
            assert all(fits(one.name, drop) for one in made.left)


def test_without_a_file_what_fits_is_kept():
    made, mistakes = transfer(NETWORK, {**NETWORK, "fc.weight": (5, 3), "old": (1,)})
    assert not mistakes and made.behind == ("old",)
    assert [row.name for row in made.of(Origin.MISFIT)] == ["fc.weight"]
    assert made.of(Origin.MISFIT)[0].why == "5 x 3 in the network before"
    assert len(transfer(NETWORK)[0].of(Origin.ANEW)) == len(NETWORK)


FILE = {"conv.weight": (2, 3), "fc.weight": (10, 3), "fc.bias": (10,)}
OTHER_HEAD = {"conv.weight": (2, 3), "fc.weight": (1000, 3), "fc.bias": (1000,)}
WRAPPED = {f"module.{name}": shape for name, shape in FILE.items()}


@pytest.mark.parametrize(
    ("file", "given", "message", "hint"),
    [
        (OTHER_HEAD, weights(), "2 tensors of w.pt have another shape: `fc.weight` 1000 x 3 in the file, 10 x 3 in the network, `fc.bias` 1000 in the file, 10 in the network",
         'write `drop: "fc.*"` to leave them out'),
        (OTHER_HEAD, weights(strict=False), "2 tensors of w.pt have another shape", 'write `drop: "fc.*"` to leave them out'),
        ({**FILE, "head.weight": (1,)}, weights(), "1 tensor of w.pt is not in the network: `head.weight`", 'write `drop: "head.*"` to leave it out'),
        ({"conv.weight": (2, 3)}, weights(), "w.pt lacks 2 tensors of the network: `fc.weight`, `fc.bias`", 'write `drop: "fc.*"` to draw them from the seed'),
        (FILE, weights(drop=("fx.*",)), '`drop: "fx.*"` fits no tensor of the network or of w.pt', "did you mean"),
        (FILE, weights(rename=(recipe.Rename(from_="modul.*", to="*"),)), '`from: "modul.*"` fits no tensor of w.pt', "named like `conv.weight`"),
        (WRAPPED, weights(), "w.pt has no tensor of the network", 'write `rename { from: "module.*" to: "*" }`'),
        (WRAPPED, weights(strict=False), "w.pt has no tensor of the network", 'write `rename { from: "module.*" to: "*" }`'),
        ({"encoder.w": (3,)}, weights(), "w.pt has no tensor of the network", "its tensors are named like `encoder.w`, and the network's like `conv.weight`"),
        ({"a.fc.bias": (10,), **FILE}, weights(rename=(recipe.Rename(from_="a.*", to="*"),)), "`a.fc.bias` and `fc.bias` of w.pt both become `fc.bias`", ""),
    ],
)  # fmt: skip
def test_mistakes(file, given, message, hint):
    _, mistakes = transfer(NETWORK, None, file, given)
    found = next(m for m in mistakes if message in m.message)
    assert hint in found.hint or hint == "did you mean"
