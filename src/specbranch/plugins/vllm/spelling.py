"""Flags and arguments that vLLM would refuse minutes later, after a draft has been loaded."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from specbranch.errors import FlagError
from specbranch.plugins.vllm.compat.source import KnownArguments
from specbranch.plugins.vllm.flags import FLAG_NAME, Flags

_NUMBER_WORDS = ("auto", "none")


def refuse_unknown_flags(flags: Flags, known: KnownArguments) -> None:
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


def refuse_unknown_arguments(arguments: Mapping[str, Any], known: KnownArguments) -> None:
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
