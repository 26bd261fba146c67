"""The kinds of things that can be relied on. Each says what of it a source does not have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tests.contract.source import Source, arguments_of, members_of, names_of, strings_of


class Term(Protocol):
    """One thing that is relied on, in a module of vLLM."""

    @property
    def module(self) -> str: ...

    def missing(self, source: Source) -> Iterator[str]: ...


@dataclass(frozen=True)
class Names:
    """A module has these names, by definition, assignment or import."""

    module: str
    names: tuple[str, ...]

    def missing(self, source: Source) -> Iterator[str]:
        tree = source.module(self.module)
        found = names_of(tree) if tree else set()
        yield from (f"{self.module}.{name}" for name in self.names if name not in found)


@dataclass(frozen=True)
class Members:
    """A class has these methods, properties and attributes."""

    module: str
    owner: str
    names: tuple[str, ...]

    def missing(self, source: Source) -> Iterator[str]:
        definition = source.definition(self.module, self.owner)
        found = members_of(definition) if definition else set()
        yield from (f"{self.module}.{self.owner}.{name}" for name in self.names if name not in found)


@dataclass(frozen=True)
class Arguments:
    """A function takes these arguments by name."""

    module: str
    function: str
    names: tuple[str, ...]

    def missing(self, source: Source) -> Iterator[str]:
        definition = source.definition(self.module, self.function)
        found = arguments_of(definition) if definition else set()
        yield from (f"{self.module}.{self.function}({name})" for name in self.names if name not in found)


@dataclass(frozen=True)
class Strings:
    """A module has these strings: names of metrics, flags, variables."""

    module: str
    strings: tuple[str, ...]

    def missing(self, source: Source) -> Iterator[str]:
        tree = source.module(self.module)
        found = strings_of(tree) if tree else set()
        yield from (f"{self.module}: {text!r}" for text in self.strings if text not in found)


@dataclass(frozen=True)
class Call:
    """A function calls a method with exactly these arguments; with `branch`, where a condition has this string."""

    module: str
    function: str
    method: str
    arguments: tuple[str, ...]
    branch: str | None = None

    def missing(self, source: Source) -> Iterator[str]:
        definition = source.definition(self.module, self.function)
        places = [] if definition is None else [definition] if self.branch is None else self._branches(definition)
        if not any(self._is_it(node) for place in places for node in ast.walk(place)):
            yield f"{self.module}.{self.function} calls .{self.method}({', '.join(self.arguments)})"

    def _branches(self, definition: ast.AST) -> list[ast.AST]:
        """What is run where a condition has the string; an `elif` after it is not."""
        choices = [node for node in ast.walk(definition) if isinstance(node, ast.If)]
        return [part for choice in choices if self.branch in _strings(choice.test) for part in choice.body]

    def _is_it(self, call: ast.AST) -> bool:
        if not isinstance(call, ast.Call):
            return False
        words = (*(ast.unparse(word) for word in call.args), *(ast.unparse(word) for word in call.keywords))
        return isinstance(call.func, ast.Attribute) and call.func.attr == self.method and words == self.arguments


def _strings(node: ast.AST) -> list[object]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
