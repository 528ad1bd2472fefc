"""Older forms of a net as today's: V0 and V1 layers, inputs beside the layers, transformations among a data layer's own fields."""

from collections.abc import Iterator, Mapping, Sequence

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Problems, Span
from stagerun.language.proto import caffe_pb2
from stagerun.language.tree import Block, Entry, Value, quoted
from stagerun.language.view import Doubtful, View

LAYER: Descriptor = caffe_pb2.LayerParameter.DESCRIPTOR
PARAM: Descriptor = caffe_pb2.ParamSpec.DESCRIPTOR
SHAPE: Descriptor = caffe_pb2.BlobShape.DESCRIPTOR
Entries = dict[str, Entry]

# Names of V1's types that aren't the words put together.
_V1_TYPES = {
    "ABSVAL": "AbsVal", "ARGMAX": "ArgMax", "BNLL": "BNLL", "HDF5_DATA": "HDF5Data", "HDF5_OUTPUT": "HDF5Output", "LRN": "LRN", "MVN": "MVN",
    "RELU": "ReLU", "SOFTMAX_LOSS": "SoftmaxWithLoss", "TANH": "TanH",
}  # fmt: skip
# Those of V0 whose names are others than V1's in lower case.
_V0_TYPES = {"conv": "CONVOLUTION", "images": "IMAGE_DATA", "innerproduct": "INNER_PRODUCT", "pool": "POOLING"}
# Where V0's fields of a layer belong: for each type its message, or `transform_param`.
_V0_MESSAGES = {
    "conv": "convolution_param", "innerproduct": "inner_product_param", "pool": "pooling_param", "dropout": "dropout_param", "lrn": "lrn_param",
    "data": "data_param", "images": "image_data_param", "concat": "concat_param",
}  # fmt: skip
_V0_FIELDS = {
    "biasterm": "bias_term",
    "kernelsize": "kernel_size",
    "batchsize": "batch_size",
    "shuffle_images": "shuffle",
}
_V0_TRANSFORM = {"scale": "scale", "meanfile": "mean_file", "cropsize": "crop_size", "mirror": "mirror"}
# Types of layers whose tops have shapes of their own, and where those stand.
SHAPED = {"Input": "input_param", "DummyData": "dummy_data_param"}
TRANSFORM = ("scale", "mean_file", "crop_size", "mirror")


def upgraded(net: Block, problems: Problems) -> tuple[Block, ...]:
    """All layers, as LayerParameter; the Input layer first that stands for `input` beside them. None where a field that counts could not be
    read, which is a problem already."""
    try:
        return _upgraded(net, problems)
    except Doubtful:
        return ()


def _upgraded(net: Block, problems: Problems) -> tuple[Block, ...]:
    old, new = list(net.blocks("layers")), list(net.blocks("layer"))
    if old and new:
        place = net.entries["layers"].name
        problems.add(place, "the net has both `layer` and `layers`", "`layers` is the older form: run Caffe's upgrade")
        return ()
    layers = [_v1(layer) for layer in _without_padding([_v0(layer, problems) for layer in old], problems)]
    layers += [_v2(layer) for layer in new]
    layers = [_without_unread_fillers(layer, View(net).text("engine") or "") for layer in layers]
    given = _input(net, layers, problems)
    return (given, *layers) if given is not None else tuple(layers)


def image_shapes(layer: Block) -> Iterator[tuple[int, int, int]]:
    """(channels, height, width) of the tops of an Input or DummyData layer that are images."""
    for dims in map_shapes(layer):
        if len(dims) == 3:
            yield dims[0], dims[1], dims[2]


def map_shapes(layer: Block) -> list[tuple[int, ...]]:
    """The shapes of an Input or DummyData layer, for one image; one for each top. () for labels, which have one to four axes in Caffe."""
    shapes = (dims[1:] for dims in top_shapes(layer))
    return [() if dims in ((1,), (1, 1), (1, 1, 1)) else dims for dims in shapes]


def written_sizes(layer: Block) -> Iterator[Value]:
    """The axes of those shapes, each at its place."""
    message = SHAPED.get(View(layer).text("type") or "")
    own = View(layer).inside(message).block if message is not None else layer
    blocks = [(shape, ("dim",)) for shape in own.blocks("shape")] + [(own, ("num", "channels", "height", "width"))]
    for block, names in blocks if message is not None else ():
        for name in names:
            yield from block.entries[name].values if name in block.entries else ()


