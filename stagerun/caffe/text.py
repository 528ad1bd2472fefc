"""Reads a net's text: parsed, upgraded, with every position kept; and its canonical form."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Problems, Span, nearest
from stagerun.caffe import layers, map_layers
from stagerun.caffe.reading import IMAGES, PHASES, SHAPED, Settings, layers_in, top_shapes, type_of
from stagerun.language import tree
from stagerun.language.lexer import MOST_MISTAKES, Token, shown
from stagerun.language.nets import entry, renamed, with_block
from stagerun.language.parse import Reader, parse
from stagerun.language.proto import caffe_pb2
from stagerun.language.tree import Block, Doubtful, Entry, View

NET: Descriptor = caffe_pb2.NetParameter.DESCRIPTOR
UNREAD: Descriptor = caffe_pb2.Unread.DESCRIPTOR
KEPT = ("NetParameter", "LayerParameter", "V1LayerParameter")
MOST_LAYERS = 20_000
_CLASSES = (one for module in (layers, map_layers) for one in vars(module).values() if isinstance(one, type))
# The types of layers by Caffe's words.
LAYERS = {word: one for one in _CLASSES if issubclass(one, Settings) for word in one.types}
TOO_MANY = f"more than {MOST_MISTAKES} mistakes; the rest is not read"


Strays = dict[tuple[Descriptor, str], Span]


class NetGrammar(Reader):
    """The grammar. Keeps unknown fields for later, each once: for an unknown layer only its type is a mistake."""

    def __init__(self, strays: Strays, path: str, tokens: list[Token], problems: Problems) -> None:
        super().__init__(path, tokens, problems)
        self.strays = strays

    def unknown(self, kind: Descriptor, name: Token, doubtful: set[str]) -> None:
        if kind.name in KEPT:
            self.strays.setdefault((kind, name.text), self.span(name))
        elif kind is not UNREAD:
            hint = nearest(name.text, kind.fields_by_name) or f"no version of Caffe's {kind.name} has it"
            self.fail(name, f"{kind.name} has no field `{shown(name.text)}`", hint)
        self.pass_over()


class NetText(NamedTuple):
    """A net as read. `file`: the NetParameter as written. `layers`: upgraded LayerParameter blocks of both phases."""

    path: str
    file: Block
    layers: tuple[Block, ...]

    @property
    def name(self) -> str:
        return View(self.file).text("name") or ""

    @property
    def place(self) -> Span:
        return self.file.place

    def readers(self, *phases: str) -> list[Block]:
        """Return the data layers of the phases (`TRAIN`, `TEST`), with their transforms in `transform_param`."""
        blocks = (block for phase in phases for block in layers_in(self.layers, phase))
        return [block for block in blocks if type_of(block) in IMAGES]

    def canonical(self) -> str:
        """Return one line per layer. Leaves out defaults, comments, the net's name, the sources of data layers, and engines. `include`
        only names the phase, for a layer that is in one."""
        lines = []
        for block in self.layers:
            phases = [phase for phase in PHASES if layers_in([block], phase)]
            rule = f" include {{ phase: {phases[0]} }}" if len(phases) == 1 else ""
            if phases:
                lines.append(f"layer {{ {_fields(block)}{rule} }}\n")
        return "".join(lines)


def read(text: bytes | str, path: str, problems: Problems) -> NetText | None:
    """Read a net; None after a mistake, with all of them in `problems`."""
    before = problems.count(path)
    strays: Strays = {}
    block = parse(path, text, NET, problems, partial(NetGrammar, strays))
    values = (value.value for _, entry in block.walk() for value in entry.values)
    if block.broken or any(isinstance(value, Block) and value.broken for value in values):
        return None
    number = sum(len(block.entries[n].values) for n in ("layer", "layers") if n in block.entries)
    if not 0 < number <= MOST_LAYERS:
        many = f"the net has {number} layers, and at most {MOST_LAYERS} are read"
        hint = "is it a net? A solver file names one as `net`"
        problems.add(block.place, many if number else "the file has no `layer`", hint)
        return None
    layers = upgraded(block, problems)
    if problems.count(path) == before and not _unknown_types(layers, problems):
        for (kind, name), span in list(strays.items())[:MOST_MISTAKES]:
            owner = f"version of Caffe's {kind.name}" if kind is NET else "layer of an image classifier"
            hint = nearest(name, kind.fields_by_name, 0.8) or f"no {owner} has it"
            problems.add(span, f"{kind.name} has no field `{shown(name)}`", hint)
    return NetText(path, block, layers) if problems.count(path) == before else None


def _unknown_types(layers: tuple[Block, ...], problems: Problems) -> bool:
    """Add a mistake for each layer of unknown type; return whether any is unknown."""
    unknown = [layer for layer in layers if type_of(layer) not in LAYERS]
    for number, layer in enumerate(unknown[: MOST_MISTAKES + 1]):
        kind, name, span = type_of(layer), shown(View(layer).text("name") or ""), View(layer).place("type")
        if number == MOST_MISTAKES:
            problems.add(span, TOO_MANY, "is it a net?")
        elif not kind:
            message = f"layer {name} has no `type`" if name else "a layer has no `type`"
            problems.add(span, message, 'write `type: "Convolution"`, or what it is')
        else:
            hint = nearest(kind, LAYERS, 0.8) or "it isn't among the layers of image classifiers that stagerun builds"
            problems.add(span, f"layer {name}: unknown type `{shown(kind)}`", hint)
    return bool(unknown)


# -- the canonical form

# Fields of a layer that don't change its result. `include` is written separately.
_LEFT_OUT = {"include", "exclude", "phase", "engine", "propagate_down", "blobs"}
_OF_READERS = {"name", "type", "top"}
_NOT_INSIDE = {"engine", "force_nd_im2col", "stable_prod_grad"}
# Fields that have a meaning even at their default: Caffe checks their presence.
_MEANINGFUL = {"filler", "bias_filler", "normalization", "use_weight_bias"}
# Lists without effect if all values are these.
_IDLE = {"pad": 0, "stride": 1, "dilation": 1}


def _fields(layer: Block) -> str:
    reads = type_of(layer) in IMAGES
    names = (f.name for f in layer.kind.fields)
    wanted = [n for n in names if n in layer.entries and (n in _OF_READERS if reads else n not in _LEFT_OUT)]
    words = [text for name in wanted for text in _texts(layer.entries[name])]
    shapes = [" ".join(f"dim: {n}" for n in (1, *dims)) for dims in top_shapes(layer)]
    if shapes:  # of Input and DummyData, for one image
        words.append(f"{SHAPED[type_of(layer)]} {{ {' '.join(f'shape {{ {dims} }}' for dims in shapes)} }}")
    return " ".join(words)


def _texts(entry: Entry) -> Iterator[str]:
    field, idle = entry.field, 0
    if field.name in _IDLE and all(value.value == _IDLE[field.name] for value in entry.values):
        return
    for value in entry.values:
        if isinstance(value.value, Block):
            inner = value.value
            names = [f.name for f in inner.kind.fields if f.name in inner.entries and f.name not in _NOT_INSIDE]
            text = " ".join(t for name in names for t in _texts(inner.entries[name]))
            if text:
                yield from [f"{field.name} {{ }}"] * idle  # their positions count
                yield f"{field.name} {{ {text} }}"
            elif field.name in _MEANINGFUL:
                yield f"{field.name} {{ }}"
            idle = idle + 1 if field.is_repeated and not text else 0
        elif field.is_repeated or field.name in _MEANINGFUL or value.value != tree.default(field):
            normal = value.value + 0.0 if isinstance(value.value, float) else value.value  # -0.0 is 0.0
            yield f"{field.name}: {tree.canonical(normal, field)}"


# -- upgrade of older forms: V1 layers, inputs next to the layers, transformations among a data layer's fields

LAYER: Descriptor = caffe_pb2.LayerParameter.DESCRIPTOR
PARAM: Descriptor = caffe_pb2.ParamSpec.DESCRIPTOR
SHAPE: Descriptor = caffe_pb2.BlobShape.DESCRIPTOR
TRANSFORM: Descriptor = caffe_pb2.TransformationParameter.DESCRIPTOR

# V1's types whose new names aren't the capitalised words joined.
_V1_TYPES = {"LRN": "LRN", "RELU": "ReLU", "SOFTMAX_LOSS": "SoftmaxWithLoss", "TANH": "TanH"}
_OF_TRANSFORM = ("scale", "mean_file", "crop_size", "mirror")  # V1's fields of a data layer
# V1's fields for each parameter, and their names in ParamSpec.
_V1_PARAMS = {"param": "name", "blob_share_mode": "share_mode", "blobs_lr": "lr_mult", "weight_decay": "decay_mult"}
_FILLERS = {"filler", "bias_filler"}


def upgraded(net: Block, problems: Problems) -> tuple[Block, ...]:
    """Return all layers as LayerParameter, first an Input layer for the net's `input`. Returns () if a relevant field could not be read,
    which is already a problem."""
    old, new = list(net.blocks("layers")), list(net.blocks("layer"))
    if old and new:
        hint = "`layers` is the older form: run Caffe's upgrade"
        problems.add(net.entries["layers"].name, "the net has both `layer` and `layers`", hint)
        return ()
    if oldest := [layer.entries["layer"] for layer in old if "layer" in layer.entries]:
        hint = "upgrade it by Caffe's `upgrade_net_proto_text`"
        problems.add(oldest[0].name, "`layer` within `layers` is Caffe's form of 2013, which is not read", hint)
        return ()
    try:
        layers = [*map(_v1, old), *map(_without_statistics, new)]
        engine = View(net).text("engine") or ""
        layers = [_without_unread_fillers(layer, engine) for layer in layers]
        return (*_input(net, layers, problems), *layers)
    except Doubtful:
        return ()


def _without(block: Block, names: Collection[str]) -> Block:
    return replace(block, entries={name: entry for name, entry in block.entries.items() if name not in names})


def _input(net: Block, layers: Sequence[Block], problems: Problems) -> Iterator[Block]:
    """Yield an Input layer for the net's `input`, with `input_shape` or four `input_dim` for each. Without any, Caffe ignores `input`."""
    if "input" not in net.entries:
        return
    names, shapes = net.entries["input"], list(net.blocks("input_shape"))
    dims, span = [int(n) for n in View(net).numbers("input_dim")], names.name
    if not shapes and len(dims) == 4 * len(names.values):
        each = (dims[i : i + 4] for i in range(0, len(dims), 4))
        shapes = [Block(SHAPE, span, {"dim": entry(SHAPE, "dim", span, *four)}) for four in each]
    if not shapes and not dims:
        tops = {top for layer in layers for top in View(layer).texts("top")}
        if {value.value for value in names.values} <= tops:
            return
    if len(shapes) != len(names.values):
        hint = "write the shapes next to it"
        problems.add(span, "`input` needs one `input_shape`, or four `input_dim`, for each", hint)
        return
    param = LAYER.fields_by_name["input_param"].message_type
    entries = {name: entry(LAYER, name, span, word) for name, word in (("name", "input"), ("type", "Input"))}
    layer = Block(LAYER, span, {**entries, "top": renamed(LAYER, "top", names)})
    yield with_block(layer, "input_param", Block(param, span, {"shape": entry(param, "shape", span, *shapes)}))


