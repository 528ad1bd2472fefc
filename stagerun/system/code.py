"""A function that a schedule names, imported and called. Its errors become a UsageError with the line in the user's file.

Files below the schedule's folder are imported from the texts that `check` read, so that the code matches the digest in the stage's identity,
even after an edit, or when only a snapshot has them. They import each other as files next to a script do (`import blocks`); one schedule's
files are importable at a time.
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
Function = Callable[..., Any]  # of the user

# Seconds until a message about slow user code; and for remaining threads and processes at the end.
_PATIENCE_S = 30.0
_LAST_PATIENCE_S = 5.0
# stagerun's threads that write, for which a process waits at its end.
_OWN_THREADS = ("snapshot", "feed", "images", "writer")


def function_of(code: Code, sources: Sources) -> Function:
    """Import the function that `code` names from its file in `sources`, or from an installed package. UsageError."""
    with _lock:
        _local.use(sources)
    module = _guarded(code, sources, None, import_module, code.module)
    function: Function | None = getattr(module, code.function, None)
    if not callable(function):
        problem = f"it has no function `{code.function}`"
        if function is not None:
            problem = f"`{code.function}` is not a function or a class"
        message = f"{_file_of(code, sources)}: {problem}"
        raise UsageError(message, nearest(code.function, [n for n in vars(module) if not n.startswith("_")]))
    return function


def called(code: Code, sources: Sources, function: Callable[..., T], *args: Any, **named: Any) -> T:
    """Call a function of the user. UsageError with the line in the user's file for anything that it raises."""
    return _guarded(code, sources, function, function, *args, **named)


@contextmanager
def patiently(code: Code, sources: Sources | None, rank: int) -> Iterator[None]:
    """Run the user's code; after a while rank 0 prints, once, its current line: it may be an endless loop."""
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
    """End the process with `code` after a while, if threads or processes of a schedule's file keep it: Python would wait for them forever,
    and stop signals are ignored by then."""

    def end() -> None:
        left = writing = [threading.current_thread()]
        while writing:
            time.sleep(_LAST_PATIENCE_S)
            left = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
            writing = [one for one in left if one.name.startswith(_OWN_THREADS)]
        children = active_children()
        if left or children:
            names = [f"thread `{one.name}`" for one in left] + [f"process {child.pid}" for child in children]
            text = f"{', '.join(names)}: started by the schedule's Python, ended while at work"
            print(text, file=sys.stderr, flush=True)
            for child in children:
                child.kill()
            os._exit(code)

    sys.stdout.flush()
    threading.Thread(target=end, daemon=True).start()


def parameters_of(function: Function) -> tuple[tuple[str, ...], bool]:
    """Return the names of a function's parameters, and whether it takes others (`**named`)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return (), True
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in parameters if p.kind in named), any(p.kind is p.VAR_KEYWORD for p in parameters)


def refusal(code: Code, sources: Sources, function: Function | None, message: str, hint: str) -> UsageError:
    """Return an error about a value that a function of the user returned, at the function's line."""
    file, line = _defined(function, sources) if function is not None else ("", 0)
    return UsageError(_placed(file or _file_of(code, sources), line, message, sources), hint)


def line_in(text: str, sources: Sources) -> str:
    """Return `mynet.py:12`, the last line of the user's files in a text with a traceback; '' without one."""
    files = _files(sources)
    lines = [f"{files[file]}:{line}" for file, line in re.findall(r'File "(.+?)", line (\d+)', text) if file in files]
    return lines[-1] if lines else ""


def _files(sources: Sources) -> dict[str, str]:
    """Return the user's names of files, by path."""
    return {join(abspath(sources.folder), file): join(sources.folder, file) for file, _ in sources.files}


# -- the import


class _Loader(ExecutionLoader):
    """Loads a file from its text. Bytecode on disk is no use: an edit can keep time and size, by which it is matched."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_source(self, fullname: str) -> str:
        return self.text

    def exec_module(self, module: ModuleType) -> None:
        """Mark the import as finished for other threads: a pool that a file starts and uses while imported pickles the file's functions in
        another thread, which would wait forever."""
        if module.__spec__ is not None:
            module.__spec__._initializing = False  # type: ignore[attr-defined]
        super().exec_module(module)


def _refuse_spawned(prepared: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap multiprocessing's preparation of a process that inherits no modules: raise if a schedule's file starts one. Such a process can't
    import that file, and a pool would restart it forever."""

    def refuse(name: str) -> T:
        file, line = _innermost(traceback.walk_stack(sys._getframe()), _NO_CODE, _local.sources)
        if file:
            text = "a process that is started by `spawn` or `forkserver` can't import this file"
            hint = 'take threads (`ThreadPoolExecutor`), or processes of `multiprocessing.get_context("fork")`'
            raise UsageError(_placed(file, line, text, _local.sources), hint)
        return prepared(name)

    return refuse


