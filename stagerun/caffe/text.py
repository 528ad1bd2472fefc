"""A net's text -> NetText: parsed, upgraded, every place kept; and its canonical form."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Problems, Span, nearest
from stagerun.caffe import layers, map_layers
from stagerun.caffe.blocks import IMAGES, PHASES, SHAPED, layers_in, top_shapes, type_of
from stagerun.caffe.reading import Settings
from stagerun.caffe.upgrade import upgraded
from stagerun.language import tree
from stagerun.language.lexer import MOST_MISTAKES, Token, shown
from stagerun.language.parse import Reader, parse
from stagerun.language.proto import caffe_pb2
from stagerun.language.tree import Block, Entry
from stagerun.language.view import View

NET: Descriptor = caffe_pb2.NetParameter.DESCRIPTOR
UNREAD: Descriptor = caffe_pb2.Unread.DESCRIPTOR
KEPT = ("NetParameter", "LayerParameter", "V1LayerParameter", "V0LayerParameter")
MOST_LAYERS = 20_000
_CLASSES = (one for module in (layers, map_layers) for one in vars(module).values() if isinstance(one, type))
# The types of layers by Caffe's words.
LAYERS = {word: one for one in _CLASSES if issubclass(one, Settings) for word in one.types}
TOO_MANY = f"more than {MOST_MISTAKES} mistakes; the rest is not read"


Strays = dict[tuple[Descriptor, str], Span]


class NetGrammar(Reader):
    """The grammar. An unknown field of a layer or of the net is kept for later, each name once: of an unknown layer the type alone is the
    mistake."""

    def __init__(self, strays: Strays, path: str, found: list[Token], problems: Problems) -> None:
        super().__init__(path, found, problems)
        self.strays = strays

    def unknown(self, kind: Descriptor, name: Token, doubtful: set[str]) -> None:
        if kind.name in KEPT:
            self.strays.setdefault((kind, name.text), self.span(name))
        elif kind is not UNREAD:
            hint = nearest(name.text, kind.fields_by_name) or f"no version of Caffe's {kind.name} has it"
            self.fail(name, f"{kind.name} has no field `{shown(name.text)}`", hint)
        self.pass_over()


@dataclass(frozen=True, slots=True)
class NetText:
    """A net as read. `file`: the NetParameter as written. `layers`: LayerParameter blocks of both phases, in today's form."""

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
        """The data layers of a phase (`TRAIN`, `TEST`), or of several, their transforms in `transform_param`."""
        found = (block for phase in phases for block in layers_in(self.layers, phase))
        return [block for block in found if type_of(block) in IMAGES]

    def canonical(self) -> str:
        """One line for each layer of a phase. Left out: what is at its default, comments, the net's name, what the data layers read, and
        what computes a layer. `include` names the phase alone, of a layer that is not in both."""
        kept = {phase: set(map(id, layers_in(self.layers, phase))) for phase in PHASES}
        lines = []
        for block in self.layers:
            phases = [phase for phase in PHASES if id(block) in kept[phase]]
            rule = f" include {{ phase: {phases[0]} }}" if len(phases) == 1 else ""
            if phases:
                lines.append(f"layer {{ {_fields(block)}{rule} }}\n")
        return "".join(lines)


def read(text: bytes | str, path: str, problems: Problems) -> NetText | None:
    """None where there is a mistake, and then all of them are in `problems`."""
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
    found = upgraded(block, problems)
    if problems.count(path) == before and not _unknown_types(found, problems):
        for (kind, name), place in list(strays.items())[:MOST_MISTAKES]:
            nobody = f"no version of Caffe's {kind.name}" if kind is NET else "no layer of an image classifier"
            hint = nearest(name, kind.fields_by_name, 0.8) or f"{nobody} has it"
            problems.add(place, f"{kind.name} has no field `{shown(name)}`", hint)
    return NetText(path, block, found) if problems.count(path) == before else None


def _unknown_types(layers: tuple[Block, ...], problems: Problems) -> bool:
    """Whether the type of a layer is unknown, each of them a mistake."""
    unknown = [layer for layer in layers if type_of(layer) not in LAYERS]
    for number, layer in enumerate(unknown[: MOST_MISTAKES + 1]):
        kind, name, place = type_of(layer), shown(View(layer).text("name") or ""), View(layer).place("type")
        if number == MOST_MISTAKES:
            problems.add(place, TOO_MANY, "is it a net?")
        elif not kind:
            message = f"layer {name} has no `type`" if name else "a layer has no `type`"
            problems.add(place, message, 'write `type: "Convolution"`, or what it is')
        else:
            hint = nearest(kind, LAYERS, 0.8) or "it isn't among the layers of image classifiers that stagerun builds"
            problems.add(place, f"layer {name}: unknown type `{shown(kind)}`", hint)
    return bool(unknown)


# -- the canonical form

# Of a layer: how it is read and computed, not what it does. `include` is written anew.
_LEFT_OUT = {"include", "exclude", "phase", "engine", "propagate_down", "blobs"}
_OF_READERS = {"name", "type", "top"}
_NOT_INSIDE = {"engine", "force_nd_im2col", "stable_prod_grad"}
# Fields that say something though they are at their default: Caffe asks whether they are there.
_TELLING = {"filler", "bias_filler", "normalization", "use_weight_bias"}
# Lists that say nothing where all values are these.
_IDLE = {"pad": 0, "stride": 1, "dilation": 1}


def _fields(layer: Block) -> str:
    reads = type_of(layer) in IMAGES
    names = (f.name for f in layer.kind.fields)
    wanted = [n for n in names if n in layer.entries and (n in _OF_READERS if reads else n not in _LEFT_OUT)]
    words = [text for name in wanted for text in _texts(layer.entries[name])]
    shapes = [" ".join(f"dim: {n}" for n in (1, *dims[1:])) for dims in top_shapes(layer)]
    if shapes:  # that Input and DummyData say, for one image
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
                yield from [f"{field.name} {{ }}"] * idle  # their places count
                yield f"{field.name} {{ {text} }}"
            elif field.name in _TELLING:
                yield f"{field.name} {{ }}"
            idle = idle + 1 if field.is_repeated and not text else 0
        elif field.is_repeated or field.name in _TELLING or value.value != tree.default(field):
            said = value.value + 0.0 if isinstance(value.value, float) else value.value  # -0.0 is 0.0
            yield f"{field.name}: {tree.canonical(said, field)}"
