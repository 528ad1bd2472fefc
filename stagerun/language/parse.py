"""Protobuf text format -> Block, for the messages of a .proto, with every mistake of the file and every place.

google.protobuf.text_format stops at the first mistake and keeps no places. This parser continues at the next field. What
it accepts means the same there; on top of what text_format refuses it refuses numbers that are not finite, NUL
characters, bytes that are not UTF-8, escapes without a meaning, and files above LARGEST bytes. Pure.
"""

from collections.abc import Callable

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base.errors import Problems, Span, listing, nearest
from stagerun.language import arguments, lexer
from stagerun.language.lexer import Kind, Token, WrongValue, shown, tokens
from stagerun.language.proto import stagerun_pb2
from stagerun.language.tree import SCHEDULE, SOLVER, Block, Entry, Value, is_message, retired

LARGEST = 1_000_000  # bytes of a file
BEGINNING = 4096  # bytes that show whether it is text
MOST_MISTAKES = 100  # of one file; after that the file is probably something else

CLOSING = {"{": "}", "<": ">", "[": "]"}


# The entries of a block that is being read: its values still grow.
Read = dict[str, tuple[FieldDescriptor, Span, list[Value]]]


class TooManyMistakes(Exception):
    """The rest of the file is not read."""


class Cursor:
    """A place in the tokens of a file, and where its mistakes go."""

    def __init__(self, path: str, found: list[Token], problems: Problems) -> None:
        self.path = path
        self.tokens = found
        self.at = 0
        self.problems = problems

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def take(self) -> Token:
        token = self.token
        if token.kind is not Kind.END:
            self.at += 1
        return token

    def took(self, *marks: str) -> bool:
        if self.token.kind is Kind.MARK and self.token.text in marks:
            self.at += 1
            return True
        return False

    def looking_at(self, *marks: str) -> bool:
        return self.token.kind is Kind.MARK and self.token.text in marks

    def span(self, token: Token) -> Span:
        return Span(self.path, token.line, token.column, max(1, len(token.text)))

    def fail(self, place: Token | Span, message: str, hint: str = "") -> None:
        self.problems.add(place if isinstance(place, Span) else self.span(place), message, hint)
        if self.problems.count(self.path) > MOST_MISTAKES:
            raise TooManyMistakes

    def instead(self) -> str:
        if self.token.kind is Kind.END:
            return ", but here is the end"
        return f", not `{shown(self.token.text)}`"

    def starts_field(self) -> bool:
        """Whether a name comes next, followed by what may follow a name."""
        following = self.tokens[min(self.at + 1, len(self.tokens) - 1)]
        return self.token.kind is Kind.WORD and following.kind is Kind.MARK and following.text in (":", "{", "<", "=")

    def may_start_field(self) -> bool:
        """Whether to go on reading here: a field, or a word at the start of a line."""
        first = self.at > 0 and self.tokens[self.at - 1].line != self.token.line
        return self.starts_field() or (first and self.token.kind is Kind.WORD)

    def skip_value(self) -> None:
        """Past what may be the value of a field that can't be read, up to the next field."""
        if self.looking_at("{", "<", "["):
            self.skip_nested()
        self.skip()

    def skip(self) -> None:
        """To the next name before a colon or brace, the next closing brace, or the end."""
        while self.token.kind is not Kind.END and not self.may_start_field() and not self.looking_at("}", ">"):
            if self.looking_at("{", "<", "["):
                self.skip_nested()
            else:
                self.take()

    def skip_list(self) -> None:
        """Out of a list in which something is wrong: past its bracket, or to the next field."""
        while self.token.kind is not Kind.END and not self.may_start_field() and not self.looking_at("}", ">"):
            if self.took("]"):
                return
            if self.looking_at("{", "<", "["):
                self.skip_nested()
            else:
                self.take()

    def skip_nested(self) -> None:
        """Past a bracket and everything up to the one that closes it."""
        opening = self.take()
        depth = 1
        while depth and self.token.kind is not Kind.END:
            if (
                opening.text == "["
                and self.starts_field()
                and self.tokens[self.at - 1].line != self.token.line
                and depth == 1
            ):
                return  # a list that is not closed must not swallow the file
            if self.looking_at("{", "<", "["):
                depth += 1
            elif self.looking_at("}", ">", "]"):
                depth -= 1
            self.take()
        if depth:
            self.fail(opening, f"`{opening.text}` is never closed", f"add the missing `{CLOSING[opening.text]}`")


