"""Parses protobuf's text format as a Block, for the messages of a .proto, with every mistake of the file and every position.

google.protobuf.text_format stops at the first mistake and keeps no positions. This parser continues at the next field. Accepted text
means the same in both; this parser also refuses numbers that are not finite, NUL characters, bytes that are not UTF-8, escapes without
a meaning, and files above LARGEST bytes. Pure.
"""

import re
from collections.abc import Callable
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base.errors import Problems, Span, listing, nearest
from stagerun.language import arguments, lexer
from stagerun.language.lexer import CLOSING, Cursor, Kind, Token, TooManyMistakes, WrongValue, shown, tokens, wanted
from stagerun.language.tree import SCHEDULE, SOLVER, Block, Entry, Value, is_message, retired, takes_arguments

LARGEST = 1_000_000  # bytes of a file
BEGINNING = 4096  # bytes that show whether it is text
_NO_TEXT = re.compile("[\\0\\ud800-\\udfff]")  # surrogates stand for bytes that are not UTF-8

# The entries of a block that is being read: its values still grow.
Read = dict[str, tuple[FieldDescriptor, Span, list[Value]]]


def parse(
    path: str,
    data: bytes | str,
    kind: Descriptor,
    problems: Problems,
    grammar: "Callable[[str, list[Token], Problems], Reader] | None" = None,
) -> Block:
    """Read the message in a file. Unreadable parts are reported, and doubtful in the Block. `grammar`: for the messages
    of another .proto, whose unknown fields have other hints."""
    start = Span(path, 1, 1)
    text = _decoded(start, data, problems)
    if text is not None:
        reader = (grammar or Reader)(path, tokens(text), problems)
        try:
            return reader.block(kind, start, None)
        except TooManyMistakes:
            message = f"more than {lexer.MOST_MISTAKES} mistakes; the rest is not read"
            problems.add(reader.span(reader.token), message, "is it a solver file?")
    return Block(kind, start, broken=True)


def _decoded(start: Span, data: bytes | str, problems: Problems) -> str | None:
    """Return the text of a file, and add its lines to `problems`; None after a mistake."""
    # UTF-16 has NUL bytes too, and begins with one of two marks.
    binary = isinstance(data, bytes) and b"\0" in data[:BEGINNING] and data[:2] not in (b"\xff\xfe", b"\xfe\xff")
    hint = "is it a .prototxt? a .caffemodel or .solverstate is not text" if binary else ""
    if len(data) > LARGEST:
        message = f"the file is larger than {LARGEST // 1_000_000} MB"
        problems.add(start, message, hint or "is it a solver file or a net?")
        return None
    text = data if isinstance(data, str) else data.decode(errors="surrogateescape")
    text = text.removeprefix("\N{BYTE ORDER MARK}")
    problems.file(start.path, text)
    wrong = _NO_TEXT.search(text)
    if wrong is None:
        return text
    before = text[: wrong.start()]
    span = Span(start.path, before.count("\n") + 1, len(before) - before.rfind("\n"))
    if wrong[0] == "\0":
        problems.add(span, "the file holds a NUL character", hint or "is it a text file?")
    else:
        problems.add(span, f"byte 0x{ord(wrong[0]) % 256:02x} is not UTF-8", hint or "save the file as UTF-8")
    return None


def parse_value(
    path: str, line: int, column: int, text: str, field: FieldDescriptor, problems: Problems
) -> Entry | None:
    """Read the value of one field in an argument's text from `column` on; None after a mistake."""
    reader = Reader(path, tokens("\n" * (line - 1) + " " * (column - 1) + text), problems)
    span = Span(path, line, 1, max(1, column - 2))
    before = problems.count(path)
    try:
        values = reader.values(field, span)
        if values is not None and not reader.at_end:
            reader.fail(
                reader.token, f"`{shown(reader.token.text)}` after the value of `{field.name}`", "give one value"
            )
    except TooManyMistakes:  # in earlier arguments, or in a very long one
        return None
    return Entry(field, span, values) if values is not None and problems.count(path) == before else None