def _without_statistics(layer: Block) -> Block:
    """Drop the `param` of BatchNorm's three blobs, which aren't learned."""
    params = list(layer.blocks("param"))
    if type_of(layer) != "BatchNorm" or len(params) != 3 or any("name" in param.entries for param in params):
        return layer
    return _without(layer, ["param"])


def _without_unread_fillers(layer: Block, engine: str) -> Block:
    """Drop BatchNorm's fillers, which only MKL reads: Caffe's engine has no weights in a BatchNorm. `engine`: the net's."""
    norm = View(layer).inside("batch_norm_param")
    if not _FILLERS & norm.block.entries.keys():
        return layer
    inner = norm.text("engine") or ""
    if (inner if inner != "DEFAULT" else View(layer).text("engine") or engine) != "CAFFE":
        return layer
    return layer.changed("batch_norm_param", lambda norm: _without(norm, _FILLERS))


def _v1(layer: Block) -> Block:
    """Return a V1 layer as LayerParameter."""
    entries: dict[str, Entry] = {}
    for name, old in layer.entries.items():
        if name == "type":
            word = type_of(layer)
            name_today = _V1_TYPES.get(word) or "".join(part.capitalize() for part in word.split("_"))
            entries["type"] = entry(LAYER, "type", old.place, name_today)
        elif name not in _V1_PARAMS and name in LAYER.fields_by_name:
            entries[name] = renamed(LAYER, name, old)
    if params := list(_params(layer)):
        entries["param"] = entry(LAYER, "param", params[0].place, *params)
    return _transformed(Block(LAYER, layer.place, entries, layer.doubtful))


def _params(layer: Block) -> Iterator[Block]:
    """Yield a ParamSpec for each blob of a V1 layer."""
    fields = PARAM.fields_by_name
    columns = {new: layer.entries[old].values for old, new in _V1_PARAMS.items() if old in layer.entries}
    for row in zip_longest(*columns.values()):
        written = {name: value for name, value in zip(columns, row, strict=True) if value and value.value != ""}
        inside = {name: Entry(fields[name], value.span, (value,)) for name, value in written.items()}
        yield Block(PARAM, next((value.span for value in written.values()), layer.place), inside)


def _transformed(layer: Block) -> Block:
    """Move the transformation of a V1 data layer to `transform_param`."""
    for message in ("data_param", "image_data_param"):
        data = layer.block(message)
        written = data.entries if data is not None else {}
        moved = {name: renamed(TRANSFORM, name, written[name]) for name in _OF_TRANSFORM if name in written}
        if data is not None and moved:
            before = View(layer).inside("transform_param").block.entries
            layer = layer.changed(message, lambda data: _without(data, _OF_TRANSFORM))
            layer = with_block(layer, "transform_param", Block(TRANSFORM, data.place, {**moved, **before}))
    return layer
