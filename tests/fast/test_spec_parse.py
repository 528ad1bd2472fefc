"""The parser against google.protobuf.text_format. Its places: the carets of golden/spec."""

import time
from typing import Any

import pytest
from drawn import examples
from facade import SCHEDULE, SOLVER, Problems, parse, stagerun_pb2, tree
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

LARGEST = 1_000_000  # bytes
TOKENS = r"""
{ } < > [ ] : ; , - $ = " ' inf nan -inf true false t f True FP32 BF16 NORM KEEP CUBIC
base_lr lr_policy max_iter stepvalue mirror precision transform_param mean_value clear
param kind stage name solver carry momentum resize_param random_resize_param
0 1 -1 1.5 1e3 1e999 -1e-3 0x1F 017 08 1f 1.0f .5 5. 1_0 +1 0b1
"a" 'b' "\n\x41\101" "é" "\303\251" "\351" "#" "a x.y a-b é
"""
WORDS = [" ", "\n", "#x\n", "9" * 19, *TOKENS.split()]
INTEGERS = st.integers(-(2**64), 2**64) | st.integers(0, 2**63 - 1) | st.integers(-99, 99)
FLOATS = st.floats() | st.floats(width=32, allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_characters='"\\\n\0', exclude_categories=["Cs"]), max_size=4)
ESCAPES = st.sampled_from(["\\n", "\\x41", "\\101", "\\303\\251", "\\\\", "\\'", '\\"', "\\u00e9", "'", "#", "\\377"])
MESSAGES = [f"{{ {text} }}" for text in ("", "mirror: t", "pad: 1,", "kind: NORM;", "data: RESTART", "kind: 3", "x: 1")]
QUOTED = st.builds('"{}{}"'.format, TEXTS, ESCAPES)
VALUES = {
    FieldDescriptor.TYPE_INT64: st.builds(format, INTEGERS, st.sampled_from(["d", "#x", "#o", "#b"]))
    | st.builds("0{:o}".format, INTEGERS),
    FieldDescriptor.TYPE_DOUBLE: st.builds("{!r}{}".format, FLOATS, st.sampled_from(["", "", "f", "F"]))
    | INTEGERS.map(str)
    | st.builds("{:e}".format, FLOATS),
    FieldDescriptor.TYPE_BOOL: st.sampled_from(["true", "false", "t", "f", "1", "0", "True", "False", "TRUE", "2"]),
    FieldDescriptor.TYPE_STRING: st.lists(QUOTED, min_size=1, max_size=2).map(" ".join),
    FieldDescriptor.TYPE_ENUM: st.sampled_from(["FP64", "TORCH", "CAFFE", "BF16", "0", "1", "0x1", "-1", "7"]),
    FieldDescriptor.TYPE_MESSAGE: st.sampled_from(["< >", *MESSAGES]),
}


@st.composite
def fields(draw: st.DrawFn) -> str:
    """One field, mostly with a value of its type."""
    field = draw(st.sampled_from(list(SOLVER.fields)))
    kind = field.type if draw(st.integers(0, 9)) else draw(st.sampled_from(list(VALUES)))
    values = draw(st.lists(VALUES[kind], min_size=1, max_size=3))
    value = f"[{', '.join(values)}]" if field.is_repeated and draw(st.booleans()) else values[0]
    colon = draw(st.sampled_from([": ", ":", " : "] + [" "] * (kind == FieldDescriptor.TYPE_MESSAGE)))
    return field.name + colon + value + draw(st.sampled_from([" ", "\n", ";", ",", " # c\n", "\t\r\n", "; "]))


GOOD = """base_lr: 0.1 lr_policy: "poly" 'x'; stepvalue: [1, 2] precision: FP32,
transform_param { mirror: true mean_value: 1 mean_value: 2f random_resize_param < min_size: 3 > }  # c
param: { kind: NORM } param [{ lr_mult: 1 }, { }] carry: { data: RESTART } channels_last: t max_iter: 0x10
"""


