"""What a function of a Python file takes, by its text: what calling it would raise is known without an import. Pure.

It is known of a function, or a class with an `__init__`, that the file defines once, at its top level and without decorators.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

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
    """None where it isn't certain."""
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
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Store) and name in (node.attr, getattr(node.value, "id", ""))
    if isinstance(node, ast.Name):
        return node.id in _BY_TEXT or (node.id == name and not isinstance(node.ctx, ast.Load))
    if isinstance(node, ast.alias) and node.name == "*":
        return True
    return not isinstance(node, ast.Constant | ast.keyword | ast.arg) and name in _words(node)


def _words(node: ast.AST) -> Iterator[object]:
    """The names that a node holds as texts: of what it defines, imports, catches or declares global."""
    for _, value in ast.iter_fields(node):
        yield from value if isinstance(value, list) else [value]


def _of(node: ast.stmt | None, *, bound: bool) -> Signature | None:
    """`bound`: the first parameter is the object itself."""
    if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.args.posonlyargs:
        return None
    args = node.args
    positional, named = [a.arg for a in args.args], [a.arg for a in args.kwonlyargs]
    needed = positional[: len(positional) - len(args.defaults)]
    needed += [name for name, default in zip(named, args.kw_defaults, strict=True) if default is None]
    if bound and positional:
        needed = [name for name in needed if name != positional[0]]
    elif bound:
        return None
    more = args.vararg is not None, args.kwarg is not None
    return Signature(node.lineno, tuple(positional[bound:]), tuple(named), tuple(needed), more)
