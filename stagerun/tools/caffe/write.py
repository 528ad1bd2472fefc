"""The stages with their settings -> the files of a schedule's folder, as a person would write them. Pure."""

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from stagerun.base.errors import Problem, RecipeError
from stagerun.language.code import MISSING, Text
from stagerun.language.nets import Files
from stagerun.language.resolve import SCHEDULE_FILE, first_record, read
from stagerun.language.tree import quoted
from stagerun.tools.caffe.convert import Converted
from stagerun.tools.caffe.order import Step
from stagerun.tools.caffe.settings import OF_STAGE
from stagerun.tools.caffe.text import Findings, Line, Setting, indented, plain
from stagerun.tools.caffe.whole import Written

# The fields of Solver in the order in which they are written; those of a message after an empty line.
OWN = ("net", "model", *OF_STAGE, "knot", "policy_start_iter")  # what makes a stage, and stands in its own file
ORDER = (
    *OWN,
    *("weights", "solverstate"),
    *("batch_size", "device_batch_size", "type", "momentum", "momentum2", "rms_decay", "delta", "weight_decay"),
    *("regularization_type", "local_lr_auto", "local_gw_ratio", "local_lr_passes", "clip_gradients"),
    *("label_smoothing", "random_seed"),
    *("param", "carry", "transform_param", "test_transform_param", "test_batch_size", "test_interval", "test_iter"),
    *("display", "snapshot"),
)
WIDTH = 110  # of the text in a header
GLUE = "\0"  # stands for a space at which no line ends


def folder_lines(converted: Converted, name: str, source: str) -> dict[str, list[Line]]:
    """The lines of each file: schedule.prototxt, and one for each stage. `source` is Caffe's folder as it was given."""
    shared = _shared(converted)
    files = {SCHEDULE_FILE: _schedule(converted, shared, name, source)}
    for step in converted.steps:
        files[f"{step.name}.prototxt"] = _stage(step, converted.settings[step.name], shared)
    return files


