"""The maps of a net followed through its layers, in both phases: NetText -> `net.Net`, with every mistake at its place."""

from functools import lru_cache
from math import prod

from stagerun.base.errors import Problems, RecipeError
from stagerun.base.recipe import Model
from stagerun.caffe.blocks import PHASES, layers_in
from stagerun.caffe.net import Net
from stagerun.caffe.reading import text
from stagerun.caffe.text import NetText, read
from stagerun.caffe.walk import Image, Walk

MOST_PARAMETERS = 1_000_000_000


def resolve(net: NetText, shape: Image | None, problems: Problems) -> Net | None:
    """None where there is a mistake, or where a size is not known: with `shape` None what can be checked without it is checked.

    `shape`: (channels, height, width) of an image, over what Input and DummyData say. A phase without a data layer has
    that of the other.
    """
    kept = {phase: layers_in(net.layers, phase) for phase in PHASES}
    before = problems.count(net.path)
    one, other = (Walk(net, phase, kept, shape, problems) for phase in PHASES)
    trained, tested = one.passed(), other.passed()
    if problems.count(net.path) > before or trained is None or tested is None:
        return None
    for name, blob in one.blobs.items():
        twin = other.blobs.get(name, blob)
        if twin.shape != blob.shape:
            message = f"{name} is {text(blob.shape)} in training and {text(twin.shape)} in testing"
            problems.add(one.places[name], message, "layers of the same name have the same parameters")
    classes, others = (walk.size_of(walk.logits)[0] for walk in (one, other))
    if classes != others:
        message = f"the number of classes is {classes} in training and {others} in testing"
        problems.add(net.place, message, "both phases have the same outputs")
    sizes = {name: prod(blob.shape) for name, blob in one.blobs.items()}
    if (total := sum(sizes.values())) > MOST_PARAMETERS:
        largest = max(sizes, key=lambda name: sizes[name])
        message = f"the net has {total:,} parameters, {sizes[largest]:,} of them in {largest}"
        problems.add(one.places[largest], message, f"at most {MOST_PARAMETERS:,} are built: is a `num_output` wrong?")
    if problems.count(net.path) > before:
        return None
    return Net(
        name=net.name,
        shape=one.size_of(one.images),
        num_classes=classes,
        train=trained,
        test=tested,
        text=net.canonical(),
    )


def net_of(canonical: str, shape: Image | None) -> Net:
    """The net of a canonical form, which a snapshot holds. RecipeError if it can't be built."""
    problems = Problems()
    net = read(canonical, "net", problems)
    found = resolve(net, shape, problems) if net is not None else None
    if found is None and not problems and net is not None:
        problems.add(net.place, "the size of the images isn't known", "give it as `input_shape`")
    if found is None:
        raise RecipeError(problems.all())
    return found


@lru_cache(maxsize=16)
def of_model(model: Model) -> Net:
    """As `base.nets.of_model` says."""
    assert model.net is not None
    channels, height, width = model.input_shape
    try:
        return net_of(model.net, (channels, height, width))
    except RecipeError as error:
        raise ValueError("; ".join(problem.message for problem in error.problems[:3])) from error
