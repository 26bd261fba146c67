"""The source of a vLLM, from a wheel or from a directory that has `vllm` in it. Nothing of it is run."""

from __future__ import annotations

import ast
import functools
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Source:
    """Modules by their dotted name; `read` gives the text of a file, or None if there is no such file."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = read
        self.module = functools.cache(self._module)

    @classmethod
    def of(cls, path: Path) -> Source:
        """The source in a wheel or a directory."""
        if path.is_dir():
            return cls(lambda name: (path / name).read_text() if (path / name).is_file() else None)
        wheel = zipfile.ZipFile(path)
        names = set(wheel.namelist())
        return cls(lambda name: wheel.read(name).decode() if name in names else None)

    def _module(self, name: str) -> ast.Module | None:
        base = name.replace(".", "/")
        text = self._read(f"{base}.py") or self._read(f"{base}/__init__.py")
        return None if text is None else ast.parse(text)

    def definition(self, module: str, name: str) -> Definition | None:
        """The class or function of a module, or of a class in it: `Class.method`."""
        node: ast.AST | None = self.module(module)
        for part in name.split("."):
            node = next((one for one in _body(node) if isinstance(one, _DEFINITIONS) and one.name == part), None)
        return node if isinstance(node, _DEFINITIONS) else None


def names_of(module: ast.Module) -> set[str]:
    """What a module defines, assigns or imports."""
    found = set()
    for node in _body(module):
        if isinstance(node, _DEFINITIONS):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        else:
            found |= set(_assigned(node))
    return found


def members_of(definition: Definition) -> set[str]:
    """What a class defines or declares, and what its methods assign to `self`."""
    found = set()
    for node in _body(definition):
        found |= {node.name} if isinstance(node, _DEFINITIONS) else set(_assigned(node))
    for part in ast.walk(definition):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self":
            found.add(part.attr)
    return found


def strings_of(module: ast.Module) -> set[str]:
    """All strings, and the fixed parts of formatted ones."""
    return {node.value for node in ast.walk(module) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def arguments_of(function: Definition) -> set[str]:
    """The names by which a function takes arguments."""
    if isinstance(function, ast.ClassDef):
        return set()
    given = function.args
    return {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _body(node: ast.AST | None) -> Iterator[ast.stmt]:
    """The statements of a node; what stands under a condition counts as well."""
    for statement in getattr(node, "body", []):
        if isinstance(statement, ast.If | ast.Try):
            yield from _body(statement)
        else:
            yield statement
    for statement in getattr(node, "orelse", []) if isinstance(node, ast.If | ast.Try) else []:
        yield statement


def _assigned(node: ast.stmt) -> Iterator[str]:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return (target.id for target in targets if isinstance(target, ast.Name))
