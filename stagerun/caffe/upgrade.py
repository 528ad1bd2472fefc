"""Older forms of a net as today's: V0 and V1 layers, inputs beside the layers, transformations among a data layer's own fields."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Problems
from stagerun.caffe.blocks import type_of
from stagerun.language.nets import entry, renamed
from stagerun.language.proto import caffe_pb2
from stagerun.language.tree import Block, Entry
from stagerun.language.view import Doubtful, View

LAYER: Descriptor = caffe_pb2.LayerParameter.DESCRIPTOR
PARAM: Descriptor = caffe_pb2.ParamSpec.DESCRIPTOR
SHAPE: Descriptor = caffe_pb2.BlobShape.DESCRIPTOR
Entries = dict[str, Entry]

# Names of V1's types that aren't the words put together.
_V1_TYPES = {"LRN": "LRN", "RELU": "ReLU", "SOFTMAX_LOSS": "SoftmaxWithLoss", "TANH": "TanH"}
# V0's types whose names are others than V1's in lower case.
_V0_TYPES = {"conv": "CONVOLUTION", "images": "IMAGE_DATA", "innerproduct": "INNER_PRODUCT", "pool": "POOLING"}
# V0's fields of a layer that have another name in the message of its type, or are in `transform_param`.
_V0_FIELDS = {
    "biasterm": "bias_term",
    "kernelsize": "kernel_size",
    "batchsize": "batch_size",
    "shuffle_images": "shuffle",
}
_V0_TRANSFORM = {"scale": "scale", "meanfile": "mean_file", "cropsize": "crop_size", "mirror": "mirror"}
_OF_V1_LAYER = ("name", "blobs", "blobs_lr", "weight_decay")
# What V1 says of each parameter, and where ParamSpec has it.
_V1_PARAMS = {"param": "name", "blob_share_mode": "share_mode", "blobs_lr": "lr_mult", "weight_decay": "decay_mult"}
_FILLERS = {"filler", "bias_filler"}


def upgraded(net: Block, problems: Problems) -> tuple[Block, ...]:
    """All layers, as LayerParameter; the Input layer first that stands for `input` beside them. None where a field that counts could not be
    read, which is a problem already."""
    old, new = list(net.blocks("layers")), list(net.blocks("layer"))
    if old and new:
        hint = "`layers` is the older form: run Caffe's upgrade"
        problems.add(net.entries["layers"].name, "the net has both `layer` and `layers`", hint)
        return ()
    try:
        layers = [_v1(layer) for layer in _without_padding(map(_v0, old), problems)]
        layers += map(_without_statistics, new)
        engine = View(net).text("engine") or ""
        layers = [_without_unread_fillers(layer, engine) for layer in layers]
        return (*_input(net, layers, problems), *layers)
    except Doubtful:
        return ()


def _message(kind: Descriptor, name: str) -> Descriptor:
    return kind.fields_by_name[name].message_type


def _with(block: Block, *changed: Entry, without: Sequence[str] = ()) -> Block:
    """The block with these entries, in their places among those that it has."""
    entries = {**block.entries, **{one.field.name: one for one in changed}}
    return replace(block, entries={name: one for name, one in entries.items() if name not in without})


def _input(net: Block, layers: Sequence[Block], problems: Problems) -> Iterator[Block]:
    """The Input layer of `input` beside the layers, with `input_shape` or four `input_dim` for each. Without any, Caffe passes over `input`."""
    if "input" not in net.entries:
        return
    names, shapes = net.entries["input"], list(net.blocks("input_shape"))
    dims, place = [int(n) for n in View(net).numbers("input_dim")], names.name
    if not shapes and len(dims) == 4 * len(names.values):
        each = (dims[i : i + 4] for i in range(0, len(dims), 4))
        shapes = [Block(SHAPE, place, {"dim": entry(SHAPE, "dim", place, *four)}) for four in each]
    if not shapes and not dims:
        tops = {top for layer in layers for top in View(layer).texts("top")}
        if {value.value for value in names.values} <= tops:
            return
    if len(shapes) != len(names.values):
        hint = "write the shapes beside it"
        problems.add(place, "`input` needs one `input_shape`, or four `input_dim`, for each", hint)
        return
    param = _message(LAYER, "input_param")
    inner = Block(param, place, {"shape": entry(param, "shape", place, *shapes)})
    said = {"name": "input", "type": "Input", "input_param": inner}
    entries = {name: entry(LAYER, name, place, value) for name, value in said.items()}
    yield Block(LAYER, place, {**entries, "top": renamed(LAYER, "top", names)})


def _without_statistics(layer: Block) -> Block:
    """BatchNorm's three blobs aren't learned, whatever `param` says of them."""
    params = list(layer.blocks("param"))
    if type_of(layer) != "BatchNorm" or len(params) != 3 or any("name" in param.entries for param in params):
        return layer
    return _with(layer, without=["param"])


def _without_unread_fillers(layer: Block, engine: str) -> Block:
    """BatchNorm's are MKL's: Caffe's own engine has no weights there, and leaves those of a Scale after it as they are. `engine`: the net's."""
    inner = layer.block("batch_norm_param")
    if inner is None or not _FILLERS & inner.entries.keys():
        return layer
    own = View(inner).text("engine") or ""
    if (own if own != "DEFAULT" else View(layer).text("engine") or engine) != "CAFFE":
        return layer
    inner = _with(inner, without=list(_FILLERS))
    return _with(layer, entry(layer.kind, "batch_norm_param", inner.place, inner))


def _v0(layer: Block) -> Block:
    """A V1 layer. One that holds a V0 layer has the fields of that among its messages, but for
    those that do nothing in a layer of its type."""
    inner = layer.block("layer")
    if inner is None:
        return layer
    kind, old = layer.kind, type_of(inner)
    word = _V0_TYPES.get(old, old.upper())
    own = "convolution_param" if old == "padding" else f"{word.lower()}_param"
    entries: Entries = {name: e for name, e in layer.entries.items() if name != "layer"}
    messages: dict[str, Entries] = {}
    for name, found in inner.entries.items():
        message = "transform_param" if name in _V0_TRANSFORM else own
        to = _V0_TRANSFORM.get(name) or _V0_FIELDS.get(name, name)
        if name in _OF_V1_LAYER:
            entries[name] = renamed(kind, name, found)
        elif name == "type":
            entries[name] = entry(kind, name, found.place, word)
        elif message in kind.fields_by_name and to in _message(kind, message).fields_by_name:
            messages.setdefault(message, {})[to] = renamed(_message(kind, message), to, found)
    for message, inside in messages.items():
        entries[message] = entry(kind, message, inner.place, Block(_message(kind, message), inner.place, inside))
    return Block(kind, layer.place, entries, layer.doubtful)


def _without_padding(layers: Iterable[Block], problems: Problems) -> Iterator[Block]:
    """V0's padding layers as the pad of the layers that take their tops."""
    pads: dict[str, tuple[Entry, Entry | None]] = {}
    for layer in layers:
        view = View(layer)
        bottoms, kind = view.texts("bottom"), type_of(layer)
        if kind == "PADDING":
            pad = view.inside("convolution_param").block.entries.get("pad")
            pads |= {top: (layer.entries["bottom"], pad) for top in view.texts("top") if bottoms}
            continue
        padded = next((b for b in bottoms if b in pads), None)
        if padded is None:
            yield layer
            continue
        if kind not in ("CONVOLUTION", "POOLING") or len(bottoms) != 1:
            problems.add(layer.place, "a padding layer is for a convolution or a pooling alone", "take it out")
            continue
        message = f"{kind.lower()}_param"
        bottom, pad = pads[padded]
        block = view.inside(message).block
        if pad is not None:
            block = _with(block, renamed(block.kind, "pad", pad))
        yield _with(layer, bottom, entry(layer.kind, message, block.place, block))


