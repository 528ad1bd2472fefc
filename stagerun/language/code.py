"""Python files that a schedule names, read and never imported: the files they import in turn, their mistakes, and a digest of all. Pure,
except for the reader passed in."""

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

# A file with such a name would shadow a module of Python, torch or stagerun.
RESERVED = frozenset(sys.stdlib_module_names) | {"numpy", "stagerun", "torch", "torchvision"}
LARGEST = 1_000_000  # bytes of a file
DIGITS = 16  # of a digest: enough to tell edits apart, short enough to show


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for the text of an unreadable file: the reason, as the end of `FILE: ...`."""

    reason: str


MISSING = Unreadable("no such file")
Text = bytes | str | Unreadable
Reader = Callable[[str], Text]  # a path below the schedule's folder -> its text


# -- the parameters of a function, from its text: wrong calls are found without an import

_BY_TEXT = ("exec", "globals", "locals", "setattr", "vars")


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters of a function. `positional` can also be passed by name, `named` only by name. `required` have no default. `more`: whether it
    takes other positional, other named arguments."""

    line: int
    positional: tuple[str, ...]
    named: tuple[str, ...]
    required: tuple[str, ...]
    more: tuple[bool, bool]

    @property
    def names(self) -> tuple[str, ...]:
        return self.positional + self.named


def signature(tree: ast.Module, name: str) -> Signature | None:
    """Return the parameters of a function, or a class with an `__init__`, that the file defines once, at its top level and without
    decorators; None if uncertain."""
    definition = _only(tree, name)
    if isinstance(definition, ast.ClassDef) and not definition.decorator_list and not definition.keywords:
        methods = {node.name for node in definition.body if isinstance(node, ast.FunctionDef)}
        init = None if "__new__" in methods else _only(definition, "__init__")
        return _of(init, bound=True) if init is not None else None
    return _of(definition, bound=False)