def parse(
    path: str,
    data: bytes | str,
    kind: Descriptor,
    problems: Problems,
    grammar: "Callable[[str, list[Token], Problems], Reader] | None" = None,
) -> Block:
    """The message in a file; what could not be read of it is in `problems`, and doubtful in the Block. `grammar` is for
    the messages of another .proto, whose unknown fields have other hints.
    """
    start = Span(path, 1, 1)
    nothing = Block(kind, start, broken=True)
    size = len(data)
    # UTF-16 has such bytes too, and begins with one of its marks.
    binary = isinstance(data, bytes) and b"\0" in data[:BEGINNING] and data[:2] not in (b"\xff\xfe", b"\xfe\xff")
    not_text = "is it a .prototxt? a .caffemodel or .solverstate is not text"
    if size > LARGEST:
        hint = not_text if binary else "is it a solver file or a net?"
        problems.add(start, f"the file is larger than {LARGEST // 1_000_000} MB", hint)
        return nothing
    if isinstance(data, bytes):
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            before = data[: error.start].decode()
            span = Span(path, before.count("\n") + 1, len(before) - before.rfind("\n"))
            problems.file(path, data.decode(errors="replace"))
            problems.add(
                span, f"byte 0x{data[error.start]:02x} is not UTF-8", not_text if binary else "save the file as UTF-8"
            )
            return nothing
    else:
        text = data
        if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
            problems.add(start, "the text is not UTF-8", "save the file as UTF-8")
            return nothing
    text = text.removeprefix("\N{BYTE ORDER MARK}")
    problems.file(path, text)
    if (at := text.find("\0")) >= 0:
        span = Span(path, text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))
        problems.add(span, "the file holds a NUL character", "is it a text file?")
        return nothing
    reader = (grammar or Reader)(path, tokens(text), problems)
    try:
        block = reader.block(kind, start, None)
    except TooManyMistakes:
        span = reader.span(reader.token)
        problems.add(span, f"more than {MOST_MISTAKES} mistakes; the rest is not read", "is it a solver file?")
        return nothing
    return block


def parse_value(
    path: str, line: int, column: int, text: str, field: FieldDescriptor, problems: Problems
) -> Entry | None:
    """The value of one field, of an argument's text from `column` on. None, and a problem, if it can't be read."""
    found = [
        Token(t.kind, t.text, t.line + line - 1, t.column + (column - 1 if t.line == 1 else 0)) for t in tokens(text)
    ]
    reader = Reader(path, found, problems)
    place = Span(path, line, 1, max(1, column - 2))
    before = problems.count(path)
    try:
        values = reader.values(field, place)
    except TooManyMistakes:  # in the arguments before, or in a very long one
        return None
    if values is not None and reader.token.kind is not Kind.END:
        message = f"`{shown(reader.token.text)}` after the value of `{field.name}`"
        problems.add(reader.span(reader.token), message, "give one value")
    return Entry(field, place, values) if values is not None and problems.count(path) == before else None


