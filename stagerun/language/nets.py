"""Caffe nets that a schedule names by `net` and `caffe_net`, as far as the trunk handles them. The wing `caffe` reads them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Problems, Span
from stagerun.base.wings import wing
from stagerun.language.code import MISSING, Reader
from stagerun.language.tree import SCHEDULE, SOLVER, Block, Entry, Value, literal

MODEL: Descriptor = SCHEDULE.fields_by_name["model"].message_type
# Settings that the data layers of a net may have.
SAID = frozenset({"batch_size", "device_batch_size", "test_batch_size", "transform_param", "test_transform_param"})
_OF_NET = frozenset({"num_classes", "channels"})  # fields of a `model` that its net has
Shape = tuple[int, int, int]  # of an image: channels, height, width


@dataclass(frozen=True, slots=True)
class First:
    """The first record of an LMDB. `size`: (height, width), None if unknown without decoding."""

    channels: int | None
    size: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Files:
    """Readers of the disk. `read`: a net by its path as written. `find`: a path of Caffe's and its net's path -> the absolute path, '' if
    missing. `first`: the first record of an LMDB. `content`: the bytes of a file."""

    read: Reader = lambda path: MISSING
    find: Callable[[str, str], str] = lambda path, net: ""
    first: Callable[[str], First | None] = lambda path: None
    content: Callable[[str], bytes | None] = lambda path: None


@dataclass(frozen=True, slots=True)
class Held:
    """A net as the network of a stage: its canonical text, for images of a shape. `path`: its file's, as in spans."""

    path: str
    text: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Images:
    """Facts of a stage's images: the settings with the crops, and the LMDB of the training images."""

    settings: Block
    lmdb: str | None


class Nets:
    """The nets of one schedule if the wing is missing: each is refused where it is named. `caffe.schedule` reads them."""

    def __init__(self, files: Files, shown: str, problems: Problems) -> None:
        self.files, self.shown, self.problems = files, shown, problems
        self.held: dict[str, Held] = {}  # by the path as written
        self.kept: dict[str, str] = {}  # the texts read so far, by the path in spans

    def moved(self, schedule: Block, stages: Iterable[Block]) -> Block:
        """Move `net` of the schedule's `solver`, else of the first stage that has one, to its `model`; add the sources of the net if the
        schedule has no images. `stages`: the settings in their files."""
        solver, model, stages = schedule.block("solver"), schedule.block("model"), list(stages)
        net = solver.entries.get("net") if solver is not None else None
        if solver is not None and net is not None:
            if model is None or _is_bare(model):
                schedule = with_block(schedule, "model", _with_net(model, net))
            else:
                hint = f"keep one of them; `model` is in line {schedule.entries['model'].name.line}"
                text = "`net` of the schedule's `solver` stands for `model`, which is written, too"
                self.problems.add(net.name, text, hint)
            left = {name: entry for name, entry in solver.entries.items() if name != "net"}
            schedule = with_block(schedule, "solver", replace(solver, entries=left))
        elif _is_bare(model):
            nets = [block.entries["net"] for block in stages if "net" in block.entries]
            schedule = with_block(schedule, "model", _with_net(model, nets[0])) if nets else schedule
        elif "model" not in schedule.entries and "model" not in schedule.doubtful:
            models = (of_stage(block, None).block("model") for block in stages)
            first = next((model for model in models if named_net(model) is not None), None)
            schedule = with_block(schedule, "model", first) if first is not None else schedule
        return self.with_sources(schedule, schedule.block("model"))

    def with_sources(self, holder: Block, model: Block | None) -> Block:
        """Return a Schedule or a stage's settings with the images of its net's data layers, if it has no `train`."""
        return holder if named_net(model) is None else with_unknown_images(holder)

    def below(self, merged: Block, written: Block, schedule: Block) -> Block | None:
        """Return the lowest layer of settings, from a stage's net; None without a net. `merged`: the merge of the other layers; the net's
        fields that are `written` there as a whole are ignored."""
        named = named_net(merged.block("model") or schedule.block("model"))
        return None if named is None else Block(SOLVER, named.place, doubtful=SAID)

    def sized(self, model: Block | None, stages: Sequence[Images], shared: Block | None = None) -> Block | None:
        """Return a `model` with the classes and channels of its net for the images of these stages, which all train it. `shared`: the
        schedule's, whose channels a stage inherits."""
        if model is None or (named := named_net(model)) is None:
            return model
        text = f"`{named.values[0].value}` is a Caffe net, and this installation lacks stagerun/caffe, which reads it"
        self.problems.add(named.place, text, "write `model { name: ... }`, or install all of stagerun")
        return unsized(model)

    def with_rules(self, settings: Block, model: Block | None) -> Block:
        """Return a stage's settings with the multipliers of its net as rules, after the written rules."""
        return settings

    def check_means(self, settings: Block, channels: int | None, path_of: Callable[[str], str]) -> None:
        """Report a `mean_file` on this machine that is not a mean image, or not for the stage's images. `channels`: of these."""

    def check_teacher(self, model: Block | None, images: Images, teacher: Block | None, who: str, span: Span) -> None:
        """Report images of a stage that would change the shapes of its teacher's parameters. `model`, `teacher`: the networks of both."""


