"""Nets that are imported whole: read, and the file that is written for those of a stage. Pure."""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import chain, count

from stagerun.base.errors import Problems, Span
from stagerun.language.net import NetText, State, read
from stagerun.language.net.phases import TEST, TRAIN
from stagerun.language.net.text import NET
from stagerun.language.net.upgrade import upgraded
from stagerun.language.parse import Reader, parse
from stagerun.language.tree import Block
from stagerun.tools.caffe.text import Findings, text_of

SAID_OF = re.compile(r" include \{ phase: (TRAIN|TEST) \}")

_READS = re.compile(r' type: "(?:Data|ImageData|DummyData|Input)" ')


@dataclass(frozen=True, slots=True)
class CaffeNet:
    """A net as read. `block`: the file, `layers`: those of all phases in today's form. `whole` is None after a mistake. `data` is None
    of a net that stands in the solver."""

    path: str
    block: Block
    layers: tuple[Block, ...]
    whole: NetText | None
    data: bytes | None


def read_net(path: str, data: bytes, found: Findings) -> CaffeNet:
    """Mistakes into `found`."""
    whole = read(data, path, found.mistakes)
    if whole is not None:
        return CaffeNet(path, whole.file, whole.layers, whole, data)
    block = parse(path, data, NET, Problems(), Reader)  # for the mistakes of its data layers
    return CaffeNet(path, block, upgraded(block, Problems()), None, data)


def inside(path: str, block: Block, found: Findings) -> CaffeNet:
    """A net that stands in a solver. Layers that stagerun has not are mistakes at places of the canonical form."""
    text = NetText(path, block, upgraded(block, found.mistakes))
    good = read(text.canonical(), path, found.mistakes) is not None
    return CaffeNet(path, block, text.layers, text if good else None, None)


@dataclass(frozen=True, slots=True)
class Written:
    """The net of a stage as a file. `network`: its canonical form. `source`: the file
    that it is a copy of, '' for one that was put together; then `places` are those of its layers."""

    name: str
    text: str
    network: str
    source: str = ""
    places: Mapping[str, Span] = field(default_factory=dict)

    def place(self, line: int) -> Span | None:
        """Where the layer in a line of a net that was put together comes from; else where its net begins."""
        named = re.search(r' name: "([^"]*)"', self.text.split("\n")[line - 1])
        return self.places.get(named[1] if named else "", self.places.get(""))

    @property
    def layers(self) -> list[str]:
        """Those that compute."""
        return [line for line in self.network.splitlines() if not _READS.search(line)]


def written(
    stage: str, train: CaffeNet, test: CaffeNet | None, states: Sequence[State], taken: Mapping[str, str]
) -> Written:
    """A copy, where one file has both phases and the solver asks for no levels or stages; else the layers of both phases. `taken`: by the
    names of other files the nets that they are copies of, '' of what is no copy."""
    assert train.whole is not None
    if train.data is not None and (test is None or test is train) and all(state == State() for state in states):
        name = posixpath.basename(train.path)
        free = taken.get(name, train.path) == train.path
        name = name if name.endswith(".prototxt") and free else _own_name(stage, taken)
        return Written(name, train.data.decode(errors="replace"), train.whole.canonical(), train.path)
    other = test.whole if test is not None and test.whole is not None else train.whole
    trained, tested = (
        [SAID_OF.sub("", line) for line in net.canonical(*states).splitlines() if not _other(line, phase)]
        for net, phase in ((train.whole, TRAIN), (other, TEST))
    )

    def in_phase(line: str, phase: str) -> str:
        return f"{line.removesuffix(' }')} include {{ phase: {phase} }} }}"

    kept: list[str] = []
    # Layers are computed in the order of their lines, so that of both nets stays.
    for tag, a, b, c, d in SequenceMatcher(None, trained, tested, autojunk=False).get_opcodes():
        if tag == "equal":
            kept += trained[a:b]
        else:
            kept += [in_phase(line, TRAIN) for line in trained[a:b]] + [in_phase(line, TEST) for line in tested[c:d]]
    title = train.whole.name
    head = f'name: "{title}"\n' if title.isprintable() and '"' not in title and title else ""
    network = "".join(f"{line}\n" for line in kept)
    places = {text_of(layer, "name"): layer.place for net in (test, train) if net is not None for layer in net.layers}
    return Written(_own_name(stage, taken), head + network, network, places=places | {"": train.block.place})


def _own_name(stage: str, taken: Mapping[str, str]) -> str:
    """A name that is free."""
    names = chain([f"net_{stage}.prototxt"], (f"net_{stage}_{number}.prototxt" for number in count(2)))
    return next(name for name in names if name not in taken)


def _other(line: str, phase: str) -> bool:
    found = SAID_OF.search(line)
    return found is not None and found[1] != phase
