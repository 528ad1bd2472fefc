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
from stagerun.language.signature import Signature, signature

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


class LocalFiles:
    """The Python files below a schedule's folder, as far as someone asked for them. Each is read and looked at once. `shown` is the
    folder as the user wrote it."""

    def __init__(self, read: Reader, shown: str, problems: Problems) -> None:
        self.read = read
        self.shown = shown
        self.problems = problems
        self._texts: dict[str, Text] = {}
        self._trees: dict[str, ast.Module | None] = {}
        self._imports: dict[str, tuple[str, ...]] = {}

    def require(self, code: Code, place: Span) -> tuple[str, ...]:
        """The files that a function comes from, sorted: its own, and all that those import of each other. What is wrong is a problem
        at `place`, or in the Python file. Empty for an installed package."""
        if not code.file:
            beside = f"{code.module.replace('.', '/')}.py"
            if not installed(code.top) and not isinstance(self._text(beside), Unreadable):
                message = f"no package `{code.top}` is installed, and there is a file {self.path(beside)}"
                self.problems.add(place, message, f'write `"{beside}:{code.function}"`')
            return ()
        text = self._text(code.file)
        if isinstance(text, Unreadable):
            self.problems.add(place, f"{self.path(code.file)}: {text.reason}", "it belongs beside schedule.prototxt")
            return ()
        if reserved := _reserved(code.file):
            self.problems.add(place, f"`{code.file}` has the name of Python's or torch's own `{reserved}`", "rename it")
        self._require_function(code, place)
        return self.closure(code.file)

    def closure(self, *files: str) -> tuple[str, ...]:
        """Those files, and what they import below the folder, sorted."""
        found: set[str] = set()
        todo = list(files)
        while todo:
            file = todo.pop()
            if file not in found:
                found.add(file)
                todo += self._imported(file)
        return tuple(sorted(found))

    def sources(self, files: Iterable[str]) -> Sources:
        return Sources(self.shown, tuple((f, self._decoded(f) or "") for f in sorted(set(files))))

    def signature(self, code: Code) -> Signature | None:
        """What a function of one of these files takes; None where that isn't certain."""
        tree = self._tree(code.file)
        return signature(tree, code.function) if tree is not None else None

    def _text(self, file: str) -> Text:
        if file not in self._texts:
            text = self.read(file)
            large = isinstance(text, bytes) and len(text) > LARGEST
            self._texts[file] = Unreadable(f"the file is larger than {LARGEST // 1_000_000} MB") if large else text
        return self._texts[file]

    def path(self, file: str) -> str:
        return posixpath.join(self.shown, file)

    def _decoded(self, file: str) -> str | None:
        text = self._text(file)
        if isinstance(text, bytes):
            try:
                return text.decode()
            except UnicodeDecodeError as error:
                line = text.count(b"\n", 0, error.start) + 1
                self.problems.add(Span(self.path(file), line, 1), "the line is not UTF-8", "save the file as UTF-8")
                return None
        return text if isinstance(text, str) else None

    def _tree(self, file: str) -> ast.Module | None:
        """None where it can't be read as Python, which is a problem in it by then."""
        if file not in self._trees:
            text, path = self._decoded(file), self.path(file)
            self._trees[file] = None
            if text is not None:
                self.problems.file(path, text)
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # of escapes like `"\d"`
                        self._trees[file] = ast.parse(text.removeprefix("\N{BYTE ORDER MARK}"))
                except SyntaxError as error:
                    width = (
                        max(1, (error.end_offset or 0) - (error.offset or 0)) if error.end_lineno == error.lineno else 1
                    )
                    span = Span(path, error.lineno or 1, max(1, error.offset or 1), width)
                    self.problems.add(span, f"this is not Python: {error.msg}")
                except (ValueError, RecursionError, MemoryError) as error:  # NUL characters; nested a thousand times
                    self.problems.add(Span(path, 1, 1), f"this can't be read as Python: {error}")
        return self._trees[file]

    def _require_function(self, code: Code, place: Span) -> None:
        tree = self._tree(code.file)
        names = set(_names(tree.body)) if tree is not None else {"*"}
        if code.function not in names and "*" not in names:
            hint = nearest(code.function, names) or "define it in that file, outside of other functions and classes"
            self.problems.add(place, f"{self.path(code.file)} has no function `{code.function}`", hint)

    def _imported(self, file: str) -> tuple[str, ...]:
        """The files below the folder that this one imports, its packages' `__init__.py` included."""
        if file not in self._imports:
            package = posixpath.dirname(file).replace("/", ".")
            found = dict.fromkeys(self._files_of(package))
            tree = self._tree(file)
            for node in ast.walk(tree) if tree is not None else ():
                for module in _modules(node, package):
                    for one in self._files_of(module):
                        assert isinstance(node, ast.Import | ast.ImportFrom)
                        self._require_importable(file, one, node)
                        found[one] = None
            found.pop(file, None)
            self._imports[file] = tuple(found)
        return self._imports[file]

    def _files_of(self, module: str) -> Iterator[str]:
        """The files below the folder that an import of `a.b` runs: `a/__init__.py`, then `a/b/__init__.py` or `a/b.py`."""
        words = module.split(".") if module else []
        for i in range(len(words)):
            path = "/".join(words[: i + 1])
            for file in (f"{path}/__init__.py", f"{path}.py"):
                if self._text(file) != MISSING:
                    yield file
                    break

    def _require_importable(self, file: str, imported: str, node: ast.Import | ast.ImportFrom) -> None:
        span = Span(self.path(file), node.lineno, node.col_offset + 1, (node.end_col_offset or 0) - node.col_offset)
        text = self._text(imported)
        if isinstance(text, Unreadable):
            self.problems.add(span, f"{self.path(imported)}: {text.reason}")
        elif reserved := _reserved(imported):
            hint = f"rename {self.path(imported)}"
            self.problems.add(span, f"`{reserved}` is Python's or torch's own, and there is a file of that name", hint)


def is_reserved(file: str) -> bool:
    return bool(_reserved(file))


def _reserved(file: str) -> str:
    """The name of a module that a file would take the place of, or ''."""
    top = file.partition("/")[0].removesuffix(".py")
    return top if top in RESERVED else ""


def _modules(node: ast.AST, package: str) -> Iterator[str]:
    """The modules that a statement imports, dotted from the schedule's folder; names that may be modules included."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            words = package.split(".") if package else []
            if node.level - 1 > len(words):
                return  # above the folder: Python refuses it
            base = ".".join([*words[: len(words) - node.level + 1], *([base] if base else [])])
        if base:
            yield base
        yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*")


def _names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """What statements define for a module; "*" for an import of everything."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
            for block in blocks:
                yield from _names(block)
        else:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id


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
