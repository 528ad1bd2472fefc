"""The stages with their settings -> the files of a schedule's folder, as a person would write them. Pure."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from stagerun.caffe.importer.settings import OF_STAGE, UPDATE, CaffeStage
from stagerun.caffe.importer.text import Settings, aligned, beside, message, plain
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.tree import quoted

# The fields of Solver in the order in which they are written; those of a message after an empty line.
OWN = ("net", "model", *OF_STAGE, "knot", "policy_start_iter")  # what makes a stage, and stands in its own file
ORDER = (
    *(*OWN, "weights", "solverstate", "batch_size", "device_batch_size", "type", *UPDATE, "local_lr_passes"),
    *("clip_gradients", "random_seed", "carry", "transform_param", "test_transform_param", "test_batch_size"),
    *("test_interval", "test_iter", "display", "snapshot"),
)


def files_of(
    stages: Sequence[CaffeStage], settings: Mapping[str, Settings], head: Settings, about: str
) -> dict[str, str]:
    """The texts of all files. `settings`: by stage, fields in no order; `head`: the schedule's name, seed, model and data."""
    shared, above, files = _shared(list(settings.values())), "", {SCHEDULE_FILE: ""}
    if shared:
        head["solver"] = message("solver", _written(shared), "what every stage starts from")
    entries = ""
    for stage in stages:
        own = {n: text for n, text in settings[stage.name].items() if shared.get(n) != text}
        # A message would else be merged into that of all stages.
        gone = [n for n in shared if n not in settings[stage.name] or (n in own and "\n" in own[n])]
        clear = beside(f"clear: [{', '.join(map(quoted, gone))}]", "of what all stages start from")
        lines = [_comments("Solver", f"From {stage.step.file}."), "", *([clear] if gone else []), _written(own)]
        files[f"{stage.name}.prototxt"] = "\n".join(lines)
        parents = stage.step.parents or ("",)
        start = "" if parents == (above,) else "".join(f" from: {quoted(parent)}" for parent in parents)
        entries += f"\nstage {{ name: {quoted(stage.name)}{start} }}"
        above = stage.name
    files[SCHEDULE_FILE] = "\n\n".join([_comments("Schedule", about), *head.values()]) + "\n" + entries
    nets = {stage.file: stage.net.data.decode(errors="replace") for stage in reversed(stages)}
    return {file: aligned(text) + "\n" for file, text in files.items()} | nets


def _shared(stages: Sequence[Settings]) -> Settings:
    """What stands in Schedule.solver: what more than half of the stages say alike, or half of them and the first."""
    shared: Settings = {}
    for name in (name for name in ORDER if name not in OWN):
        value, number = Counter(stage.get(name) for stage in stages).most_common(1)[0]
        most = number * 2 > len(stages) or (number * 2 == len(stages) and value == stages[0].get(name))
        # A stage that goes on from a snapshot says `carry` itself.
        if value is not None and most and (name != "carry" or number == len(stages)):
            shared[name] = value
    return shared


def _written(settings: Settings) -> str:
    """The settings in their order, an empty line around each message."""
    found, message_before = "", True
    for text in (settings[name] for name in ORDER if name in settings):
        found += "\n" if "\n" in text and not message_before else ""
        found += text + "\n"
        message_before = "\n" in text
    return found.rstrip("\n")


def _comments(kind: str, about: str) -> str:
    text = f"proto-file: protos/stagerun.proto\nproto-message: {kind}\n\n{about}"
    return "\n".join(f"# {line}".rstrip() for line in text.split("\n"))


def about_of(stages: Sequence[CaffeStage], left: str, folder: str) -> str:
    """Where each stage comes from, and what is not as it was. `folder`: Caffe's, as it was given."""
    rows = [(stage.name, plain(stage.step.file), plain(stage.net.path)) for stage in stages]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"  {name:<{first}}  {file:<{second}}  {net}" for name, file, net in rows]
    return "\n".join([f"Imported from Caffe's files in {plain(folder)}:", "", *lines, *(["", left] if left else [])])


def left_out(left: Sequence[str]) -> str:
    """The list, for the terminal too. Names of files may have line ends in them."""
    wrapper = textwrap.TextWrapper(110, "  ", " " * 6, break_long_words=False, break_on_hyphens=False)
    lines = [wrapper.fill(plain(text)) for text in left]
    return "\n".join(["Not carried over, or not as it was:", *lines]) if left else ""