def _only(scope: ast.Module | ast.ClassDef, name: str) -> ast.stmt | None:
    """Return the definition of a name directly in a scope, if nothing in the scope may redefine the name."""
    defined = [n for n in scope.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
    others = [n for n in ast.walk(scope) if n not in defined and _may_define(n, name)]
    return defined[0] if len(defined) == 1 and not others else None


def _may_define(node: ast.AST, name: str) -> bool:
    """Return whether a node mentions the name other than by reading it, is `from x import *`, or defines names by text."""
    if (isinstance(node, ast.Name) and node.id in _BY_TEXT) or (isinstance(node, ast.alias) and node.name == "*"):
        return True
    if isinstance(node, ast.Constant | ast.keyword | ast.arg) or isinstance(getattr(node, "ctx", None), ast.Load):
        return False
    # The names that a node holds as texts: names that it defines, imports, catches or declares global.
    values = [value for _, value in ast.iter_fields(node)]
    owner = getattr(node.value, "id", "") if isinstance(node, ast.Attribute) else ""
    return name == owner or any(name in value if isinstance(value, list) else name == value for value in values)


def _of(node: ast.stmt | None, *, bound: bool) -> Signature | None:
    """Return the parameters of a function; None if uncertain. `bound`: the first parameter is `self`."""
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
    """The Python files below a schedule's folder, each read and parsed once, on demand. `shown`: the folder as the user wrote it."""

    def __init__(self, read: Reader, shown: str, problems: Problems) -> None:
        self.read, self.shown, self.problems = read, shown, problems
        self.text, self.tree = cache(self._text), cache(self._tree)
        self.imported, self.signature = cache(self._imported), cache(self._signature)

    def require(self, code: Code, span: Span) -> tuple[str, ...]:
        """Return the files that a function needs, sorted: its file, and the files that it imports in turn; () for an installed package.
        Report mistakes at `span`, or in the Python file."""
        if not code.file:
            local = f"{code.module.replace('.', '/')}.py"
            if not installed(code.top) and not isinstance(self.text(local), Unreadable):
                message = f"no package `{code.top}` is installed, but {self.path(local)} exists"
                self.problems.add(span, message, f'write `"{local}:{code.function}"`')
            return ()
        if not self._require_importable(code.file, span, "it belongs next to schedule.prototxt"):
            return ()
        tree = self.tree(code.file)
        names = set(_names(tree)) if tree is not None else {"*"}
        if not names & {code.function, "*"}:
            hint = nearest(code.function, names) or "define it in that file, outside of other functions and classes"
            self.problems.add(span, f"{self.path(code.file)} has no function `{code.function}`", hint)
        return self.closure(code.file)

    def closure(self, file: str) -> tuple[str, ...]:
        """Return the file, and the files below the folder that it imports in turn, sorted."""
        files = [file]
        for one in files:  # grows during the loop
            files += [imported for imported in self.imported(one) if imported not in files]
        return tuple(sorted(files))

    def sources(self, files: Iterable[str]) -> Sources:
        return Sources(self.shown, tuple((f, self._decoded(f) or "") for f in sorted(set(files))))

    def path(self, file: str) -> str:
        return posixpath.join(self.shown, file)

    def _signature(self, code: Code) -> Signature | None:
        """Return the parameters of a function in one of these files; None if uncertain."""
        tree = self.tree(code.file)
        return signature(tree, code.function) if tree is not None else None

    def _text(self, file: str) -> Text:
        text = self.read(file)
        large = isinstance(text, bytes) and len(text) > LARGEST
        return Unreadable(f"the file is larger than {LARGEST // 1_000_000} MB") if large else text

    def _decoded(self, file: str) -> str | None:
        """Return the text of a file; None if unreadable, which is reported."""
        text = self.text(file)
        if isinstance(text, bytes):
            try:
                return text.decode()
            except UnicodeDecodeError as error:
                line = text.count(b"\n", 0, error.start) + 1
                self.problems.add(Span(self.path(file), line, 1), "the line is not UTF-8", "save the file as UTF-8")
        return text if isinstance(text, str) else None

    def _tree(self, file: str) -> ast.Module | None:
        """Return a parsed file; None if it isn't Python, which is reported."""
        text, path = self._decoded(file), self.path(file)
        if text is None:
            return None
        self.problems.file(path, text)
        return _parsed(text.removeprefix("\N{BYTE ORDER MARK}"), path, self.problems)

    def _imported(self, file: str) -> list[str]:
        """Return the files below the folder that this one imports, including its packages' `__init__.py`."""
        package = posixpath.dirname(file).replace("/", ".")
        files, tree = self._files_of(package), self.tree(file)
        for node in ast.walk(tree) if tree is not None else ():
            for one in [one for module in _modules(node, package) for one in self._files_of(module)]:
                assert isinstance(node, ast.Import | ast.ImportFrom)
                width = (node.end_col_offset or 0) - node.col_offset
                self._require_importable(one, Span(self.path(file), node.lineno, node.col_offset + 1, width))
                files.append(one)
        return [one for one in dict.fromkeys(files) if one != file]

    def _files_of(self, module: str) -> list[str]:
        """Return the files below the folder that an import of `a.b` runs: `a/__init__.py`, then `a/b/__init__.py` or `a/b.py`."""
        files: list[str] = []
        path = ""
        for word in module.split(".") if module else ():
            path = posixpath.join(path, word)
            either = (f"{path}/__init__.py", f"{path}.py")
            files += [file for file in either if self.text(file) != MISSING][:1]
        return files

    def _require_importable(self, file: str, span: Span, hint: str = "") -> bool:
        """Report a file that can't be imported; return whether it could be read."""
        text = self.text(file)
        if isinstance(text, Unreadable):
            self.problems.add(span, f"{self.path(file)}: {text.reason}", hint)
        elif reserved := reserved_name(file):
            message = f"a file shadows `{reserved}` of Python or torch"
            self.problems.add(span, message, f"rename {self.path(file)}")
        return not isinstance(text, Unreadable)


def reserved_name(file: str) -> str:
    """Return the name of the module that a file would shadow, or ''."""
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
    """Return the modules that a statement imports, dotted from the schedule's folder, including names that may be modules."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
    if not isinstance(node, ast.ImportFrom):
        return names
    words = package.split(".") if package and node.level else []
    if node.level - 1 > len(words):
        return []  # above the folder: Python refuses it
    base = ".".join([*words[: len(words) - node.level + 1], *([node.module] if node.module else [])])
    return [*([base] if base else []), *(f"{base}.{name}".lstrip(".") for name in names if name != "*")]


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a module's statements define; "*" for an import of everything."""
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
    """Return the digest of Python files by path. Every character counts, even in comments."""
    sha = hashlib.sha256()
    for path, text in sorted(files):
        for part in (path.encode(), text.encode(errors="surrogatepass")):
            sha.update(len(part).to_bytes(8, "big") + part)
    return f"sha256:{sha.hexdigest()[:DIGITS]}"


@cache
def version(package: str) -> str:
    """Return the version of a package, without importing it: `1.0.15`, "unknown" if it has none, or ABSENT."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    owners = metadata.packages_distributions().get(package)
    if owners:
        return metadata.version(owners[0])
    return "unknown" if installed(package) else ABSENT


def installed(package: str) -> bool:
    """Return whether a top-level package is installed, without importing it. The files of a schedule that ran in this process don't count."""
    finders = [finder for finder in sys.meta_path if not getattr(finder, "of_schedule", False)]
    try:
        return any(finder.find_spec(package, None) is not None for finder in finders)
    except (ImportError, ValueError):
        return False