def top_shapes(layer: Block) -> list[tuple[int, ...]]:
    """The shapes of an Input or DummyData layer, with Caffe's first axis; one for each top."""
    view = View(layer)
    if (message := SHAPED.get(view.text("type") or "")) is None:
        return []
    own, tops = view.inside(message), len(view.texts("top"))
    shapes = [tuple(int(n) for n in shape.numbers("dim")) for shape in own.views("shape")]
    if not shapes and message == "dummy_data_param":
        sides = [tuple(int(n) for n in own.numbers(name)) for name in ("num", "channels", "height", "width")]
        count = max(len(side) for side in sides)
        shapes = [tuple(side[min(i, len(side) - 1)] if side else 1 for side in sides) for i in range(count)]
    return shapes * tops if len(shapes) == 1 else shapes


def entry(kind: Descriptor, name: str, place: Span, *values: object) -> Entry:
    """A field that is written nowhere, of what stands at `place`."""
    texts = (_text(value) for value in values)
    return Entry(
        kind.fields_by_name[name],
        place,
        tuple(Value(v, t, place) for v, t in zip(values, texts, strict=True)),  # type: ignore[arg-type]
    )


def _text(value: object) -> str:
    if isinstance(value, str):
        return quoted(value)
    return "" if isinstance(value, Block) else str(value).lower() if isinstance(value, bool) else str(value)


def renamed(kind: Descriptor, name: str, old: Entry) -> Entry:
    """An entry under a name of another message."""
    return Entry(kind.fields_by_name[name], old.name, old.values)


def _input(net: Block, layers: Sequence[Block], problems: Problems) -> Block | None:
    """The Input layer of `input` beside the layers, with `input_shape` or four `input_dim` for each. Without any, Caffe passes over `input`."""
    if "input" not in net.entries:
        return None
    names, view = net.entries["input"], View(net)
    shapes = list(net.blocks("input_shape"))
    dims = [int(n) for n in view.numbers("input_dim")]
    if dims and not shapes and len(dims) == 4 * len(names.values):
        shapes = [
            Block(SHAPE, names.name, {"dim": entry(SHAPE, "dim", names.name, *dims[i : i + 4])})
            for i in range(0, len(dims), 4)
        ]
    if (
        not shapes
        and not dims
        and {v.value for v in names.values} <= {t for one in layers for t in View(one).texts("top")}
    ):
        return None
    if len(shapes) != len(names.values):
        problems.add(
            names.name, "`input` needs one `input_shape`, or four `input_dim`, for each", "write the shapes beside it"
        )
        return None
    param = LAYER.fields_by_name["input_param"].message_type
    inner = Block(param, names.name, {"shape": entry(param, "shape", names.name, *shapes)})
    entries = {
        "name": entry(LAYER, "name", names.name, "input"),
        "type": entry(LAYER, "type", names.name, "Input"),
        "top": renamed(LAYER, "top", names),
        "input_param": entry(LAYER, "input_param", names.name, inner),
    }
    return Block(LAYER, names.name, entries)


def _v2(layer: Block) -> Block:
    """BatchNorm's three blobs aren't learned, whatever `param` says of them."""
    params = list(layer.blocks("param"))
    if View(layer).text("type") != "BatchNorm" or len(params) != 3 or any("name" in param.entries for param in params):
        return layer
    return Block(layer.kind, layer.place, {n: e for n, e in layer.entries.items() if n != "param"}, layer.doubtful)


def _without_unread_fillers(layer: Block, engine: str) -> Block:
    """BatchNorm's are MKL's: Caffe's own engine has no weights there, and leaves those of a Scale after it as they are. `engine`: the net's."""
    inner, view = layer.block("batch_norm_param"), View(layer)
    if inner is None or not {"filler", "bias_filler"} & inner.entries.keys():
        return layer
    own = View(inner).text("engine") or ""
    if (own if own != "DEFAULT" else view.text("engine") or engine) != "CAFFE":
        return layer
    left = {name: found for name, found in inner.entries.items() if name not in ("filler", "bias_filler")}
    block = Block(inner.kind, inner.place, left, inner.doubtful)
    changed = {"batch_norm_param": entry(layer.kind, "batch_norm_param", block.place, block)}
    return Block(layer.kind, layer.place, {**layer.entries, **changed}, layer.doubtful)


