"""Trace files: what a target said, and the draft's law before each of those tokens.

JSON lines, gzipped if the name ends in `.gz`: a header, then one record per answer. A record holds the answer's tokens
and, for every token, the head of the draft law [ids, probabilities] and its entropy in nats.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from specbranch.core.law import Law

FORMAT = "specbranch-trace"
VERSION = 1

T = TypeVar("T")


class TraceError(ValueError):
    """A file is not a trace that this version can read."""


class Header(msgspec.Struct, frozen=True):
    """First line of a trace file. `version` changes when a reader must."""

    format: str = FORMAT
    version: int = VERSION
    target: str = ""
    draft: str = ""
    task: str = ""
    temperature: float = 0.0


class _Record(msgspec.Struct, frozen=True):
    tokens: list[int]
    heads: list[tuple[list[int], list[float]]]
    entropy: list[float]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the target; `laws[i]` is the draft's law before `tokens[i]`."""

    tokens: tuple[int, ...]
    laws: tuple[Law, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Answers with the draft's laws along them."""

    header: Header
    answers: tuple[Answer, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in all answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    def match_share(self, rank: int = 1) -> float:
        """Share of tokens that are among the draft's `rank` most likely: greedy agreement for rank 1."""
        hits = sum(
            token in law.ids[:rank]
            for answer in self.answers
            for token, law in zip(answer.tokens, answer.laws, strict=True)
        )
        return hits / self.num_tokens


def read_trace(path: Path) -> Trace:
    """Read a trace file, or raise `TraceError` with the line that is wrong."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    lines = data.splitlines()
    if not lines:
        raise TraceError(f"{path}: empty; a trace begins with a header line")
    header = _decode(path, 1, lines[0], Header)
    if header.format != FORMAT or header.version != VERSION:
        raise TraceError(f"{path}: is {header.format} version {header.version}; this reads {FORMAT} version {VERSION}")
    answers = [_answer(path, number, line) for number, line in enumerate(lines[1:], start=2)]
    if not answers:
        raise TraceError(f"{path}: holds a header but no answer")
    return Trace(header, tuple(answers))


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace; the same trace always gives the same bytes."""
    records = [
        _Record(list(a.tokens), [_head(law) for law in a.laws], [law.entropy for law in a.laws]) for a in trace.answers
    ]
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in (trace.header, *records))
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _head(law: Law) -> tuple[list[int], list[float]]:
    return list(law.ids), [float(prob) for prob in law.probs]


def _answer(path: Path, number: int, line: bytes) -> Answer:
    record = _decode(path, number, line, _Record)
    if not len(record.tokens) == len(record.heads) == len(record.entropy) > 0:
        raise TraceError(f"{path}:{number}: tokens, heads and entropy must be equally many, and at least one")
    laws = []
    for (ids, probs), entropy in zip(record.heads, record.entropy, strict=True):
        if not len(ids) == len(probs) > 0:
            raise TraceError(f"{path}:{number}: a head needs as many ids as probabilities, and at least one")
        laws.append(Law(tuple(ids), tuple(probs), entropy))
    return Answer(tuple(record.tokens), tuple(laws))


def _decode(path: Path, number: int, line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}:{number}: {error}") from error