@st.composite
def changed(draw: st.DrawFn) -> str:
    """A good text with a few tokens or characters deleted, doubled, or others put in."""
    text = GOOD
    for _ in range(draw(st.integers(1, 2))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        text = text[:start] + draw(st.sampled_from(["", " ", text[start:end] * 2, *WORDS])) + text[end:]
    return text


def fill(message: Message, block: tree.Block) -> None:
    """The protobuf message that a tree.Block means."""
    for name, entry in block.entries.items():
        for value in entry.values:
            if isinstance(value.value, tree.Block):
                target = getattr(message, name)
                inner = target.add() if entry.field.is_repeated else target
                inner.SetInParent()
                fill(inner, value.value)
            elif entry.field.is_repeated:
                getattr(message, name).append(value.value)
            elif entry.field.enum_type is not None:
                setattr(message, name, entry.field.enum_type.values_by_name[value.value].number)
            else:
                setattr(message, name, value.value)


def agrees(text: str, kind: type[Message]) -> bool:
    """Whether text_format reads it. What it doesn't is a mistake here, and what it does the same message."""
    problems, message = Problems(), kind()
    block = parse("file", text, kind.DESCRIPTOR, problems)
    try:
        theirs = text_format.Parse(text, kind())
    except text_format.ParseError:
        assert problems, text
        return False
    # What is refused here alone: numbers that are not finite, NUL characters, retired fields.
    told = " ".join(p.message for p in problems.all())
    if any(word in told for word in ("must be finite", "NUL", "was retired")):
        return False
    assert not problems, (text, told)
    fill(message, block)
    assert message == theirs
    return True


TEXT = {
    "words": st.lists(st.sampled_from(WORDS), max_size=14).map(" ".join),
    "fields": st.lists(fields(), max_size=3).map("".join),
    "changed texts": changed(),
}


@pytest.mark.parametrize("drawn", TEXT)
@given(data=st.data())
@examples(600)
def test_agrees_with_text_format(drawn, data):
    text = data.draw(TEXT[drawn])
    agrees(text, stagerun_pb2.Solver)
    if drawn == "words":
        agrees(text, stagerun_pb2.Schedule)


@pytest.mark.parametrize(
    "text",
    [
        "base_lr: 1.0f max_iter: 0x10 warmup_iter: 010, power: -1.5e-3; gamma: .5",
        'clear: "a" \'b\'\n"c" clear: [\'d\', "e" "f"] stepvalue: []',
        'type: "\\a\\b\\f\\n\\r\\t\\v\\\\\\\'\\"\\x4\\x41\\7\\101\\303\\251\\u00e9\\U0001F600é"',
        "param < kind: NORM > param { kind: 2 } param: [{ lr_mult: 2 }, < >]",
        "transform_param: { mirror: 1 } carry { data: RESTART } channels_last: f precision: 0x1",
        "# only a comment",
        "",
        "max_iter: 9223372036854775807 display: -9223372036854775808",
        "\tmax_iter:\t3\r\n\N{NO-BREAK SPACE}base_lr:1#",
    ],
)
def test_what_text_format_reads_is_read_the_same(text):
    assert agrees(text, stagerun_pb2.Solver)


def mistakes(text: str | bytes) -> tuple[Any, ...]:
    parse("f", text, SCHEDULE, problems := Problems())
    return problems.all()


@pytest.mark.parametrize(
    "text",
    ["".join(f"x{i}: ? " for i in range(9000)), "{" * 100_000, "stage {" * 30_000, "[" * 100_000],
    ids=["fields", "braces", "stages", "brackets"],
)
def test_a_file_that_is_something_else_ends_soon(text):
    start = time.process_time()
    assert 0 < len(mistakes(text)) <= 102
    assert time.process_time() - start < 5


def test_a_file_may_not_be_large():
    assert not mistakes(b"#" * LARGEST)
    assert "larger than 1 MB" in mistakes(b"#" * (LARGEST + 1))[0].message