class _Local(MetaPathFinder):
    """Finds the files of one schedule, before installed packages."""

    of_schedule = True  # `language.code.installed` skips it

    def __init__(self) -> None:
        self.sources = Sources()
        self.texts: dict[str, str] = {}

    def use(self, sources: Sources) -> None:
        """Drop the modules of another schedule."""
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


_CHANNELS = re.compile(r"to have (1|3) channels, but got (1|3) channels")  # of the images, not of an inner layer
_NO_CODE = Code("-", "", "")
_lock = threading.Lock()
_local = _Local()


# -- errors


def _guarded(
    code: Code, sources: Sources, owner: Function | None, function: Callable[..., T], *args: Any, **named: Any
) -> T:
    worker = os.getpid()
    try:
        return function(*args, **named)
    except (KeyboardInterrupt, StagerunError):
        raise
    except BaseException as error:  # also SystemExit: a user's file may not end a worker
        raise explained(error, code, sources, owner) from error
    finally:
        if os.getpid() != worker:  # a fork would train, too
            print(f"{_file_of(code, sources)}: a process that it forked ends here", file=sys.stderr, flush=True)
            os._exit(int(ExitCode.RECIPE))


def explained(error: BaseException, code: Code, sources: Sources, owner: Function | None = None) -> UsageError:
    """Return `mynet.py:12: NameError: ...` with the line and perhaps a hint, for an error of the user's code, at the innermost line of the
    user's files, or else at the function `owner`."""
    file, line = _innermost(reversed(list(traceback.walk_tb(error.__traceback__))), code, sources)
    what = f"{type(error).__name__}: {error}".rstrip(": ") if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        what = f"this is not Python: {error.msg}"
        if error.filename and (shown := _shown(error.filename, code, sources)):
            file, line = shown, error.lineno or 1
    if not file and owner is not None:
        file, line = _defined(owner, sources)
    return UsageError(_placed(file or _file_of(code, sources), line, what, sources), _hint(error, code, owner))


def _placed(file: str, line: int, message: str, sources: Sources) -> str:
    """Format a message with its file, line (0 if unknown) and source."""
    lines = dict(sources.files).get(os.path.relpath(file, sources.folder or "."), "").split("\n")
    source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return f"{file}{f':{line}' if line else ''}: {message}" + (f"\n  {source}" if source else "")


def _file_of(code: Code, sources: Sources) -> str:
    return join(sources.folder, code.file) if code.file else code.module


def _shown(filename: str, code: Code, sources: Sources) -> str:
    """Return the user's name of a file, or ''."""
    if filename in (files := _files(sources)):
        return files[filename]
    if not code.file and (module := sys.modules.get(code.top)) is not None:
        inside = getattr(module, "__path__", None) or [getattr(module, "__file__", None) or "\0"]
        if any(normpath(filename).startswith(str(path)) for path in inside):
            return filename
    return ""


def _innermost(frames: Iterable[tuple[FrameType, int]], code: Code, sources: Sources) -> tuple[str, int]:
    """Return the first of these lines in the user's files; ('', 0) without one."""
    lines = ((_shown(frame.f_code.co_filename, code, sources), line) for frame, line in frames)
    return next((one for one in lines if one[0]), ("", 0))


def _defined(owner: Function, sources: Sources) -> tuple[str, int]:
    with suppress(TypeError, OSError):
        function = inspect.unwrap(owner)
        target = function.__init__ if inspect.isclass(function) else function  # type: ignore[misc]
        made: CodeType = target.__code__
        return _files(sources).get(made.co_filename, made.co_filename), made.co_firstlineno
    return "", 0


def _hint(error: BaseException, code: Code, owner: Function | None) -> str:
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"`{error.name}` is neither a file in the schedule's folder nor an installed package; "
            "install it for the Python that runs stagerun"
        )
    if isinstance(error, ImportError) and "relative import" in text:
        return (
            "write `import blocks` in place of `from . import blocks`: files in the schedule's folder are not a package"
        )
    if "CUDA" in text or "NVIDIA" in text or "nvidia" in text:
        return 'leave `.cuda()` and `device="cuda"` out: stagerun moves the network to the device that it trains on'
    if "allocate memory" in text or isinstance(error, MemoryError):
        return "out of memory: make the network smaller, or take a larger machine"
    if isinstance(error, FileNotFoundError):
        return "relative paths start at the current folder of stagerun; write `Path(__file__).parent / ...` for a file next to this one"
    if (match := _CHANNELS.search(text)) is not None:
        return f"have the function take `channels`, which is {match[2]} here; or write `channels: {match[1]}` for such images"
    if isinstance(error, SystemExit):
        return 'it ends Python: put a script below `if __name__ == "__main__":`'
    if isinstance(error, TypeError) and "argument" in text and owner is not None:
        names, more = parameters_of(owner)
        return f"`{code.function}` takes {', '.join(names) or 'nothing'}" + (", and others by name" if more else "")
    return ""
