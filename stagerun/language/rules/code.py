"""What a schedule says of Python: files and functions that are not there, and arguments that they don't take. Pure."""

from collections.abc import Iterable
from contextlib import suppress

from stagerun.base.code import Code
from stagerun.base.errors import Problems, listing, nearest
from stagerun.language import arguments
from stagerun.language.code import LocalFiles, Signature
from stagerun.language.networks import code_in
from stagerun.language.rules.rule import Found
from stagerun.language.tree import Block, Entry
from stagerun.language.view import Doubtful, View

# What a function that this field names gets besides `args`, where it takes it by that name.
_GIVEN = {"name": ("num_classes", "channels"), "function": ("num_classes",)}


def require_code(entries: Iterable[tuple[Block, Entry]], local: LocalFiles, problems: Problems) -> list[str]:
    """The files that these entries need; each with its message. What is wrong with them, in them, or in how they are called is a problem."""
    needed: dict[str, None] = {}
    for block, entry in entries:
        code = code_in(str(entry.values[0].value))
        if code is None:
            continue
        needed |= dict.fromkeys(local.require(code, entry.place))
        taken = local.signature(code) if code.file else None
        if taken is not None:
            what = f"`{code.function}` in {local.path(code.file)}:{taken.line}"
            called = _call if entry.field.name in _GIVEN else _transform
            with suppress(Doubtful):
                for span, message, hint in called(block, entry, code, taken):
                    problems.add(span, f"{what} {message}", hint)
    return list(needed)


def _call(block: Block, entry: Entry, code: Code, taken: Signature) -> Found:
    """A function takes the `args` beside `entry`, and needs no others."""
    names = arguments.read(View(block).text("args"))
    given = _GIVEN[entry.field.name]
    settable = [name for name in taken.names if name not in given]
    for name in names:
        if name not in (*taken.names, *given) and not taken.more[1]:
            args = block.entries["args"].values[0]
            hint = nearest(name, settable) or (f"it takes {listing(settable, 'and')}" if settable else "remove it")
            yield args.names.get(name, args.span), f"takes no `{name}`", hint
    missing = [name for name in taken.required if name not in (*names, *given)]
    if missing:
        hint = f"write `args {{ {missing[0]}: ... }}`"
        if entry.field.name == "function":
            hint += f"; `{code.function}` is called once, and returns the function of (logits, targets)"
        yield entry.place, f"needs {listing(missing, 'and')}", hint


def _transform(block: Block, entry: Entry, code: Code, taken: Signature) -> Found:
    """A function that changes images is called with two values."""
    least = [name for name in taken.required if name in taken.positional]
    by_name = [name for name in taken.required if name in taken.named]
    if len(least) > 2 or by_name or (len(taken.positional) < 2 and not taken.more[0]):
        hint = f"write `def {code.function}(image, rng):`; others need a default"
        yield entry.place, "can't be called with an image and a numpy Generator", hint
