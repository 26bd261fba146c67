"""vLLM's command line: parse its flags, check their spelling, and read its arguments from its source.

vLLM accepts `--a-b X`, `--a_b X`, `--a-b=X`, and for JSON options also `--a-b.key X`. Importing vLLM takes seconds, so
its source is parsed instead; an argument that is not found there is left to vLLM's own parser.
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
_MIN_FIELDS = 100  # a source with fewer fields than this has an unknown layout
_NUMBERS = {"int", "float", "None"}


class _Flag(NamedTuple):
    name: str  # with dashes, without dotted keys
    path: list[str]  # the dotted keys
    value: str | None
    start: int
    end: int


class Flags:
    """The arguments of a vLLM command line, with methods to find flags and their values among them."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def has(self, *names: str) -> bool:
        """Return whether any of the flags called `names` is present, with or without a dotted key."""
        return any(flag.name in names for flag in self._flags())

    def value(self, *names: str) -> str | None:
        """Return the value of the last flag that is one of `names`; None if there is no such flag, or no value."""
        values = [flag.value for flag in self._flags() if flag.name in names]
        return values[-1] if values else None

    def pairs(self) -> list[tuple[str, str | None]]:
        """Return the name and value of every flag; the names have dashes and no dotted keys.

        A value is the text after `=`, or else the next word, even if that is a flag; None if there is no next word.
        """
        return [(flag.name.rstrip("+"), flag.value) for flag in self._flags()]

    def number(self, *names: str) -> int:
        """Return the value of a flag as a number; 1, which is vLLM's default, if the flag is missing.

        `names` are spellings of the same flag. Raise `FlagError` if the value is not a whole number of at least 1.
        """
        value = self.value(*names)
        if value is None:
            return 1
        if not value.isdecimal() or int(value) < 1:
            raise FlagError(f"{names[0]} is {value!r}; give a whole number of at least 1")
        return int(value)

    def take_json(self, name: str) -> tuple[dict[str, Any], Flags]:
        """Return the dict that the JSON option `name` and its dotted keys give together, and the remaining flags."""
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
        """Return the flags as arguments of `vllm.LLM`.

        A flag without a value becomes True, or False if it begins with `--no-`.
        """
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
    """Return arguments of `vllm.LLM` as the flags and values of a command line."""
    words: list[str] = []
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return words