def _v1(layer: Block) -> Block:
    """Today's form of a V1 layer."""
    entries = Entries()
    for name, old in layer.entries.items():
        if name == "type":
            word = type_of(layer)
            name_today = _V1_TYPES.get(word) or "".join(part.capitalize() for part in word.split("_"))
            entries["type"] = entry(LAYER, "type", old.place, name_today)
        elif name not in _V1_PARAMS and name in LAYER.fields_by_name:
            entries[name] = renamed(LAYER, name, old)
    if params := _params(layer.entries):
        entries["param"] = entry(LAYER, "param", params[0].place, *params)
    return _transformed(Block(LAYER, layer.place, entries, layer.doubtful))


def _params(entries: Mapping[str, Entry]) -> list[Block]:
    """A ParamSpec for each blob."""
    found: list[Entries] = []
    for old, new in _V1_PARAMS.items():
        for i, value in enumerate(entries[old].values if old in entries else ()):
            found += [{} for _ in range(i + 1 - len(found))]
            if value.value != "":
                found[i][new] = Entry(PARAM.fields_by_name[new], value.span, (value,))
    first = [one.place for one in entries.values()][:1]
    places = ([*(one.place for one in inside.values()), *first][0] for inside in found)
    return [Block(PARAM, place, inside) for place, inside in zip(places, found, strict=True)]


def _transformed(layer: Block) -> Block:
    """With the transformation of a V1 data layer in `transform_param`."""
    for message in ("data_param", "image_data_param"):
        own, target = layer.block(message), _message(LAYER, "transform_param")
        moved = [name for name in _V0_TRANSFORM.values() if own is not None and name in own.entries]
        if own is None or not moved:
            continue
        inside = {name: renamed(target, name, own.entries[name]) for name in moved}
        if (old := layer.block("transform_param")) is not None:
            inside |= old.entries
        transform = Block(target, own.place, inside)
        layer = _with(
            layer,
            entry(LAYER, message, own.place, _with(own, without=moved)),
            entry(LAYER, "transform_param", own.place, transform),
        )
    return layer
