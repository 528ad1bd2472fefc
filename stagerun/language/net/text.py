"""A net's text -> NetText: parsed, upgraded, every place kept; and its canonical form."""

import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Problems, Span, nearest
from stagerun.base.text import count
from stagerun.language import tree
from stagerun.language.lexer import Token, shown
from stagerun.language.net import upgrade
from stagerun.language.net.layers import IMAGES, LAYERS
from stagerun.language.net.phases import PHASES, State, layers_in
from stagerun.language.parse import LARGEST, MOST_MISTAKES, Reader, parse
from stagerun.language.proto import caffe_pb2
from stagerun.language.tree import Block, Entry
from stagerun.language.view import View

NET: Descriptor = caffe_pb2.NetParameter.DESCRIPTOR
UNREAD: Descriptor = caffe_pb2.Unread.DESCRIPTOR
OF_LAYERS = ("LayerParameter", "V1LayerParameter", "V0LayerParameter")
MOST_LAYERS = 20_000
_NAMES_NET = re.compile(r"""^[ \t]*(?P<field>net|train_net)[ \t]*:[ \t]*["'](?P<net>[^"'\n]*)["']""", re.M)
_LAYER = re.compile(r"^[ \t]*layers?\s*[{:]", re.M)
TOO_MANY = f"more than {MOST_MISTAKES} mistakes; the rest is not read"


class NetGrammar(Reader):
    """The grammar. An unknown field of a layer is kept for later: of an unknown layer its type alone is the mistake."""

    def __init__(self, path: str, found: list[Token], problems: Problems) -> None:
        super().__init__(path, found, problems)
        self.strays: list[tuple[Token, Descriptor]] = []

    def unknown(self, kind: Descriptor, name: Token, doubtful: set[str]) -> None:
        if kind.name in OF_LAYERS:
            self.strays.append((name, kind))
        elif kind is not UNREAD:
            hint = nearest(name.text, kind.fields_by_name) or f"no version of Caffe's {kind.name} has it"
            self.fail(name, f"{kind.name} has no field `{shown(name.text)}`", hint)
        self.pass_over()


@dataclass(frozen=True, slots=True)
class ImageReader:
    """A layer that reads images. `block`: a LayerParameter with `data_param`, `image_data_param` and `transform_param`, their older
    places upgraded. `shape`: (channels, height, width) of Input and DummyData; None of others."""

    name: str
    type: str
    place: Span
    block: Block
    shape: tuple[int, int, int] | None = None

    @property
    def crop_size(self) -> int:
        """0: none."""
        return View(self.block).inside("transform_param").whole("crop_size") or 0


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

    def readers(self, phase: str, state: State | None = None) -> tuple[ImageReader, ...]:
        """The data layers of a phase (`TRAIN`, `TEST`)."""
        found = (block for block in layers_in(self.layers, phase, state or State()) if type_of(block) in IMAGES)
        return tuple(
            ImageReader(View(b).text("name") or "", type_of(b), b.place, b, next(iter(upgrade.image_shapes(b)), None))
            for b in found
        )

    def canonical(self, train: State | None = None, test: State | None = None) -> str:
        """One line for each layer of a phase. Left out: what is at its default, comments, the net's name, what the data layers read, and
        what computes a layer. `include` names the phase alone, of a layer that is not in both."""
        kept = {
            phase: {id(b) for b in layers_in(self.layers, phase, state or State())}
            for phase, state in zip(PHASES, (train, test), strict=True)
        }
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
    if _is_solver(text, path, problems):
        return None
    grammar: list[NetGrammar] = []

    def build(path: str, found: list[Token], problems: Problems) -> NetGrammar:
        grammar.append(NetGrammar(path, found, problems))
        return grammar[0]

    block = parse(path, text, NET, problems, build)
    if not grammar or block.broken or any(inner.broken for _, e in block.walk() for inner in _blocks(e)):
        return None
    number = sum(len(block.entries[n].values) for n in ("layer", "layers") if n in block.entries)
    if number > MOST_LAYERS:
        problems.add(block.place, f"the net has {number} layers, and at most {MOST_LAYERS} are read", "is it a net?")
        return None
    if not number:
        problems.add(block.place, "the file has no `layer`", "is it a net?")
        return None
    layers = upgrade.upgraded(block, problems)
    if problems.count(path) == before:
        unknown = _unknown_layers(layers, problems)
        _stray_fields(grammar[0].strays, layers, unknown, path, problems)
    if problems.count(path) > before:
        return None
    return NetText(path, block, layers)