class Reader(Cursor):
    """The grammar."""

    def __init__(self, path: str, found: list[Token], problems: Problems) -> None:
        super().__init__(path, found, problems)
        marks = [t.text for t in found if t.kind is Kind.MARK]
        # How many messages are never closed: then a field that belongs one level up shows where the brace is missing.
        self.unclosed = sum(m in "{<" for m in marks) - sum(m in "}>" for m in marks)
        self.around: list[Descriptor] = []  # the messages around the one that is read
        self.swallowed = False  # the end came inside of a message: what stands in it may belong outside

    def block(self, kind: Descriptor, place: Span, opening: Token | None) -> Block:
        """Fields up to the brace that closes `opening`, or to the end of the file."""
        read: Read = {}
        doubtful: set[str] = set()
        broken = self.fields(kind, opening, read, doubtful)
        entries = {name: Entry(field, span, tuple(values)) for name, (field, span, values) in read.items()}
        return Block(kind, place, entries, frozenset(doubtful), broken)

    def fields(self, kind: Descriptor, opening: Token | None, read: Read, doubtful: set[str]) -> bool:
        """The fields of a block, into `read`. Whether its end is missing."""
        closing = CLOSING[opening.text] if opening else None
        while True:
            token = self.token
            if token.kind is Kind.END:
                if opening:
                    self.fail(opening, f"`{opening.text}` is never closed", f"add the missing `{closing}`")
                    self.swallowed = True
                return self.swallowed
            if self.looking_at("}", ">"):
                self.take()
                if token.text == closing:
                    return False
                if opening:
                    self.fail(
                        token,
                        f"`{token.text}` where `{closing}` is expected",
                        f"`{opening.text}` stands in line {opening.line}",
                    )
                    return False
                self.fail(token, f"`{token.text}` closes nothing", "take it out, or look for a missing `{` above")
            elif token.kind is Kind.WORD:
                if opening and self.belongs_outside(kind, token):
                    self.unclosed -= 1
                    hint = (
                        f"`{token.text}` in line {token.line} belongs outside of it; add the missing `{closing}` before"
                    )
                    self.fail(opening, f"`{opening.text}` is never closed", hint)
                    return True
                self.field(kind, read, doubtful)
            else:
                hint = ""
                if self.at > 2 and token.kind is Kind.NUMBER and self.tokens[self.at - 1].text == ",":
                    pair = shown(self.tokens[self.at - 2].text), shown(token.text)
                    hint = f"numbers of a list stand in brackets: `[{', '.join(pair)}]`"
                    if all(map(str.isdecimal, pair)):
                        hint = f"a number has a point: `{'.'.join(pair)}`; {hint}"
                self.fail(self.take(), f"expected a field's name, not `{shown(token.text)}`", hint)
                self.skip()

    def field(self, kind: Descriptor, read: Read, doubtful: set[str]) -> None:
        """One field; into `read`, or what is wrong with it into the problems."""
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
        # Separators are optional, and one after a field is all that text_format takes.
        self.took(",") or self.took(";")
        if values is None:
            doubtful.add(name.text)
            return
        earlier = read.get(name.text)
        if earlier is None:
            read[name.text] = field, self.span(name), list(values)
        elif field.is_repeated:
            earlier[2].extend(values)
        else:
            self.fail(name, f"`{name.text}` is given twice", f"it already stands in line {earlier[1].line}")

    def belongs_outside(self, kind: Descriptor, name: Token) -> bool:
        """Whether a brace is missing before this field: a message around this one has it, and this one has not."""
        known = any(name.text in outer.fields_by_name for outer in self.around)
        return self.unclosed > 0 and known and name.text not in kind.fields_by_name and self.starts_field()

    def after_name(self, field: FieldDescriptor, name: Token) -> tuple[Value, ...] | None:
        """The colon and the value. None, and all of it skipped, if there is a mistake."""
        if takes_arguments(field) and self.token.text in (":", "{"):
            return self.in_braces(field)
        if self.took(":") or (is_message(field) and self.looking_at("{", "<", "[")):
            if self.no_value(field):
                example = f"{field.name} {{ ... }}" if is_message(field) else f"{field.name}: ..."
                self.fail(name, f"`{field.name}` has no value", f"write `{example}`; it is {_wanted(field)}")
                return None
            return self.values(field, self.span(name))
        if is_message(field):
            self.fail(name, f"`{field.name}` is a message, but no `{{` follows", f"write `{field.name} {{ ... }}`")
            while self.token.line == name.line and self.token.kind is not Kind.END and not self.looking_at("}", ">"):
                self.take()  # the rest of the line was meant to be inside
            return None
        elif self.looking_at("{", "<"):
            inside = f"{field.name}_param"  # `stage { solver { ... } }`
            hint = f"{inside} {{ ... }}" if inside in field.containing_type.fields_by_name else f"{field.name}: ..."
            self.fail(name, f"`{field.name}` is {_wanted(field)}, not a message", f"write `{hint}`")
        else:
            hint = f"write `{field.name}: ...`"
            if self.took("="):
                hint = f"write `:` in place of `=`: `{field.name}: {shown(self.token.text)}`"
            elif self.token.kind in (Kind.NUMBER, Kind.STRING):
                hint = f"write `{field.name}: {shown(self.token.text)}`"
            self.fail(name, f"no `:` after `{field.name}`", hint)
        self.skip_value()
        return None

    def no_value(self, field: FieldDescriptor) -> bool:
        """Whether the next token can't be a value because it starts the next field or ends the block."""
        following = self.tokens[min(self.at + 1, len(self.tokens) - 1)]
        is_name = self.token.kind is Kind.WORD and following.kind is Kind.MARK and following.text in (":", "{", "<")
        return is_name or self.token.kind is Kind.END or self.looking_at("}", ">", ",", ";", "]")

    def values(self, field: FieldDescriptor, name: Span) -> tuple[Value, ...] | None:
        """A value, or a list of them in brackets."""
        opening = self.token
        if takes_arguments(field):
            return self.in_braces(field)
        if not self.looking_at("["):
            value = self.value(field, name)
            return None if value is None else (value,)
        if not field.is_repeated:
            sweep = f"to train with each, write a `sweep {{ name: ... solver {{ {field.name}: ... }} }}` for each"
            hint = sweep if field.containing_type.name == "Solver" else "write one of them"
            self.fail(opening, f"`{field.name}` takes one value, not a list", hint)
            self.skip_value()
            return None
        self.take()
        found: list[Value | None] = []
        if self.took("]"):
            return ()
        while True:
            if self.no_value(field):
                self.fail(self.token, f"expected a value of `{field.name}`" + self.instead())
                self.skip_list()
                return None
            found.append(self.value(field, name, listed=True))
            if self.took("]"):
                return tuple(v for v in found if v) if all(found) else None
            if not self.took(","):
                if found[-1] is not None:
                    self.fail(
                        self.token, "expected `,` or `]`" + self.instead(), f"the list starts in line {opening.line}"
                    )
                self.skip_list()
                return None

    def in_braces(self, field: FieldDescriptor) -> tuple[Value, ...] | None:
        """`{ name: value ... }` with any names, as one text. None, and all of it skipped, if there is a mistake."""
        self.took(":")
        opening, before = self.token, self.problems.count(self.path)
        if not self.took("{"):
            self.fail(
                opening,
                f"`{field.name}` is `{{ name: value ... }}`" + self.instead(),
                f"write `{field.name} {{ width: 64 }}`",
            )
            self.skip_value()
            return None
        found: dict[str, arguments.Argument] = {}
        names: dict[str, Span] = {}
        while not self.took("}"):
            if self.token.kind is Kind.END:
                self.fail(opening, "`{` is never closed", "add the missing `}`")
                self.swallowed = True
                return None
            names.setdefault(self.token.text, self.span(self.token))
            self.argument(field, found)
        if not found and self.problems.count(self.path) == before:
            self.fail(opening, f"`{field.name}` is empty", "remove it")
        text = arguments.written(found)
        return (Value(text, text, self.span(opening), names),) if self.problems.count(self.path) == before else None

    def argument(self, field: FieldDescriptor, found: dict[str, arguments.Argument]) -> None:
        """One of them; into `found`, or what is wrong with it into the problems."""
        name = self.take()
        try:
            arguments.require_name(name.text)
            if name.text in found:
                raise WrongValue("is given twice", "remove one")
            if not self.took(":") and not self.looking_at("{"):
                raise WrongValue("has no value", f"write `{lexer.shown(name.text)}: ...`")
            if self.looking_at("{"):
                raise WrongValue("is a message, and arguments hold none", "write a number, a text or a list")
            found[name.text] = self.listed_arguments() if self.took("[") else arguments.scalar(self.take())
            self.took(",") or self.took(";")
        except WrongValue as wrong:
            self.fail(name, f"`{shown(name.text)}` {wrong.message}", wrong.hint)
            while self.token.kind is not Kind.END and not self.starts_field() and not self.looking_at("}"):
                if self.looking_at("{", "["):
                    self.skip_nested()
                else:
                    self.take()

    def listed_arguments(self) -> tuple[arguments.Scalar, ...]:
        """After the opening bracket."""
        found: list[arguments.Scalar] = []
        while not self.took("]"):
            found.append(arguments.scalar(self.take()))
            if not self.took(",") and not self.looking_at("]"):
                raise WrongValue("is a list that is not closed, or has no comma", "write `[2, 2]`")
        return tuple(found)

    def value(self, field: FieldDescriptor, name: Span, listed: bool = False) -> Value | None:
        token = self.token
        if is_message(field):
            if not self.looking_at("{", "<"):
                self.fail(token, f"`{field.name}` is a message" + self.instead(), f"write `{field.name} {{ ... }}`")
                self.skip_value()
                return None
            self.take()
            # In a list every message has its own place: its brace.
            place = self.span(token) if field.is_repeated and name.line != token.line else name
            self.around.append(field.containing_type)
            block = self.block(field.message_type, place, token)
            self.around.pop()
            return Value(block, "", place)
        if token.kind not in (Kind.WORD, Kind.NUMBER, Kind.STRING):
            self.fail(token, f"`{field.name}` is {_wanted(field)}" + self.instead())
            self.skip_value()
            return None
        try:
            if field.type == FieldDescriptor.TYPE_STRING:
                return self.string(field)
            self.take()
            value = Value(lexer.read(field, token), token.text, self.span(token))
        except WrongValue as wrong:
            self.fail(self.tokens[self.at - 1], f"`{field.name}` {wrong.message}", wrong.hint)
            if not listed:
                self.skip()
            return None
        return value

    def string(self, field: FieldDescriptor) -> Value:
        """Adjacent string literals, which count as one."""
        first = self.take()
        if first.kind is not Kind.STRING:
            raise WrongValue(
                f"is a text in quotes, not `{shown(first.text)}`", f'write `{field.name}: "{shown(first.text)}"`'
            )
        data, text = lexer.string(first), first.text
        while self.token.kind is Kind.STRING:
            token = self.take()
            data, text = data + lexer.string(token), f"{text} {token.text}"
        return Value(lexer.utf8(data), text, self.span(first))

    def unknown(self, kind: Descriptor, name: Token, doubtful: set[str]) -> None:
        hint = hint_for_unknown(name.text, kind)
        if hint.startswith("did you mean"):
            doubtful.add(hint.split("`")[1])
        self.fail(name, f"{kind.name} has no field `{shown(name.text)}`", hint)
        self.pass_over()

    def pass_over(self) -> None:
        """Past the value of a field whose name is taken, whatever it is."""
        if self.looking_at(":", "="):
            self.take()
        self.skip_value()
        self.took(",") or self.took(";")