def text_of_lines(lines: Sequence[Line]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _shared(converted: Converted) -> dict[str, Setting]:
    """What stands in Schedule.solver: what more than half of the stages say alike, or half of them and the first."""
    shared: dict[str, Setting] = {}
    stages = [converted.settings[step.name] for step in converted.steps]
    for name in ORDER:
        having = [s[name] for s in stages if name in s]
        if name in OWN or not having:
            continue
        value, number = Counter(h.value for h in having).most_common(1)[0]
        if name == "carry" and number < len(stages):
            continue  # a stage that goes on from a snapshot says so itself
        first = stages[0].get(name)
        if first is not None and sum(h.value == first.value for h in having) == number:
            value = first.value
        if number * 2 > len(stages) or (number * 2 == len(stages) and first is not None and first.value == value):
            shared[name] = next(h for h in having if h.value == value)
    return shared


def _written(settings: Mapping[str, Setting]) -> Iterator[Line]:
    """The settings in their order, an empty line around each message."""
    message_before = False
    for number, name in enumerate(n for n in ORDER if n in settings):
        setting = settings[name]
        is_message = _is_message(setting)
        if number and is_message and not message_before:
            yield Line("")
        yield from setting.lines
        message_before = is_message


def _is_message(setting: Setting) -> bool:
    return setting.lines[0].text.endswith("{")


def _stage(step: Step, settings: Mapping[str, Setting], shared: Mapping[str, Setting]) -> list[Line]:
    own = {n: s for n, s in settings.items() if n not in shared or shared[n].value != s.value}
    # A message would else be merged into that of all stages.
    inherited = [n for n in ORDER if n in shared and (n not in settings or (n in own and _is_message(own[n])))]
    lines = _head("Solver", [f"From {step.file}."])
    if inherited:
        names = ", ".join(quoted(name) for name in inherited)
        lines.append(Line(f"clear: [{names}]", None, "of what all stages start from"))
    return [*lines, *_written(own)]


def _head(kind: str, text: Sequence[str]) -> list[Line]:
    """What every file begins with, and an empty line."""
    comments = ["proto-file: protos/stagerun.proto", f"proto-message: {kind}", "", *text]
    return [*(Line(f"# {c}".rstrip()) for c in comments), Line("")]


def _schedule(converted: Converted, shared: Mapping[str, Setting], name: str, source: str) -> list[Line]:
    lines = _head("Schedule", _about(converted, source))
    lines += [Line(f"name: {quoted(name)}"), converted.seed, Line("")]
    for field, inside in (("model", converted.model), ("data", converted.data)):
        lines += [Line(f"{field} {{"), *indented(inside), Line("}"), Line("")]
    if shared:
        opening = Line("solver {", None, "what every stage starts from")
        inside = tuple(_written(shared))
        lines += [opening, *(line if not line.text else indented([line])[0] for line in inside), Line("}"), Line("")]
    above = ""
    for step in converted.steps:
        lines.append(Line(_stage_entry(step, above)))
        above = step.name
    return lines


def _stage_entry(step: Step, above: str) -> str:
    """`from` is written where it is not the stage above."""
    start = "".join(f" from: {quoted(parent)}" for parent in step.parents or ("",))
    return f"stage {{ name: {quoted(step.name)}{'' if (step.parents or ('',)) == (above,) else start} }}"


def _about(converted: Converted, source: str) -> list[str]:
    """The header: where each stage comes from, and all that is not as it was."""
    rows = [
        (step.name, plain(step.file, "?"), plain(converted.nets.get(step.name, ""), "?")) for step in converted.steps
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    text = [f"Imported from Caffe's files in {plain(source, '?')}:", ""]
    text += [f"  {name:<{widths[0]}}  {file:<{widths[1]}}  {net}".rstrip() for name, file, net in rows]
    return [*text, *_left(converted.found)]


def _left(found: Findings) -> Iterator[str]:
    if found.left:
        yield from ("", "Not carried over, or not as it was:")
        for left in found.left:
            yield from _wrapped(str(left))
    if found.idle:
        yield from ("", "Left out, and nothing is lost:")
        by_why: dict[str, list[str]] = {}
        for name, why in sorted(found.idle.items()):
            by_why.setdefault(why, []).append(name)
        for why, names in by_why.items():
            yield from _wrapped(f"{', '.join(names)}: {why}")


def left_text(found: Findings) -> str:
    """The same list for the terminal; '' where all was carried over."""
    return "\n".join(_left(found)).strip("\n")


def _wrapped(text: str) -> Iterator[str]:
    """An entry of a list; names of files may have line ends in them. A command stays in one line, to be pasted."""
    whole = re.sub(r"`[^`]*`", lambda match: match[0].replace(" ", GLUE), plain(text, "?"))
    lines = textwrap.wrap(
        whole, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )
    return (line.replace(GLUE, " ") for line in lines)


def check_lines(
    files: Mapping[str, Sequence[Line]], nets: Sequence[Written], found: Findings, root: str, shown: str
) -> tuple[Problem, ...]:
    """The mistakes that `stagerun check` finds in the files, before they are written: what the user is asked for, and nothing
    else. RecipeError with the others, at the places in Caffe's files that they come from.
    """
    texts = {name: text_of_lines(lines) for name, lines in files.items()}
    kept: dict[str, Text] = {net.name: net.text for net in nets}
    try:
        read(texts, root, (), shown, nets=Files(lambda file: kept.get(file, MISSING), first=first_record))
    except RecipeError as error:
        asked, mistakes = [], []
        for problem in error.problems:
            name = problem.span.path.rpartition("/")[2]
            lines = files.get(name, ())
            line = lines[problem.span.line - 1] if 0 < problem.span.line <= len(lines) else Line("")
            net = next((net for net in nets if net.name == name), None)
            place = net.place(problem.span.line) if net else line.span
            if line.asks:
                asked.append(problem)
            elif net and net.source:  # a copy
                mistakes.append(replace(problem, span=replace(problem.span, path=net.source)))
            elif place is None:
                mistakes.append(problem)
            else:
                mistakes.append(Problem(problem.message, place, found.mistakes.line(place), problem.hint))
        if mistakes:
            raise RecipeError(mistakes) from None
        return tuple(asked)
    return ()
