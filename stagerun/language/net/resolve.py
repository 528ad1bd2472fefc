"""The maps of a net followed through its layers, in both phases: NetText -> `base.net.Net`, with every mistake at its place."""

from collections.abc import Sequence
from math import prod

from stagerun.base import net
from stagerun.base.errors import Problems, RecipeError
from stagerun.language.net.follow import Image, Passed, follow
from stagerun.language.net.layers import IMAGES
from stagerun.language.net.phases import PHASES, TEST, TRAIN, State, layers_in
from stagerun.language.net.text import NetText, read, type_of
from stagerun.language.tree import Block

MOST_PARAMETERS = 1_000_000_000


def resolve(
    text: NetText, shape: Image | None, problems: Problems, train: State | None = None, test: State | None = None
) -> net.Net | None:
    """None where there is a mistake, or where a size is not known: with `shape` None what can be checked without it is checked.

    `shape`: (channels, height, width) of an image, over what Input and DummyData say. `train`, `test`: of the solver. A phase without
    a data layer has that of the other.
    """
    states = {TRAIN: train or State(), TEST: test or State()}
    kept = {phase: layers_in(text.layers, phase, states[phase]) for phase in PHASES}
    before = problems.count(text.path)
    found = [
        follow(text, _with_images(kept[phase], kept[other]), phase, kept[other], shape, problems)
        for phase, other in ((TRAIN, TEST), (TEST, TRAIN))
    ]
    if problems.count(text.path) > before:
        return None
    one, other_pass = found
    if one is None or other_pass is None or not _agree(text, one, other_pass, problems):
        return None
    sizes = {name: prod(blob.shape) for name, blob in one.blobs.items()}
    if sum(sizes.values()) > MOST_PARAMETERS:
        largest = max(sizes, key=lambda name: sizes[name])
        message = f"the net has {sum(sizes.values()):,} parameters, {sizes[largest]:,} of them in {largest}"
        problems.add(one.places[largest], message, f"at most {MOST_PARAMETERS:,} are built: is a `num_output` wrong?")
        return None
    canonical = text.canonical(train, test)
    return net.Net(
        name=text.name, shape=one.image, num_classes=one.classes, train=one.made, test=other_pass.made, text=canonical
    )


def net_of(canonical: str, shape: Image | None) -> net.Net:
    """The net of a canonical form, which a snapshot holds. RecipeError if it can't be built."""
    problems = Problems()
    text = read(canonical, "net", problems)
    found = resolve(text, shape, problems) if text is not None else None
    if found is None and not problems and text is not None:
        problems.add(text.place, "the size of the images isn't known", "give it as `input_shape`")
    if found is None:
        raise RecipeError(problems.all())
    return found


def _with_images(layers: Sequence[Block], other: Sequence[Block]) -> list[Block]:
    if any(type_of(layer) in IMAGES for layer in layers):
        return list(layers)
    return [*(layer for layer in other if type_of(layer) in IMAGES), *layers]


def _agree(text: NetText, one: Passed, other: Passed, problems: Problems) -> bool:
    """Whether both phases are one network: layers of the same name have the same parameters, and there are as many classes."""
    fine = True
    for name, blob in one.blobs.items():
        twin = other.blobs.get(name)
        if twin is not None and twin.shape != blob.shape:
            message = f"{name} is {_shape(blob.shape)} in training and {_shape(twin.shape)} in testing"
            problems.add(one.places[name], message, "layers of the same name have the same parameters")
            fine = False
    if one.classes != other.classes:
        message = f"the number of classes is {one.classes} in training and {other.classes} in testing"
        problems.add(text.place, message, "both phases have the same outputs")
        fine = False
    return fine


def _shape(shape: net.Shape) -> str:
    return " x ".join(map(str, shape)) or "one number"