def takes_arguments(field: FieldDescriptor) -> bool:
    return bool(field.GetOptions().Extensions[stagerun_pb2.arguments])


def _wanted(field: FieldDescriptor) -> str:
    return "a message" if is_message(field) else lexer.wanted(field)


def hint_for_unknown(name: str, kind: Descriptor) -> str:
    """What to write in place of a field that messages of this kind don't have."""
    known = kind.fields_by_name
    other = {SCHEDULE: SOLVER, SOLVER: SCHEDULE}.get(kind)
    if name in ELSEWHERE and ELSEWHERE[name] in known:
        return f"did you mean `{ELSEWHERE[name]}`?"
    if other is not None and name in other.fields_by_name:
        return _belongs(other)
    hint = CAFFE.get(name) or _elsewhere(name, kind) or nearest(name, known)
    return hint or f"`stagerun help {kind.name}` lists them"


def _belongs(kind: Descriptor) -> str:
    if kind is SCHEDULE:
        return "it is a field of Schedule: write it in schedule.prototxt"
    return "it is a field of Solver: write it in the stage's file, or in `solver { ... }` for every stage"


def _elsewhere(name: str, kind: Descriptor) -> str:
    """Where a field of another message is to be written."""
    owners = [m for m in _messages() if name in m.fields_by_name]
    inside = [f.name for f in kind.fields if f.message_type in owners]
    if inside:
        return f"write it inside of {listing([f + ' { ... }' for f in inside])}"
    return f"`{name}` is a field of {' and '.join(dict.fromkeys(m.name for m in owners))}" if owners else ""