class Reader(Cursor):
    """The grammar."""

    def __init__(self, path: str, tokens: list[Token], problems: Problems) -> None:
        super().__init__(path, tokens, problems)
        # The number of unclosed messages: if any, a field that belongs one level up shows where the brace is missing.
        self.unclosed = sum(t.text in ("{", "<") for t in tokens) - sum(t.text in ("}", ">") for t in tokens)
        self.around: list[Descriptor] = []  # the messages around the current one
        self.swallowed = False  # the file ended inside a message, whose last fields may belong outside

    def block(self, kind: Descriptor, span: Span, opening: Token | None) -> Block:
        """Read fields up to the brace that closes `opening`, or to the end of the file."""
        read: Read = {}
        doubtful: set[str] = set()
        broken = self.fields(kind, opening, read, doubtful)
        entries = {name: Entry(field, span, tuple(values)) for name, (field, span, values) in read.items()}
        return Block(kind, span, entries, frozenset(doubtful), broken)

    def fields(self, kind: Descriptor, opening: Token | None, read: Read, doubtful: set[str]) -> bool:
        """Read the fields of a block into `read`; return whether its end is missing."""
        closing = CLOSING[opening.text] if opening else ""
        while not self.at_end:
            token = self.token
            if token.kind is Kind.WORD:
                if opening and self.belongs_outside(kind, token):
                    self.unclosed -= 1
                    hint = f"`{token.text}` in line {token.line} belongs outside it; add the missing `{closing}` before"
                    self.fail(opening, f"`{opening.text}` is never closed", hint)
                    return True
                self.field(kind, read, doubtful)
            elif self.took("}", ">"):
                if opening is None:
                    self.fail(token, f"`{token.text}` closes nothing", "take it out, or look for a missing `{` above")
                    continue
                if token.text != closing:
                    hint = f"`{opening.text}` is in line {opening.line}"
                    self.fail(token, f"`{token.text}` where `{closing}` is expected", hint)
                return False
            else:
                hint = self.hint_for_comma(token)
                self.fail(self.take(), f"expected a field's name, not `{shown(token.text)}`", hint)
                self.skip()
        if opening:
            self.fail(opening, f"`{opening.text}` is never closed", f"add the missing `{closing}`")
            self.swallowed = True
        return self.swallowed

    def hint_for_comma(self, token: Token) -> str:
        """Return a hint about `0,1` without brackets; '' for other tokens."""
        if self.at < 3 or token.kind is not Kind.NUMBER or self.tokens[self.at - 1].text != ",":
            return ""
        pair = shown(self.tokens[self.at - 2].text), shown(token.text)
        hint = f"a list of numbers needs brackets: `[{', '.join(pair)}]`"
        return f"a number has a point: `{'.'.join(pair)}`; {hint}" if all(map(str.isdecimal, pair)) else hint

    def belongs_outside(self, kind: Descriptor, name: Token) -> bool:
        """Return whether a brace is missing before this field: an outer message has it, and this one lacks it."""
        in_outer = any(name.text in outer.fields_by_name for outer in self.around)
        return self.unclosed > 0 and in_outer and name.text not in kind.fields_by_name and self.starts_field("=")

    def field(self, kind: Descriptor, read: Read, doubtful: set[str]) -> None:
        """Read one field into `read`, or report its mistake."""
        name = self.take()
        field = kind.fields_by_name.get(name.text)
        if field is None:
            self.unknown(kind, name, doubtful)
            return
        if hint := retired(field):
            self.fail(name, f"`{name.text}` was retired", hint)
            doubtful.add(name.text)
            self.pass_over()
            return
        values = self.after_name(field, name)
        # Separators are optional; text_format takes one after a field.
        self.took(",", ";")
        if values is None:
            doubtful.add(name.text)
        elif name.text not in read:
            read[name.text] = field, self.span(name), list(values)
        elif field.is_repeated:
            read[name.text][2].extend(values)
        else:
            hint = f"it is already in line {read[name.text][1].line}"
            self.fail(name, f"`{name.text}` is set twice", hint)

    def unknown(self, kind: Descriptor, name: Token, doubtful: set[str]) -> None:
        hint = hint_for_unknown(name.text, kind)
        if hint.startswith("did you mean"):
            doubtful.add(hint.split("`")[1])
        self.fail(name, f"{kind.name} has no field `{shown(name.text)}`", hint)
        self.pass_over()

    def pass_over(self) -> None:
        """Skip the value of a field whose name is taken."""
        self.took(":", "=")
        self.skip()
        self.took(",", ";")

    def after_name(self, field: FieldDescriptor, name: Token) -> tuple[Value, ...] | None:
        """Read the colon and the value; None, with both skipped, after a mistake."""
        message = is_message(field)
        if (
            self.took(":")
            or (message and self.looking_at(*CLOSING))
            or (takes_arguments(field) and self.looking_at("{"))
        ):
            if not self.no_value() or (takes_arguments(field) and not self.looking_at("{")):
                return self.values(field, self.span(name))
            example = f"{field.name} {{ ... }}" if message else f"{field.name}: ..."
            self.fail(name, f"`{field.name}` has no value", f"write `{example}`; it is {wanted(field)}")
            return None
        if message:
            self.fail(name, f"`{field.name}` is a message, but no `{{` follows", f"write `{field.name} {{ ... }}`")
            while self.token.line == name.line and not self.at_end and not self.looking_at("}", ">"):
                self.take()  # the rest of the line belongs inside
            return None
        hint = f"write `{field.name}: ...`"
        if self.looking_at("{", "<"):
            inside = f"{field.name}_param"  # `stage { solver { ... } }`
            if inside in field.containing_type.fields_by_name:
                hint = f"write `{inside} {{ ... }}`"
            self.fail(name, f"`{field.name}` is {wanted(field)}, not a message", hint)
        else:
            if self.took("="):
                hint = f"write `:` instead of `=`: `{field.name}: {shown(self.token.text)}`"
            elif self.token.kind in (Kind.NUMBER, Kind.STRING):
                hint = f"write `{field.name}: {shown(self.token.text)}`"
            self.fail(name, f"no `:` after `{field.name}`", hint)
        self.skip()
        return None

    def no_value(self) -> bool:
        """Return whether the next token can't be a value because it starts the next field or ends the block."""
        return self.starts_field() or self.at_end or self.looking_at("}", ">", ",", ";", "]")

    def values(self, field: FieldDescriptor, name: Span) -> tuple[Value, ...] | None:
        """Read a value, or a list in brackets; None after a mistake."""
        opening = self.token
        if takes_arguments(field):
            return self.in_braces(field)
        if not self.looking_at("["):
            value = self.value(field, name)
            return None if value is None else (value,)
        if not field.is_repeated:
            sweep = f"to train with each, write one `sweep {{ name: ... solver {{ {field.name}: ... }} }}` for each combination"
            sweep += " of values: lists are not multiplied"
            hint = sweep if field.containing_type.name == "Solver" else "write one of them"
            self.fail(opening, f"`{field.name}` takes one value, not a list", hint)
            self.skip()
            return None
        self.take()
        listed: list[Value | None] = []
        while not self.took("]"):
            if listed and not self.took(","):
                if listed[-1] is not None:
                    hint = f"the list starts in line {opening.line}"
                    self.fail(self.token, "expected `,` or `]`" + self.instead(), hint)
            elif self.no_value():
                self.fail(self.token, f"expected a value of `{field.name}`" + self.instead())
            else:
                listed.append(self.value(field, name, listed=True))
                continue
            self.skip("]")
            return None
        return tuple(v for v in listed if v) if all(listed) else None

    def in_braces(self, field: FieldDescriptor) -> tuple[Value, ...] | None:
        """Read `{ name: value ... }` with any names as one text; None, with all of it skipped, after a mistake."""
        opening, before = self.token, self.problems.count(self.path)
        if not self.took("{"):
            message = f"`{field.name}` is `{{ name: value ... }}`" + self.instead()
            self.fail(opening, message, f"write `{field.name} {{ width: 64 }}`")
            self.skip()
            return None
        parsed = list(arguments.parse(self, opening))
        if self.at_end and self.tokens[self.at - 1].text != "}":
            self.swallowed = True
        if not parsed and self.problems.count(self.path) == before:
            self.fail(opening, f"`{field.name}` is empty", "remove it")
        if self.problems.count(self.path) > before:
            return None
        text = arguments.written({name: value for name, value, _ in parsed})
        return (Value(text, text, self.span(opening), {name: span for name, _, span in parsed}),)

    def value(self, field: FieldDescriptor, name: Span, listed: bool = False) -> Value | None:
        token = self.token
        if is_message(field) and self.took("{", "<"):
            # In a list, the span of a message is its brace.
            span = self.span(token) if field.is_repeated and name.line != token.line else name
            self.around.append(field.containing_type)
            block = self.block(field.message_type, span, token)
            self.around.pop()
            return Value(block, "", span)
        if is_message(field) or token.kind in (Kind.MARK, Kind.END):
            hint = ""
            if is_message(field):
                hint = f"write `{field.name} {{ ... }}`"
                for first in field.message_type.fields[:1]:  # a message that nothing reads has none
                    hint += f"; inside goes, for example, `{first.name}`: {wanted(first)}"
            self.fail(token, f"`{field.name}` is {wanted(field)}" + self.instead(), hint)
            self.skip()
            return None
        try:
            self.take()
            if field.type == FieldDescriptor.TYPE_STRING:
                return self.string(field, token)
            if token.kind is Kind.NUMBER and self.looking_at(*"%*/^"):
                raise WrongValue(f"is {wanted(field)}, not `{token.text}{self.token.text}`", lexer.PLAIN)
            return Value(lexer.read(field, token), token.text, self.span(token))
        except WrongValue as wrong:
            self.fail(self.tokens[self.at - 1], f"`{field.name}` {wrong.message}", wrong.hint)
            if not listed:
                self.skip()
            return None

    def string(self, field: FieldDescriptor, first: Token) -> Value:
        """Read adjacent string literals as one."""
        if first.kind is not Kind.STRING:
            what = shown(first.text)
            raise WrongValue(f"is a text in quotes, not `{what}`", f'write `{field.name}: "{what}"`')
        data, text = lexer.string(first), first.text
        while self.token.kind is Kind.STRING:
            token = self.take()
            data, text = data + lexer.string(token), f"{text} {token.text}"
        return Value(lexer.utf8(data), text, self.span(first))


