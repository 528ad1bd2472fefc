"""A function that a schedule names, imported and called. What goes wrong in it is a UsageError with the place in the user's file.

The files below the schedule's folder are imported from the texts that `check` read, so that what runs is what the stage's identity
has the digest of: whatever lies on disk by now, and where only a snapshot has them. They have the names that they would have for a
script beside them (`import blocks`), and one schedule's files at a time.
"""

import inspect
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module, invalidate_caches
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from multiprocessing import active_children, spawn
from os.path import abspath, basename, dirname, join, normpath
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeVar

from stagerun.base.code import Code, Sources
from stagerun.base.errors import ExitCode, StagerunError, UsageError, nearest

T = TypeVar("T")

# Seconds after which a user is told that his code is still at work; and that threads and processes have which are left at the end.
_PATIENCE_S = 30.0
_LAST_PATIENCE_S = 5.0
# Stagerun's own threads that a process waits for at its end: they write, as a snapshot.
_OWN_THREADS = ("snapshot", "feed", "images", "writer")


def function_of(code: Code, sources: Sources) -> Callable[..., Any]:
    """The function that `code` names, of its file in `sources` or of an installed package, which is imported. UsageError."""
    with _lock:
        _local.use(sources)
    module = _guarded(code, sources, None, import_module, code.module)
    found = getattr(module, code.function, None)
    if not callable(found):
        message = f"{_place(code, sources)}: it has no function `{code.function}`"
        if found is not None:
            message = f"{_place(code, sources)}: `{code.function}` is {_article(found)}, not a function or a class"
        raise UsageError(message, nearest(code.function, [n for n in vars(module) if not n.startswith("_")]))
    function: Callable[..., Any] = found
    return function


def called(code: Code, sources: Sources, function: Callable[..., T], *args: Any, **named: Any) -> T:
    """What a function of the user's returns. UsageError with the place in the user's file for whatever it raises."""
    return _guarded(code, sources, function, function, *args, **named)


@contextmanager
def patiently(code: Code, sources: Sources | None, rank: int) -> Iterator[None]:
    """Rank 0 says which line the user's code is at, once, when it is not back after a while. It may be an endless loop."""
    thread = threading.get_ident()

    def say() -> None:
        file, line = _innermost(traceback.walk_stack(sys._current_frames()[thread]), code, sources or Sources())
        where = f"{file}:{line}" if file else code
        print(f"{where} is still at work after {_PATIENCE_S:g} s", file=sys.stderr, flush=True)

    timer = threading.Timer(_PATIENCE_S, say)
    timer.daemon = True
    if rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_soon(code: int) -> None:
    """Ends the process with `code` after a while, if threads or processes that a schedule's file has started keep it so long: Python waits
    for them at its end, for ever if need be, and stop signals do nothing by then."""

    def end() -> None:
        left = own = [threading.current_thread()]
        while own:
            time.sleep(_LAST_PATIENCE_S)
            left = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
            own = [one for one in left if one.name.startswith(_OWN_THREADS)]
        children = active_children()
        if left or children:
            names = [f"thread `{one.name}`" for one in left] + [f"process {child.pid}" for child in children]
            text = f"{', '.join(names)}: started by the schedule's Python, still at work, and ended"
            print(text, file=sys.stderr, flush=True)
            for child in children:
                child.kill()
            os._exit(code)

    sys.stdout.flush()
    threading.Thread(target=end, daemon=True).start()


