"""vLLM's command line: parse its flags, check their spelling, and know its arguments without importing it.

vLLM takes `--a-b X`, `--a_b X`, `--a-b=X`, and for JSON options also `--a-b.key X`.

What cannot be found this way is not checked; vLLM's own parser has the last word.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from specbranch.errors import FlagError
from specbranch.plugins.vllm.settings import ParallelLayout

FLAG_NAME = re.compile(r"--?[A-Za-z]")  # not a negative number
_SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-q": "quantization",
    "-cc": "compilation_config",
}
_NUMBER_WORDS = ("auto", "none")
_ENGINE = "engine/arg_utils.py"
_FRONTENDS = ("entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py")  # the second up to 0.28
_CLASSES = ("EngineArgs", "AsyncEngineArgs", "BaseFrontendArgs", "FrontendArgs")
_SPECULATION = ("config/speculative.py", "SpeculativeConfig")
_METHODS = "SpeculativeMethod"
_LLM = ("entrypoints/llm.py", "LLM")
_FEW = 100  # a source with fewer fields than this is laid out in a way that we do not know
_NUMBERS = {"int", "float", "None"}


class _Flag(NamedTuple):
    name: str  # with dashes, without what follows a dot
    path: list[str]  # what follows dots
    value: str | None
    start: int
    end: int


class Flags:
    """The arguments of a vLLM command."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def has(self, *names: str) -> bool:
        """Whether one of the names is there, whole or with a dotted key."""
        return any(flag.name in names for flag in self._flags())

    def value(self, *names: str) -> str | None:
        """The value given last under any of the names; None if there is none."""
        values = [flag.value for flag in self._flags() if flag.name in names]
        return values[-1] if values else None

    def pairs(self) -> list[tuple[str, str | None]]:
        """All flags as they were given, with what follows them; the names with dashes, without dotted keys."""
        return [(flag.name.rstrip("+"), flag.value) for flag in self._flags()]

    def number(self, *names: str) -> int:
        """A count of at least 1, which is also what vLLM takes if nothing is given."""
        value = self.value(*names)
        if value is None:
            return 1
        if not value.isdecimal() or int(value) < 1:
            raise FlagError(f"{names[0]} is {value!r}; give a whole number of at least 1")
        return int(value)

    def take_json(self, name: str) -> tuple[dict[str, Any], Flags]:
        """The table that a JSON option and its dotted keys give together, and the remaining flags."""
        table: dict[str, Any] = {}
        rest, end = [], 0
        for flag in self._flags():
            if flag.name != name:
                continue
            rest += self.words[end : flag.start]
            end = flag.end
            if flag.value is None:
                raise FlagError(f"{name} has no value; give a JSON object")
            _merge(table, _nested(flag.path, flag.value, name))
        return table, Flags(rest + self.words[end:])

    def arguments(self) -> dict[str, Any]:
        """The same as arguments of `vllm.LLM`: a flag without a value is True, or False if it begins with `--no-`."""
        table: dict[str, Any] = {}
        words = self.words
        starts = [index for index, word in enumerate(words) if FLAG_NAME.match(word)]
        if words[: starts[0] if starts else None]:
            raise FlagError(f"unexpected word {words[0]!r}; flags of vLLM begin with --")
        for start, end in pairwise([*starts, len(words)]):
            whole, is_joined, joined = words[start].partition("=")
            values = [*([joined] if is_joined else []), *words[start + 1 : end]]
            _merge(table, _argument(whole, [json_or_text(value) for value in values]))
        return table

    def _flags(self) -> Iterator[_Flag]:
        for start, word in enumerate(self.words):
            if not word.startswith("-"):
                continue
            whole, is_joined, joined = word.partition("=")
            name, *path = whole.split(".")
            following = self.words[start + 1] if start + 1 < len(self.words) else None
            end = start + (1 if is_joined or following is None else 2)
            yield _Flag(name.replace("_", "-"), path, joined if is_joined else following, start, end)


def flags_of(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of `vllm.LLM` as words of a command line."""
    words: list[str] = []
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return words


def _argument(flag: str, values: Sequence[Any]) -> dict[str, Any]:
    """What one flag says: an argument, and within it the keys that follow dots."""
    first, *path = flag.split(".")
    if not first.startswith("--") and first not in _SHORT:
        raise FlagError(f"{first} is not known here; give the flag's long name")
    name = _SHORT.get(first, first.removeprefix("--").replace("-", "_"))
    value: Any = values[0] if len(values) == 1 else list(values)
    if not values:
        name, value = name.removeprefix("no_"), not name.startswith("no_")
    for key in reversed(path):
        value = {key: value}
    return {name: value}


def _merge(table: dict[str, Any], more: dict[str, Any]) -> None:
    """Put `more` into the table, tables into tables; a later value replaces an earlier one."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(table.get(key), dict):
            _merge(table[key], value)
        else:
            table[key] = value


def _nested(path: Sequence[str], text: str, name: str) -> dict[str, Any]:
    value: Any = json_or_text(text)
    for key in reversed(path):
        value = {key: value}
    if not isinstance(value, dict):
        raise FlagError(f"{name} is {text!r}; give a JSON object")
    return value


def json_or_text(text: str) -> Any:
    """The value of a text in JSON, or the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def layout_of(flags: Flags) -> ParallelLayout:
    """Return the layout that the flags of `vllm serve` ask for."""
    return ParallelLayout(
        tensor=flags.number("--tensor-parallel-size", "-tp"),
        pipeline=flags.number("--pipeline-parallel-size", "-pp"),
        data=_local_data(flags),
        num_nodes=flags.number("--nnodes", "-n"),
        executor=flags.value("--distributed-executor-backend"),
    )


def _local_data(flags: Flags) -> int:
    """Return how many data-parallel engines run on this machine."""
    local = "--data-parallel-size-local", "-dpl"
    return flags.number(*local) if flags.has(*local) else flags.number("--data-parallel-size", "-dp")


def check_flags(flags: Flags, known: KnownArguments) -> None:
    """Raise for a flag that `vllm serve` does not have, and for a number that is none."""
    for name, value in flags.pairs():
        # vLLM takes -O3, and the first letters of a flag where only one flag begins with them.
        if not FLAG_NAME.match(name) or name.startswith("-O"):
            continue
        plain = f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name
        if not any(flag.startswith(plain) for flag in known.flags):
            raise FlagError(f"vLLM has no flag {name}; {_hint(name, known.flags, '`vllm serve --help` lists them')}")
        field = name.removeprefix("--").replace("-", "_")
        if field in known.numbers and value is not None and not _may_be_number(value):
            raise FlagError(f"{name} is {value!r}; give a number")


def check_arguments(arguments: Mapping[str, Any], known: KnownArguments) -> None:
    """Raise for an argument that `vllm.LLM` does not have, and for a number that is none."""
    for name, value in arguments.items():
        if name not in known.arguments:
            raise FlagError(
                f"vllm.LLM has no argument {name!r}; {_hint(name, known.arguments, 'see vLLM documentation')}"
            )
        if name in known.numbers and isinstance(value, str) and not _may_be_number(value):
            raise FlagError(f"{name} is {value!r}; give a number")


def _hint(name: str, known: Collection[str], else_: str) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else else_


def _may_be_number(value: str) -> bool:
    """VLLM also takes numbers such as 1.5k or 4Gi."""
    return any(letter.isdigit() for letter in value) or value.lower() in _NUMBER_WORDS


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
