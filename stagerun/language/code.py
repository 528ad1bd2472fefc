"""Python files that a schedule names, read and never imported: which files they import in turn, what is wrong with them, and a
digest of all. Pure, but for the reader that is passed in."""

import ast
import hashlib
import posixpath
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from stagerun.base.code import Code, Sources
from stagerun.base.errors import Problems, Span, nearest
from stagerun.base.recipe import ABSENT

# A file of such a name would be imported in place of what Python, torch or stagerun import by it.
RESERVED = frozenset(sys.stdlib_module_names) | {"numpy", "stagerun", "torch", "torchvision"}
LARGEST = 1_000_000  # bytes of a file
DIGITS = 16  # of a digest: it tells edits apart, and is shown as it is


@dataclass(frozen=True, slots=True)
class Unreadable:
    """In place of the text of a file that can't be read: why, as the end of `FILE: ...`."""

    reason: str


MISSING = Unreadable("there is no such file")
Text = bytes | str | Unreadable
Reader = Callable[[str], Text]  # a path below the schedule's folder -> its text


# -- what a function takes, by its text: what calling it would raise is known without an import

_BY_TEXT = ("exec", "globals", "locals", "setattr", "vars")


@dataclass(frozen=True, slots=True)
class Signature:
    """`positional` can be given by place and by name, `named` by name alone. `required` have no default. `more`: others by place, by name."""

    line: int
    positional: tuple[str, ...]
    named: tuple[str, ...]
    required: tuple[str, ...]
    more: tuple[bool, bool]

    @property
    def names(self) -> tuple[str, ...]:
        return self.positional + self.named


def signature(tree: ast.Module, name: str) -> Signature | None:
    """None where it isn't certain: it is known of a function, or a class with an `__init__`, that the file defines once, at its top level
    and without decorators."""
    found = _only(tree, name)
    if isinstance(found, ast.ClassDef) and not found.decorator_list and not found.keywords:
        own = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
        init = None if "__new__" in own else _only(found, "__init__")
        return _of(init, bound=True) if init is not None else None
    return _of(found, bound=False)


