"""vLLM's command line as the user wrote it, read without vLLM's parser, which would load all of vLLM.

vLLM takes `--a-b X`, `--a_b X`, `--a-b=X`, and for JSON options also `--a-b.key X`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from specbranch.errors import FlagError
from specbranch.plugins.vllm.layout import Layout

FLAG_NAME = re.compile(r"--?[A-Za-z]")  # not a negative number
_SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-q": "quantization",
    "-cc": "compilation_config",
}


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


def layout_of(flags: Flags) -> Layout:
    """Return the layout that the flags of `vllm serve` ask for."""
    return Layout(
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
