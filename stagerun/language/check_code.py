"""Errors in what a schedule says of Python: files and functions that are not there, and arguments that they don't take. Pure."""

from collections.abc import Iterable
from contextlib import suppress

from stagerun.base.code import Code
from stagerun.base.errors import Problems, listing, nearest
from stagerun.language import arguments
from stagerun.language.code import LocalFiles
from stagerun.language.consent import unlisted
from stagerun.language.networks import TIMM, TIMM_ARGUMENTS, Network, code_in
from stagerun.language.signature import Signature
from stagerun.language.tree import Block, Entry
from stagerun.language.view import Doubtful, View

# What a function that this field names gets besides `args`, where it takes it by that name.
_GIVEN = {"name": ("num_classes", "channels"), "function": ("num_classes",)}


def require_code(entries: Iterable[tuple[Block, Entry]], local: LocalFiles, problems: Problems) -> list[str]:
    """The files that these entries need; each with its message. What is wrong with them, in them, or in how they are called is a problem."""
    needed: dict[str, None] = {}
    for block, entry in entries:
        code = code_in(str(entry.values[0].value))
        if code is not None:
            needed |= dict.fromkeys(local.require(code, entry.place))
            taken = local.signature(code) if code.file else None
            if taken is not None and entry.field.name in _GIVEN:
                _check_call(block, entry, code, taken, f"{local.path(code.file)}:{taken.line}", problems)
            elif taken is not None:
                _check_transform(entry, code, taken, f"{local.path(code.file)}:{taken.line}", problems)
    return list(needed)


def _check_call(block: Block, entry: Entry, code: Code, taken: Signature, where: str, problems: Problems) -> None:
    """The function in `where` takes the `args` beside `entry`, and needs no others."""
    written = block.entries.get("args")
    if written is None and (block.broken or "args" in block.doubtful):
        return
    args = written.values[0] if written is not None else None
    names = arguments.read(str(args.value)) if args is not None else {}
    given = _GIVEN[entry.field.name]
    settable = [name for name in taken.names if name not in given]
    for name in names:
        if args is not None and name not in taken.names and name not in given and not taken.more[1]:
            hint = nearest(name, settable) or (f"it takes {listing(settable, 'and')}" if settable else "remove it")
            problems.add(args.names.get(name, args.span), f"`{code.function}` in {where} takes no `{name}`", hint)
    missing = [name for name in taken.required if name not in (*names, *given)]
    if missing:
        hint = f"write `args {{ {missing[0]}: ... }}`"
        if entry.field.name == "function":
            hint += f"; `{code.function}` is called once, and returns the function of (logits, targets)"
        problems.add(entry.place, f"`{code.function}` in {where} needs {listing(missing, 'and')}", hint)


def _check_transform(entry: Entry, code: Code, taken: Signature, where: str, problems: Problems) -> None:
    """A function that changes images is called with two."""
    least = [name for name in taken.required if name in taken.positional]
    by_name = [name for name in taken.required if name in taken.named]
    if len(least) > 2 or by_name or (len(taken.positional) < 2 and not taken.more[0]):
        message = f"`{code.function}` in {where} can't be called with an image and a numpy Generator"
        problems.add(entry.place, message, f"write `def {code.function}(image, rng):`; others need a default")


def check_args(name: str, network: Network, model: View, problems: Problems) -> None:
    """`args` are of networks from outside, and don't say what has a field of its own."""
    with suppress(Doubtful):
        text = model.text("args")
        if text is None:
            return
        place = model.place("args")
        if not network.foreign:
            hint = "remove it: it is for a network from a file, from a package or of timm"
            problems.add(place, f"`args` means nothing for `{name}`", hint)
            return
        for word in arguments.read(text):
            if word in ("num_classes", "channels") or (name.startswith(TIMM) and word == "in_chans"):
                field = "channels" if word == "in_chans" else word
                problems.add(
                    place, f"`{word}` in `args`", f"write `{field}: ...` beside `args`: images are checked against it"
                )
            elif word in unlisted(name, text):
                other = 'take `weights { file: "timm/NAME" }` for weights; for another argument call timm in a file of your own'
                message = (
                    f"timm's networks are called with listed arguments alone, which open no file, and not with `{word}`"
                )
                problems.add(place, message, nearest(word, TIMM_ARGUMENTS) or other)