def hint_for_unknown(name: str, kind: Descriptor) -> str:
    """Return a hint about a field that messages of this kind lack."""
    fields = kind.fields_by_name
    if ELSEWHERE.get(name) in fields:
        return f"did you mean `{ELSEWHERE[name]}`?"
    if kind is SOLVER and name in SCHEDULE.fields_by_name:
        return "it is a field of Schedule: write it in schedule.prototxt"
    if kind is SCHEDULE and name in SOLVER.fields_by_name:
        return "it is a field of Solver: write it in the stage's file, or in `solver { ... }` for every stage"
    hint = CAFFE.get(name) or _of_another(name, kind) or nearest(name, fields)
    return hint or f"`stagerun help {kind.name}` lists them"


def _of_another(name: str, kind: Descriptor) -> str:
    """Return a hint about a field of another message, or ''."""
    owners = [m for m in _messages() if name in m.fields_by_name]
    inside = [f.name for f in kind.fields if f.message_type in owners]
    if inside:
        return f"write it inside of {listing([f + ' { ... }' for f in inside])}"
    return f"`{name}` is a field of {' and '.join(dict.fromkeys(m.name for m in owners))}" if owners else ""


@cache
def _messages() -> list[Descriptor]:
    messages = [SCHEDULE]
    for message in messages:  # grows during the loop
        messages += [f.message_type for f in message.fields if is_message(f) and f.message_type not in messages]
    return messages