def _argument(flag: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return one flag and its values as a dict with one argument of `vllm.LLM`; dotted keys become nested dicts."""
    first, *path = flag.split(".")
    if not first.startswith("--") and first not in _SHORT:
        raise FlagError(f"{first} is not known here; give the flag's long name")
    name = _SHORT.get(first, first.removeprefix("--").replace("-", "_"))
    value: Any = values[0] if len(values) == 1 else list(values)
    if not values:
        name, value = name.removeprefix("no_"), not name.startswith("no_")
    return {name: _at_path(path, value)}


def _at_path(path: Sequence[str], value: Any) -> Any:
    """Return a value nested in one dict for each key of the path; the value itself if the path is empty."""
    for key in reversed(path):
        value = {key: value}
    return value


def _merge(table: dict[str, Any], more: dict[str, Any]) -> None:
    """Merge `more` into `table`, in place; nested dicts are merged recursively, other values replaced."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(table.get(key), dict):
            _merge(table[key], value)
        else:
            table[key] = value


def _nested(path: Sequence[str], text: str, name: str) -> dict[str, Any]:
    value = _at_path(path, json_or_text(text))
    if not isinstance(value, dict):
        raise FlagError(f"{name} is {text!r}; give a JSON object")
    return value


def json_or_text(text: str) -> Any:
    """Parse a text as JSON; return the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def layout_of(flags: Flags) -> ParallelLayout:
    """Return the parallel layout that the flags of `vllm serve` configure."""
    return ParallelLayout(
        tensor=flags.number("--tensor-parallel-size", "-tp"),
        pipeline=flags.number("--pipeline-parallel-size", "-pp"),
        data=_local_data(flags),
        num_nodes=flags.number("--nnodes", "-n"),
        executor=flags.value("--distributed-executor-backend"),
    )


def _local_data(flags: Flags) -> int:
    """Return the number of data-parallel engines on this machine."""
    local = "--data-parallel-size-local", "-dpl"
    return flags.number(*local) if flags.has(*local) else flags.number("--data-parallel-size", "-dp")


def check_flags(flags: Flags, known: KnownArguments) -> None:
    """Raise `FlagError` for a flag that `vllm serve` does not have, or a value that should be a number and is not."""
    for name, value in flags.pairs():
        # vLLM also accepts -O3, and the first letters of a flag if no other flag begins with them.
        if not FLAG_NAME.match(name) or name.startswith("-O"):
            continue
        plain = f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name
        if not any(flag.startswith(plain) for flag in known.flags):
            raise FlagError(f"vLLM has no flag {name}; {_hint(name, known.flags, '`vllm serve --help` lists them')}")
        field = name.removeprefix("--").replace("-", "_")
        if field in known.numbers and value is not None and not _may_be_number(value):
            raise FlagError(f"{name} is {value!r}; give a number")


def check_arguments(arguments: Mapping[str, Any], known: KnownArguments) -> None:
    """Raise `FlagError` for an argument that `vllm.LLM` does not have, or text that should be a number and is not."""
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
    """Return whether vLLM might read the value as a number; it also accepts 1.5k or 4Gi."""
    return any(letter.isdigit() for letter in value) or value.lower() in _NUMBER_WORDS


@dataclass(frozen=True, slots=True)
class KnownArguments:
    """The flags and arguments that a version of vLLM accepts.

    `flags` are those of `vllm serve`, with dashes; `arguments` are those of `vllm.LLM`, as Python names; `numbers` are
    the names of arguments whose values are numbers.
    """

    flags: frozenset[str]
    arguments: frozenset[str]
    numbers: frozenset[str]


@dataclass(frozen=True, slots=True)
class KnownSpeculation:
    """The methods and keys that vLLM accepts in a `speculative_config`."""

    methods: frozenset[str]
    keys: frozenset[str]


@cache
def known_arguments() -> KnownArguments | None:
    """Return the flags and arguments of the installed vLLM; None if there is none or its source cannot be read."""
    package = _package()
    return read_arguments(package) if package is not None else None


@cache
def known_speculation() -> KnownSpeculation | None:
    """Return the methods and keys that the installed vLLM accepts in a `speculative_config`.

    Returns None if there is no vLLM or its source cannot be read.
    """
    package = _package()
    return read_speculation(package) if package is not None else None


def read_speculation(package: Path) -> KnownSpeculation | None:
    """Return the methods and keys of a `speculative_config`, read from the source of the vLLM in `package`.

    Returns None if the source has an unknown layout.
    """
    tree = _tree(package / _SPECULATION[0])
    if tree is None:
        return None
    literals = dict(_literals(tree))
    methods = frozenset(_strings(literals.get(_METHODS), literals))
    keys = frozenset(name for name, _ in _fields(tree, _SPECULATION[1:]))
    return KnownSpeculation(methods, keys) if methods and {"method", "model"} <= keys else None


def read_arguments(package: Path) -> KnownArguments | None:
    """Read the flags and arguments of the vLLM in `package` from its source; None if that has an unknown layout."""
    trees = [tree for name in (_ENGINE, *_FRONTENDS) if (tree := _tree(package / name)) is not None]
    fields = {name: kind for tree in trees for name, kind in _fields(tree, _CLASSES)}
    flags = {flag for tree in trees for flag in _flags(tree)}
    llm = _tree(package / _LLM[0])
    own = _parameters(llm, _LLM[1]) if llm is not None else set()
    if len(fields) < _MIN_FIELDS or len(flags) < _MIN_FIELDS or not own:
        return None
    return KnownArguments(
        frozenset(flags | {"--" + name.replace("_", "-") for name in fields}),
        frozenset(own | set(fields)),
        frozenset(name for name, kind in fields.items() if _is_number(kind)),
    )


def _package() -> Path | None:
    """Return the directory of the installed vLLM; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def _literals(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name that a `Literal[...]` is assigned to, with the contents of the brackets."""
    for line in tree.body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Subscript):
            for name in line.targets:
                if isinstance(name, ast.Name):
                    yield name.id, line.value.slice


def _strings(held: ast.expr | None, literals: Mapping[str, ast.expr]) -> Iterator[str]:
    """Yield all strings in `held`, the contents of a `Literal[...]`, and in the literals that it names.

    `literals` has the contents of all literals by name.
    """
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
    """Yield the name and the annotation of each annotated field of the classes called `names`."""
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef) and owner.name in names:
            for line in owner.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id, line.annotation


def _flags(tree: ast.Module) -> Iterator[str]:
    """Yield the flags that the source adds to a parser by literal names."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            for word in call.args:
                if isinstance(word, ast.Constant) and isinstance(word.value, str) and word.value.startswith("-"):
                    yield word.value


def _parameters(tree: ast.Module, owner: str) -> set[str]:
    """Return the names of the constructor's parameters of the class `owner`; empty if there is no such class."""
    for line in ast.walk(tree):
        if isinstance(line, ast.ClassDef) and line.name == owner:
            for method in line.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    return {one.arg for one in (*method.args.args, *method.args.kwonlyargs)} - {"self"}
    return set()


def _is_number(kind: ast.expr) -> bool:
    """Return whether an annotation allows only numbers, or numbers and None."""
    names = {part.id for part in ast.walk(kind) if isinstance(part, ast.Name)}
    others = [part for part in ast.walk(kind) if isinstance(part, (ast.Subscript, ast.Attribute))]
    return bool(names - {"None"}) and names <= _NUMBERS and not others