def _only(scope: ast.Module | ast.ClassDef, name: str) -> ast.stmt | None:
    """The definition of a name directly in a scope, if nothing there looks as if it gave the name another meaning."""
    defined = [n for n in scope.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
    others = [n for n in ast.walk(scope) if n not in defined and _may_define(n, name)]
    return defined[0] if len(defined) == 1 and not others else None


def _may_define(node: ast.AST, name: str) -> bool:
    """Any mention of the name but a use of it, `from x import *`, and what defines names by their text."""
    if (isinstance(node, ast.Name) and node.id in _BY_TEXT) or (isinstance(node, ast.alias) and node.name == "*"):
        return True
    if isinstance(node, ast.Constant | ast.keyword | ast.arg) or isinstance(getattr(node, "ctx", None), ast.Load):
        return False
    # The names that a node holds as texts: of what it defines, imports, catches or declares global.
    values = [value for _, value in ast.iter_fields(node)]
    owner = getattr(node.value, "id", "") if isinstance(node, ast.Attribute) else ""
    return name == owner or any(name in value if isinstance(value, list) else name == value for value in values)


def _of(node: ast.stmt | None, *, bound: bool) -> Signature | None:
    """`bound`: the first parameter is the object itself."""
    if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.args.posonlyargs:
        return None
    args = node.args
    positional, named = [a.arg for a in args.args], [a.arg for a in args.kwonlyargs]
    if bound and not positional:
        return None
    needed = positional[bound : max(bound, len(positional) - len(args.defaults))]
    needed += [name for name, default in zip(named, args.kw_defaults, strict=True) if default is None]
    more = args.vararg is not None, args.kwarg is not None
    return Signature(node.lineno, tuple(positional[bound:]), tuple(named), tuple(needed), more)


# -- the files of a schedule


class LocalFiles:
    """The Python files below a schedule's folder, as far as someone asked for them. Each is read and looked at once. `shown` is the
    folder as the user wrote it."""

    def __init__(self, read: Reader, shown: str, problems: Problems) -> None:
        self.read, self.shown, self.problems = read, shown, problems
        self.text, self.tree = cache(self._text), cache(self._tree)
        self.imported, self.signature = cache(self._imported), cache(self._signature)

    def require(self, code: Code, place: Span) -> tuple[str, ...]:
        """The files that a function comes from, sorted: its own, and all that those import of each other. What is wrong is a problem
        at `place`, or in the Python file. Empty for an installed package."""
        if not code.file:
            beside = f"{code.module.replace('.', '/')}.py"
            if not installed(code.top) and not isinstance(self.text(beside), Unreadable):
                message = f"no package `{code.top}` is installed, and there is a file {self.path(beside)}"
                self.problems.add(place, message, f'write `"{beside}:{code.function}"`')
            return ()
        if not self._require_importable(code.file, place, "it belongs beside schedule.prototxt"):
            return ()
        tree = self.tree(code.file)
        names = set(_names(tree)) if tree is not None else {"*"}
        if not names & {code.function, "*"}:
            hint = nearest(code.function, names) or "define it in that file, outside of other functions and classes"
            self.problems.add(place, f"{self.path(code.file)} has no function `{code.function}`", hint)
        return self.closure(code.file)

    def closure(self, file: str) -> tuple[str, ...]:
        """The file, and what it imports below the folder, sorted."""
        found = [file]
        for one in found:  # grows while it is walked
            found += [imported for imported in self.imported(one) if imported not in found]
        return tuple(sorted(found))

    def sources(self, files: Iterable[str]) -> Sources:
        return Sources(self.shown, tuple((f, self._decoded(f) or "") for f in sorted(set(files))))

    def path(self, file: str) -> str:
        return posixpath.join(self.shown, file)

    def _signature(self, code: Code) -> Signature | None:
        """What a function of one of these files takes; None where that isn't certain."""
        tree = self.tree(code.file)
        return signature(tree, code.function) if tree is not None else None

    def _text(self, file: str) -> Text:
        text = self.read(file)
        large = isinstance(text, bytes) and len(text) > LARGEST
        return Unreadable(f"the file is larger than {LARGEST // 1_000_000} MB") if large else text

    def _decoded(self, file: str) -> str | None:
        """None where it can't be read, which is a problem by then."""
        text = self.text(file)
        if isinstance(text, bytes):
            try:
                return text.decode()
            except UnicodeDecodeError as error:
                line = text.count(b"\n", 0, error.start) + 1
                self.problems.add(Span(self.path(file), line, 1), "the line is not UTF-8", "save the file as UTF-8")
        return text if isinstance(text, str) else None

    def _tree(self, file: str) -> ast.Module | None:
        """None where it can't be read as Python, which is a problem in it by then."""
        text, path = self._decoded(file), self.path(file)
        if text is None:
            return None
        self.problems.file(path, text)
        return _parsed(text.removeprefix("\N{BYTE ORDER MARK}"), path, self.problems)

    def _imported(self, file: str) -> list[str]:
        """The files below the folder that this one imports, its packages' `__init__.py` included."""
        package = posixpath.dirname(file).replace("/", ".")
        found, tree = self._files_of(package), self.tree(file)
        for node in ast.walk(tree) if tree is not None else ():
            for one in [one for module in _modules(node, package) for one in self._files_of(module)]:
                assert isinstance(node, ast.Import | ast.ImportFrom)
                width = (node.end_col_offset or 0) - node.col_offset
                self._require_importable(one, Span(self.path(file), node.lineno, node.col_offset + 1, width))
                found.append(one)
        return [one for one in dict.fromkeys(found) if one != file]

    def _files_of(self, module: str) -> list[str]:
        """The files below the folder that an import of `a.b` runs: `a/__init__.py`, then `a/b/__init__.py` or `a/b.py`."""
        found: list[str] = []
        path = ""
        for word in module.split(".") if module else ():
            path = posixpath.join(path, word)
            either = (f"{path}/__init__.py", f"{path}.py")
            found += [file for file in either if self.text(file) != MISSING][:1]
        return found

    def _require_importable(self, file: str, place: Span, hint: str = "") -> bool:
        """Whether the file could be read."""
        text = self.text(file)
        if isinstance(text, Unreadable):
            self.problems.add(place, f"{self.path(file)}: {text.reason}", hint)
        elif reserved := reserved_name(file):
            message = f"`{reserved}` is Python's or torch's own, and there is a file of that name"
            self.problems.add(place, message, f"rename {self.path(file)}")
        return not isinstance(text, Unreadable)


def reserved_name(file: str) -> str:
    """The name of a module that a file would take the place of, or ''."""
    top = file.partition("/")[0].removesuffix(".py")
    return top if top in RESERVED else ""


def _parsed(text: str, path: str, problems: Problems) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes like `"\d"`
            return ast.parse(text)
    except SyntaxError as error:
        line, column = error.lineno or 1, max(1, error.offset or 1)
        width = max(1, (error.end_offset or 0) - column) if error.end_lineno == line else 1
        problems.add(Span(path, line, column, width), f"this is not Python: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:  # NUL characters; nested a thousand times
        problems.add(Span(path, 1, 1), f"this can't be read as Python: {error}")
    return None


def _modules(node: ast.AST, package: str) -> list[str]:
    """The modules that a statement imports, dotted from the schedule's folder; names that may be modules included."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
    if not isinstance(node, ast.ImportFrom):
        return names
    words = package.split(".") if package and node.level else []
    if node.level - 1 > len(words):
        return []  # above the folder: Python refuses it
    base = ".".join([*words[: len(words) - node.level + 1], *([node.module] if node.module else [])])
    return [*([base] if base else []), *(f"{base}.{name}".lstrip(".") for name in names if name != "*")]


def _names(node: ast.AST) -> Iterator[str]:
    """What the statements of a module define for it; "*" for an import of everything."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield inner.name
        elif isinstance(inner, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in inner.names)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        else:
            yield from _names(inner)


def digest(files: Iterable[tuple[str, str]]) -> str:
    """The digest of Python files by path. Every character counts, those of comments too."""
    found = hashlib.sha256()
    for path, text in sorted(files):
        for part in (path.encode(), text.encode(errors="surrogatepass")):
            found.update(len(part).to_bytes(8, "big") + part)
    return f"sha256:{found.hexdigest()[:DIGITS]}"


@cache
def version(package: str) -> str:
    """That of an installed package, which is not imported: `1.0.15`; "unknown" for one without, and ABSENT."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    owners = metadata.packages_distributions().get(package)
    if owners:
        return metadata.version(owners[0])
    return "unknown" if installed(package) else ABSENT


def installed(package: str) -> bool:
    """Whether a top-level package can be found, which is not imported. The files of a schedule that ran in this process are none."""
    finders = [finder for finder in sys.meta_path if not getattr(finder, "of_schedule", False)]
    try:
        return any(finder.find_spec(package, None) is not None for finder in finders)
    except (ImportError, ValueError):
        return False