# -- what to write instead of Caffe's fields that stagerun lacks
CAFFE: dict[str, str] = {
    **dict.fromkeys(
        ("train_net", "net_param", "train_net_param"),
        'a net is a file with the layers of both phases: `net: "train_val.prototxt"`',
    ),
    **dict.fromkeys(
        ("test_net", "test_net_param"),
        "training and evaluation share one network; the images of the evaluation are `data { val { ... } }` in "
        "schedule.prototxt",
    ),
    "train_state": "leave it out: a network has no phases or levels here",
    "test_state": "leave it out: a network has no phases or levels here",
    "solver_mode": "leave it out: the command line chooses the device",
    "device_id": "leave it out: the command line chooses the device",
    "solver_type": 'write `type: "..."`; `stagerun help type` lists them',
    "snapshot_prefix": "leave it out: snapshots go to ./out/NAME/snapshots, or below the folder of --out",
    "snapshot_after_train": "leave it out: a stage always ends with a snapshot",
    "snapshot_diff": "leave it out: a snapshot holds weights, momentum and position, not gradients",
    "snapshot_format": "leave it out: snapshots have one format",
    "test_initialization": "leave it out: `test_interval` sets when the stage is evaluated",
    "test_compute_loss": "leave it out: an evaluation always has the loss",
    "debug_info": "leave it out",
    "layer": "a network is not described in layers: `model` in schedule.prototxt names one",
    "data_param": "`data` in schedule.prototxt names the images",
    "sweep": "sweeps belong in `stage { ... }` and are not nested: write one `sweep { ... }` for each combination",
    "carry_momentum": "write `carry { momentum: KEEP }`",
    "lr_mult": 'write `param { name: "..." lr_mult: ... }`',
    "decay_mult": 'write `param { name: "..." decay_mult: ... }`',
}

# Names of other programs for the same thing.
ELSEWHERE: dict[str, str] = {
    "learning_rate": "base_lr",
    "lr": "base_lr",
    "epochs": "max_epoch",
    "num_epochs": "max_epoch",
    "warmup_epochs": "warmup_epoch",
    "nesterov": "type",
    "optimizer": "type",
    "file": "solver",
    "scale": "min_area_ratio",
}