def _v0(layer: Block, problems: Problems) -> Block:
    """A V1 layer. One that holds a V0 layer has the fields of that among its messages."""
    inner = layer.block("layer")
    if inner is None:
        return layer
    kind, old = layer.kind, View(inner).text("type") or ""
    entries: Entries = {name: e for name, e in layer.entries.items() if name != "layer"}
    messages: dict[str, Entries] = {}
    for name, found in inner.entries.items():
        message = "transform_param" if name in _V0_TRANSFORM else _V0_MESSAGES.get(old, "")
        to = _V0_TRANSFORM.get(name) or _V0_FIELDS.get(name, name)
        if name in ("name", "blobs", "blobs_lr", "weight_decay"):
            entries[name] = renamed(kind, name, found)
        elif name == "type":
            types = kind.fields_by_name["type"].enum_type.values_by_name
            word = _V0_TYPES.get(old, old.upper())
            if word in types or old == "padding":
                entries["type"] = entry(kind, "type", found.place, word)
            else:
                entries["type"] = entry(kind, "type", found.place, old)
        elif old == "padding" and name == "pad":
            messages.setdefault("convolution_param", {})["pad"] = renamed(
                _message(kind, "convolution_param"), "pad", found
            )
        elif message and to in _message(kind, message).fields_by_name:
            messages.setdefault(message, {})[to] = renamed(_message(kind, message), to, found)
        elif not name.startswith("det_"):  # of windows; Caffe passes over them in other layers
            problems.add(found.name, f"a layer of type `{old}` has no field `{name}`", "take it out")
    for message, inside in messages.items():
        entries[message] = entry(kind, message, inner.place, Block(_message(kind, message), inner.place, inside))
    return Block(kind, layer.place, entries, layer.doubtful)


def _message(kind: Descriptor, name: str) -> Descriptor:
    return kind.fields_by_name[name].message_type


def _without_padding(layers: list[Block], problems: Problems) -> Iterator[Block]:
    """V0's padding layers as the pad of the layers that take their tops."""
    pads: dict[str, tuple[Entry, Entry | None]] = {}
    for layer in layers:
        view = View(layer)
        bottoms, kind = view.texts("bottom"), view.text("type")
        if kind == "PADDING":
            inner = layer.block("convolution_param")
            for top in view.texts("top"):
                pads[top] = layer.entries["bottom"], inner.entries.get("pad") if inner is not None else None
            continue
        padded = next((b for b in bottoms if b in pads), None)
        if padded is None:
            yield layer
            continue
        message = {"CONVOLUTION": "convolution_param", "POOLING": "pooling_param"}.get(kind or "")
        if message is None or len(bottoms) != 1:
            problems.add(layer.place, "a padding layer is for a convolution or a pooling alone", "take it out")
            continue
        bottom, pad = pads[padded]
        old = layer.block(message)
        inside = dict(old.entries) if old is not None else {}
        target = _message(layer.kind, message)
        if pad is not None:
            inside["pad"] = renamed(target, "pad", pad)
        block = Block(target, old.place if old is not None else layer.place, inside)
        changed = {"bottom": bottom, message: entry(layer.kind, message, block.place, block)}
        yield Block(layer.kind, layer.place, {**layer.entries, **changed}, layer.doubtful)


def _v1(layer: Block) -> Block:
    """Today's form of a V1 layer."""
    view, entries = View(layer), Entries()
    for name, old in layer.entries.items():
        if name == "type":
            entries["type"] = entry(LAYER, "type", old.place, _type(view.text("type") or ""))
        elif name not in ("param", "blob_share_mode", "blobs_lr", "weight_decay") and name in LAYER.fields_by_name:
            entries[name] = renamed(LAYER, name, old)
    params = _params(layer.entries)
    if params:
        entries["param"] = entry(LAYER, "param", params[0].place, *params)
    return Block(LAYER, layer.place, _transformed(entries), layer.doubtful)


def _type(word: str) -> str:
    return _V1_TYPES.get(word) or "".join(part.capitalize() for part in word.split("_"))


def _params(entries: Mapping[str, Entry]) -> list[Block]:
    """A ParamSpec for each blob."""
    names = {"param": "name", "blob_share_mode": "share_mode", "blobs_lr": "lr_mult", "weight_decay": "decay_mult"}
    found: list[Entries] = []
    for old, new in names.items():
        for i, value in enumerate(entries[old].values if old in entries else ()):
            while len(found) <= i:
                found.append({})
            if value.value != "":
                found[i][new] = Entry(PARAM.fields_by_name[new], value.span, (value,))
    places = [next((e.place for e in inside.values()), next(iter(entries.values())).place) for inside in found]
    return [Block(PARAM, place, inside) for place, inside in zip(places, found, strict=True)]


def _transformed(entries: Entries) -> Entries:
    """With the transformation of a V1 data layer in `transform_param`."""
    for message in ("data_param", "image_data_param"):
        own = entries[message].values[0].value if message in entries else None
        moved = [name for name in TRANSFORM if isinstance(own, Block) and name in own.entries]
        if not isinstance(own, Block) or not moved:
            continue
        target = _message(LAYER, "transform_param")
        old = entries["transform_param"].values[0].value if "transform_param" in entries else None
        inside = {name: renamed(target, name, own.entries[name]) for name in moved}
        inside |= dict(old.entries) if isinstance(old, Block) else {}
        left = Block(own.kind, own.place, {n: e for n, e in own.entries.items() if n not in moved})
        entries = entries | {
            message: entry(LAYER, message, own.place, left),
            "transform_param": entry(LAYER, "transform_param", own.place, Block(target, own.place, inside)),
        }
    return entries
