"""Inputs made of other inputs, by a seed: a fuzzer without feedback, for where no other is installed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

Mutation = Callable[[random.Random, bytearray], None]

_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|\btrue\b|\bfalse\b|\bnull\b')
# What readers of text forget: other types, numbers at the edge or beyond it, depth.
_TEXTS = (
    *(b"0", b"-1", b"1", b"1e400", b"-1e-400", b"0.5", b"NaN", b"-Infinity", b"inf"),
    *(b"2147483648", b"9223372036854775808", b"1" + b"0" * 400, b"1" * 5000),
    *(b"true", b"null", b'""', b'"x"', b'"\\ud800"', b'"\xff"', b"[]", b"{}", b"[[]]", b'{"a":1}', b"[" * 3000),
)
_NUMBERS = tuple(
    value.to_bytes(size, "little")
    for size in (1, 2, 4, 8)
    for value in (0, 1, 2 ** (8 * size - 1) - 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1)
)


def mutated(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds, changed in one to four places."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.1:
            _splice(rng, data, rng.choice(seeds))
        else:
            rng.choice(_MUTATIONS)(rng, data)
    return bytes(data)


def _part(rng: random.Random, data: bytearray) -> slice:
    start = rng.randint(0, len(data))
    return slice(start, start + min(int(rng.expovariate(1 / 8)) + 1, len(data) - start))


def _splice(rng: random.Random, data: bytearray, other: bytes) -> None:
    data[rng.randint(0, len(data)) :] = other[rng.randint(0, len(other)) :]


def _flip(rng: random.Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(rng: random.Random, data: bytearray) -> None:
    del data[_part(rng, data)]


def _end(rng: random.Random, data: bytearray) -> None:
    del data[rng.randint(0, len(data)) :]


def _repeat(rng: random.Random, data: bytearray) -> None:
    part = data[_part(rng, data)]
    data[(place := rng.randint(0, len(data))) : place] = part * rng.choice((1, 2, 50))


def _number(rng: random.Random, data: bytearray) -> None:
    value = rng.choice(_NUMBERS)
    place = rng.randint(0, len(data))
    data[place : place + len(value)] = value


def _value(rng: random.Random, data: bytearray) -> None:
    """Another value in place of one that a text has."""
    found = list(_VALUE.finditer(data))
    if found:
        start, end = rng.choice(found).span()
        data[start:end] = rng.choice((*_TEXTS, rng.choice(found).group()))


_MUTATIONS: tuple[Mutation, ...] = (_flip, _cut, _end, _repeat, _number, _value, _value, _value)
