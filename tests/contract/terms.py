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
    """A function calls a method with exactly these arguments."""

    module: str
    function: str
    method: str
    arguments: tuple[str, ...]

    def missing(self, source: Source) -> Iterator[str]:
        definition = source.definition(self.module, self.function)
        calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call)] if definition else []
        if not any(self._is_it(call) for call in calls):
            yield f"{self.module}.{self.function} calls .{self.method}({', '.join(self.arguments)})"

    def _is_it(self, call: ast.Call) -> bool:
        words = (*(ast.unparse(word) for word in call.args), *(ast.unparse(word) for word in call.keywords))
        return isinstance(call.func, ast.Attribute) and call.func.attr == self.method and words == self.arguments