def _is_solver(data: bytes | str, path: str, problems: Problems) -> bool:
    """Whether a solver file was given as a net, which is one mistake and not one for each of its fields."""
    text = data if isinstance(data, str) else data[:LARGEST].decode(errors="replace")
    named = _NAMES_NET.search(text)
    if named is None or _LAYER.search(text):
        return False
    start = named.start("field")
    place = Span(path, text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start), len(named["field"]))
    problems.file(path, text)
    problems.add(place, f"this is a solver file; its net is `{shown(named['net'])}`", "give a net prototxt")
    return True


def _blocks(entry: Entry) -> Iterator[Block]:
    return (value.value for value in entry.values if isinstance(value.value, Block))


def type_of(layer: Block) -> str:
    return View(layer).text("type") or ""


def _unknown_layers(layers: tuple[Block, ...], problems: Problems) -> set[Span]:
    """The places of layers whose type is unknown, each of them a mistake."""
    found: set[Span] = set()
    for layer in layers:
        kind, name = type_of(layer), shown(View(layer).text("name") or "")
        if kind in LAYERS:
            continue
        found.add(layer.place)
        place = layer.entries["type"].place if "type" in layer.entries else layer.place
        if len(found) > MOST_MISTAKES:
            problems.add(place, TOO_MANY, "is it a net?")
            break
        if not kind:
            message = 'write `type: "Convolution"`, or what it is'
            problems.add(place, f"layer {name} has no `type`" if name else "a layer has no `type`", message)
        else:
            hint = nearest(kind, LAYERS, 0.8) or "it isn't among the layers of image classifiers that stagerun builds"
            problems.add(place, f"layer {name}: unknown type `{shown(kind)}`", hint)
    return found


def _stray_fields(
    strays: Sequence[tuple[Token, Descriptor]],
    layers: tuple[Block, ...],
    unknown: set[Span],
    path: str,
    problems: Problems,
) -> None:
    """Each name once: a field that no layer has is often in many."""
    starts = sorted((block.place.line, block.place.column, block.place in unknown) for block in layers)
    found: dict[tuple[str, str], list[Token]] = {}
    kinds = {kind.name: kind for _, kind in strays}
    for token, kind in strays:
        at = bisect(starts, (token.line, token.column, True))
        if not (at and starts[at - 1][2]):
            found.setdefault((kind.name, token.text), []).append(token)
    for (kind_name, name), tokens in list(found.items())[:MOST_MISTAKES]:
        more = f", here and {count(len(tokens) - 1, 'more time')}" if len(tokens) > 1 else ""
        place = Span(path, tokens[0].line, tokens[0].column, len(tokens[0].text))
        hint = nearest(name, kinds[kind_name].fields_by_name, 0.8) or "no layer of an image classifier has it"
        problems.add(place, f"{kind_name} has no field `{shown(name)}`{more}", hint)


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
    return " ".join([*(text for name in wanted for text in _texts(layer.entries[name])), *_shapes(layer)])


def _shapes(layer: Block) -> Iterator[str]:
    """The shapes that Input and DummyData say, for one image."""
    message = upgrade.SHAPED.get(type_of(layer))
    shapes = [" ".join(f"dim: {n}" for n in (1, *dims[1:])) for dims in upgrade.top_shapes(layer)] if message else []
    if shapes:
        yield f"{message} {{ {' '.join(f'shape {{ {dims} }}' for dims in shapes)} }}"


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
