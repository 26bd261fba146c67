"""Which flags and arguments the installed vLLM takes, read from its source: importing vLLM takes many seconds.

What cannot be found this way is not checked; vLLM's own parser has the last word.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ENGINE = "engine/arg_utils.py"
_FRONTENDS = ("entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py")  # the second up to 0.28
_CLASSES = ("EngineArgs", "AsyncEngineArgs", "BaseFrontendArgs", "FrontendArgs")
_SPECULATION = ("config/speculative.py", "SpeculativeConfig")
_METHODS = "SpeculativeMethod"
_LLM = ("entrypoints/llm.py", "LLM")
_FEW = 100  # a source with fewer fields than this is laid out in a way that we do not know
_NUMBERS = {"int", "float", "None"}


@dataclass(frozen=True, slots=True)
class KnownArguments:
    """What vLLM takes: `flags` of `vllm serve`, `arguments` of `vllm.LLM`, and which of them are `numbers`.

    Names of arguments are Python's; names of flags begin with dashes.
    """

    flags: frozenset[str]
    arguments: frozenset[str]
    numbers: frozenset[str]


@dataclass(frozen=True, slots=True)
class KnownSpeculation:
    """What vLLM takes as a `speculative_config`: the names of its methods, and all keys."""

    methods: frozenset[str]
    keys: frozenset[str]


@cache
def known_arguments() -> KnownArguments | None:
    """What the installed vLLM takes; None if that cannot be told."""
    package = _package()
    return read_arguments(package) if package is not None else None


@cache
def known_speculation() -> KnownSpeculation | None:
    """What the installed vLLM takes as a `speculative_config`; None if that cannot be told."""
    package = _package()
    return read_speculation(package) if package is not None else None


def read_speculation(package: Path) -> KnownSpeculation | None:
    """What the vLLM in this directory takes as a `speculative_config`; None if its source is laid out otherwise."""
    tree = _tree(package / _SPECULATION[0])
    if tree is None:
        return None
    literals = dict(_literals(tree))
    methods = frozenset(_strings(literals.get(_METHODS), literals))
    keys = frozenset(name for name, _ in _fields(tree, _SPECULATION[1:]))
    return KnownSpeculation(methods, keys) if methods and {"method", "model"} <= keys else None


def read_arguments(package: Path) -> KnownArguments | None:
    """What the vLLM in this directory takes; None if its source is laid out in an unknown way."""
    trees = [tree for name in (_ENGINE, *_FRONTENDS) if (tree := _tree(package / name)) is not None]
    fields = {name: kind for tree in trees for name, kind in _fields(tree, _CLASSES)}
    flags = {flag for tree in trees for flag in _flags(tree)}
    llm = _tree(package / _LLM[0])
    own = _parameters(llm, _LLM[1]) if llm is not None else set()
    if len(fields) < _FEW or len(flags) < _FEW or not own:
        return None
    return KnownArguments(
        frozenset(flags | {"--" + name.replace("_", "-") for name in fields}),
        frozenset(own | set(fields)),
        frozenset(name for name, kind in fields.items() if _is_number(kind)),
    )


def _package() -> Path | None:
    """Where the installed vLLM is."""
    spec = importlib.util.find_spec("vllm")
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def _literals(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """What `Literal[...]` holds, for each name that one is assigned to."""
    for line in tree.body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Subscript):
            for name in line.targets:
                if isinstance(name, ast.Name):
                    yield name.id, line.value.slice


def _strings(held: ast.expr | None, literals: Mapping[str, ast.expr]) -> Iterator[str]:
    """All strings of a literal, and of those that it names."""
    for part in ast.walk(held) if held is not None else ():
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.Name):
            yield from _strings(literals.get(part.id), literals)


def _tree(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _fields(tree: ast.Module, names: tuple[str, ...]) -> Iterator[tuple[str, ast.expr]]:
    """The annotated fields of these classes."""
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef) and owner.name in names:
            for line in owner.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id, line.annotation


def _flags(tree: ast.Module) -> Iterator[str]:
    """Flags that are added by their literal names."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            for word in call.args:
                if isinstance(word, ast.Constant) and isinstance(word.value, str) and word.value.startswith("-"):
                    yield word.value


def _parameters(tree: ast.Module, owner: str) -> set[str]:
    """The parameters of a class's constructor."""
    for line in ast.walk(tree):
        if isinstance(line, ast.ClassDef) and line.name == owner:
            for method in line.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    return {one.arg for one in (*method.args.args, *method.args.kwonlyargs)} - {"self"}
    return set()


def _is_number(kind: ast.expr) -> bool:
    """Whether an annotation is built of nothing but numbers and None."""
    names = {part.id for part in ast.walk(kind) if isinstance(part, ast.Name)}
    others = [part for part in ast.walk(kind) if isinstance(part, (ast.Subscript, ast.Attribute))]
    return bool(names - {"None"}) and names <= _NUMBERS and not others