def parameters_of(function: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """The names that a function takes, and whether it takes others (`**named`) too."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, and says nothing
        return (), True
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in found if p.kind in named), any(p.kind is p.VAR_KEYWORD for p in found)


def refusal(code: Code, sources: Sources, function: Callable[..., Any] | None, message: str, hint: str) -> UsageError:
    """What is wrong with what a function of the user's returned, at the function's own line."""
    file, line = _defined(function, sources) if function is not None else ("", 0)
    return UsageError(_placed(file or _place(code, sources), line, message, sources), hint)


def line_in(text: str, sources: Sources) -> str:
    """`mynet.py:12`, the last place in the user's files that a traceback in a text names; '' for none."""
    own = _files(sources)
    places = [f"{own[file]}:{line}" for file, line in re.findall(r'File "(.+?)", line (\d+)', text) if file in own]
    return places[-1] if places else ""


def _files(sources: Sources) -> dict[str, str]:
    """The user's files as he wrote them, by their paths."""
    return {join(abspath(sources.folder), file): join(sources.folder, file) for file, _ in sources.files}


# -- the import


class _Loader(ExecutionLoader):
    """One file, from its text. Without bytecode on disk: that goes by seconds and sizes, and an edit can keep both."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_source(self, fullname: str) -> str:
        return self.text

    def exec_module(self, module: ModuleType) -> None:
        """Other threads need not wait for the end of the import: a pool that a file starts and uses in it pickles the file's functions in
        a thread of its own, which would wait for ever."""
        if module.__spec__ is not None:
            module.__spec__._initializing = False  # type: ignore[attr-defined]
        super().exec_module(module)


def _refuse_spawned(prepared: Callable[[str], T]) -> Callable[[str], T]:
    """What multiprocessing asks before it starts a process that inherits no modules; wrapped, with an error where a schedule's file asks for
    one. Such a process could not import that file: a pool would start one after the other for ever."""

    def refuse(name: str) -> T:
        file, line = _innermost(traceback.walk_stack(sys._getframe()), _NO_CODE, _local.sources)
        if file:
            text = "a process that is started by `spawn` or `forkserver` can't import this file"
            hint = 'take threads (`ThreadPoolExecutor`), or processes of `multiprocessing.get_context("fork")`'
            raise UsageError(_placed(file, line, text, _local.sources), hint)
        return prepared(name)

    return refuse


class _Local(MetaPathFinder):
    """Finds the files of one schedule before anything that is installed."""

    of_schedule = True  # `language.code.installed` passes over it

    def __init__(self) -> None:
        self.sources = Sources()
        self.texts: dict[str, str] = {}

    def use(self, sources: Sources) -> None:
        """Forgets the modules of another schedule."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            spawn.get_preparation_data = _refuse_spawned(spawn.get_preparation_data)  # type: ignore[assignment]
        if sources == self.sources:
            return
        for files in (self.sources.files, sources.files):
            for name in {file.partition("/")[0].removesuffix(".py") for file, _ in files}:
                for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                    del sys.modules[module]
        self.sources, self.texts = sources, dict(sources.files)
        invalidate_caches()

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        where = fullname.replace(".", "/")
        root = abspath(self.sources.folder)
        for file in (f"{where}/__init__.py", f"{where}.py"):
            if file in self.texts:
                whole = join(root, file)
                inside = [dirname(whole)] if basename(file) == "__init__.py" else None
                loader = _Loader(whole, self.texts[file])
                return spec_from_file_location(fullname, whole, loader=loader, submodule_search_locations=inside)
        if any(file.startswith(f"{where}/") for file in self.texts):
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [join(root, where)]
            return spec
        return None


_CHANNELS = re.compile(r"to have (1|3) channels, but got (1|3) channels")  # of the images, not of a layer inside
_NO_CODE = Code("-", "", "")
_lock = threading.Lock()
_local = _Local()


# -- what went wrong


def _guarded(
    code: Code, sources: Sources, owner: Callable[..., Any] | None, function: Callable[..., T], *args: Any, **named: Any
) -> T:
    worker = os.getpid()
    try:
        return function(*args, **named)
    except (KeyboardInterrupt, StagerunError):
        raise
    except BaseException as error:  # SystemExit among them: a user's file may not end a worker
        raise explained(error, code, sources, owner) from error
    finally:
        if os.getpid() != worker:  # it would train beside the worker
            print(f"{_place(code, sources)}: a process that it forked ends here", file=sys.stderr, flush=True)
            os._exit(int(ExitCode.RECIPE))


def explained(
    error: BaseException, code: Code, sources: Sources, owner: Callable[..., Any] | None = None
) -> UsageError:
    """`mynet.py:12: NameError: ...`, the line, and a hint where the cause has one: for what came out of the user's code. The place is the
    innermost one in the user's files; without any, that of the function `owner`."""
    file, line = _place_of(error, code, sources)
    if not file and owner is not None:
        file, line = _defined(owner, sources)
    what = f"{type(error).__name__}: {error}".rstrip(": ") if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        what = f"this is not Python: {error.msg}"
    return UsageError(_placed(file or _place(code, sources), line, what, sources), _hint(error, code, owner))


def _placed(file: str, line: int, message: str, sources: Sources) -> str:
    """A message with its place and that line; `line` is 0 where none is known."""
    lines = dict(sources.files).get(os.path.relpath(file, sources.folder or "."), "").split("\n")
    source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return f"{file}{f':{line}' if line else ''}: {message}" + (f"\n  {source}" if source else "")


def _place(code: Code, sources: Sources) -> str:
    return join(sources.folder, code.file) if code.file else code.module


def _article(found: object) -> str:
    name = type(found).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _shown(filename: str, code: Code, sources: Sources) -> str:
    """A file of the user's as he wrote it, or ''."""
    if filename in (own := _files(sources)):
        return own[filename]
    if not code.file and (module := sys.modules.get(code.top)) is not None:
        inside = getattr(module, "__path__", None) or [getattr(module, "__file__", None) or "\0"]
        if any(normpath(filename).startswith(str(path)) for path in inside):
            return filename
    return ""


def _innermost(frames: Iterable[tuple[FrameType, int]], code: Code, sources: Sources) -> tuple[str, int]:
    """The first place of these in the user's files; ('', 0) if there is none."""
    found = ((_shown(frame.f_code.co_filename, code, sources), line) for frame, line in frames)
    return next((place for place in found if place[0]), ("", 0))


def _place_of(error: BaseException, code: Code, sources: Sources) -> tuple[str, int]:
    """The innermost place in the user's code that an error passed; ('', 0) if there is none."""
    if isinstance(error, SyntaxError) and error.filename and (file := _shown(error.filename, code, sources)):
        return file, error.lineno or 1
    return _innermost(reversed(list(traceback.walk_tb(error.__traceback__))), code, sources)


def _defined(owner: Callable[..., Any], sources: Sources) -> tuple[str, int]:
    with suppress(TypeError, OSError):
        function = inspect.unwrap(owner)
        target = function.__init__ if inspect.isclass(function) else function  # type: ignore[misc]
        made: CodeType = target.__code__
        return _files(sources).get(made.co_filename, made.co_filename), made.co_firstlineno
    return "", 0


def _hint(error: BaseException, code: Code, owner: Callable[..., Any] | None) -> str:
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"`{error.name}` is neither a file beside the schedule nor an installed package; "
            "install it for the Python that runs stagerun"
        )
    if isinstance(error, ImportError) and "relative import" in text:
        return "write `import blocks` in place of `from . import blocks`: files beside the schedule are no package"
    if "CUDA" in text or "NVIDIA" in text or "nvidia" in text:
        return 'leave `.cuda()` and `device="cuda"` out: stagerun moves the network to the device that it trains on'
    if "allocate memory" in text or isinstance(error, MemoryError):
        return "it wants more memory than is free here: make the network smaller, or take a larger machine"
    if isinstance(error, FileNotFoundError):
        return "such a path starts where stagerun was; write `Path(__file__).parent / ...` for a file beside this one"
    if (found := _CHANNELS.search(text)) is not None:
        return f"have the function take `channels`, which is {found[2]} here; or write `channels: {found[1]}` for such images"
    if isinstance(error, SystemExit):
        return 'it asks Python to end: put what a script does below `if __name__ == "__main__":`'
    if isinstance(error, TypeError) and "argument" in text and owner is not None:
        names, more = parameters_of(owner)
        return f"`{code.function}` takes {', '.join(names) or 'nothing'}" + (", and others by name" if more else "")
    return ""