def _messages() -> list[Descriptor]:
    found = [SCHEDULE]
    for message in found:  # grows while it is walked
        found += [f.message_type for f in message.fields if is_message(f) and f.message_type not in found]
    return found


# -- what to write in place of fields that people know from Caffe and stagerun doesn't have
CAFFE: dict[str, str] = {
    **dict.fromkeys(
        ("train_net", "net_param", "train_net_param"),
        'a net is a file of its own, with the layers of both phases: `net: "train_val.prototxt"`',
    ),
    **dict.fromkeys(
        ("test_net", "test_net_param"),
        "training and evaluation share one network; the images of the evaluation are `data { val { ... } }` in "
        "schedule.prototxt",
    ),
    "train_state": "leave it out: a network has no phases or levels here",
    "test_state": "leave it out: a network has no phases or levels here",
    "solver_mode": "leave it out: where it is computed is chosen on the command line",
    "device_id": "leave it out: where it is computed is chosen on the command line",
    "solver_type": 'write `type: "..."`; `stagerun help type` lists them',
    "snapshot_prefix": "leave it out: snapshots go to ./out/NAME/snapshots, or below the folder given with --out",
    "snapshot_after_train": "leave it out: a stage always ends with a snapshot",
    "snapshot_diff": "leave it out: a snapshot holds weights, momentum and place, not gradients",
    "snapshot_format": "leave it out: snapshots have one format",
    "test_initialization": "leave it out: `test_interval` says how often the stage is evaluated",
    "test_compute_loss": "leave it out: an evaluation always has the loss",
    "debug_info": "leave it out",
    "layer": "a network is not described in layers: `model` in schedule.prototxt names one",
    "data_param": "`data` in schedule.prototxt says where the images are",
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
}