def nets_of(files: Files, shown: str, problems: Problems) -> Nets:
    made: Nets = (wing("caffe.schedule.CaffeNets") or Nets)(files, shown, problems)
    return made


def named_net(model: Block | None) -> Entry | None:
    """Return the entry of a `model` that names its net."""
    return model.entries.get("caffe_net") if model is not None else None


def of_stage(settings: Block, shared: Block | None) -> Block:
    """Return a stage's settings with `net` as its `model`, unless that is the schedule's `shared` model."""
    net = settings.entries.get("net")
    if net is None:
        return settings
    settings = replace(settings, entries={name: entry for name, entry in settings.entries.items() if name != "net"})
    named = named_net(shared)
    same = named is not None and named.values[0].value == net.values[0].value
    if shared is not None and named is not None and same and (len(shared.entries) == 1 or named.name == net.name):
        return settings  # `model` has nothing else, or more fields for this very `net`
    return with_block(settings, "model", _with_net(None, net))


def _with_net(model: Block | None, net: Entry) -> Block:
    """Return a `model` with the net of `net: "..."`."""
    named = {"caffe_net": renamed(MODEL, "caffe_net", net)}
    return Block(MODEL, net.place, named) if model is None else replace(model, entries={**named, **model.entries})


def _is_bare(model: Block | None) -> bool:
    """Return whether a `model` names no network, so that `net` names it."""
    names = {"name", "caffe_net"}
    return model is not None and not model.broken and not names & {*model.entries, *model.doubtful}


def unsized(model: Block) -> Block:
    """Return a `model` whose net could not be read."""
    return replace(model, doubtful=model.doubtful | (_OF_NET - model.entries.keys()))


def with_unknown_images(holder: Block) -> Block:
    """Return a Schedule or a stage's settings whose images are in an unreadable net."""
    data = holder.block("data")
    if data is None:
        return replace(holder, doubtful=holder.doubtful | {"data"})
    return with_block(holder, "data", replace(data, doubtful=data.doubtful | ({"train", "val"} - data.entries.keys())))


# -- entries that aren't written in a file


def entry(kind: Descriptor, name: str, span: Span, *values: Any) -> Entry:
    """Make a field that isn't written, from something at `span`."""
    made = (Value(value, "" if isinstance(value, Block) else literal(value), span) for value in values)
    return Entry(kind.fields_by_name[name], span, tuple(made))


def renamed(kind: Descriptor, name: str, old: Entry) -> Entry:
    """Return an entry as the field `name` of another message."""
    return replace(old, field=kind.fields_by_name[name])


def with_block(holder: Block, name: str, block: Block) -> Block:
    """Return a message with another in one of its fields."""
    before = holder.entries.get(name)
    span = before.name if before is not None else block.place
    return replace(holder, entries={**holder.entries, name: entry(holder.kind, name, span, block)})
