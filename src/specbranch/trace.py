"""Read and write traces: a target's answers, the draft's distribution before each token, and the verdicts.

A trace is JSON lines, gzipped if the name ends in `.gz`: a header, then records. A record holds tokens and, for each,
the top-k of the draft distribution [ids, probabilities] (null if the draft had none in time) and its entropy in nats. A
record without a session is a whole answer. A record with a session is a verdict, the result of one verification step;
the verdicts of a session are in order of time and make up one answer. So a trace that a service is still writing can be
read after every line.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from specbranch.core.distribution import Distribution
from specbranch.errors import SpecBranchError

FORMAT = "specbranch-trace"
VERSION = 1
NO_DISTRIBUTION = Distribution((), (), 0.0)

T = TypeVar("T")
_TopK = tuple[list[int], list[float]]


class TraceError(SpecBranchError, ValueError):
    """A file is not a trace that this version can read, or the trace lacks what the caller needs."""


class Header(msgspec.Struct, frozen=True):
    """The first line of a trace file. `version` changes when older readers cannot read the file."""

    format: str = FORMAT
    version: int = VERSION
    target: str = ""
    draft: str = ""
    task: str = ""
    temperature: float = 0.0


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line after the header: a whole answer, or one verdict of a session with its time in seconds.

    `tokens` are those of the answer, or those that the verdict committed; `submitted` and `is_hit` are as in `Moment`.
    """

    tokens: list[int]
    heads: list[_TopK | None]  # the draft's top-k before each token
    entropy: list[float]  # of the draft's distribution before each token, in nats
    prompt: list[int] = []
    foreseen: list[int] = []  # H-RAD's prediction after each token, a `Signal`
    session: int | None = None
    at_s: float = 0.0
    submitted: int = 0
    is_hit: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """One recorded verdict: its time in seconds, and the number of tokens that it committed.

    `submitted` is the number of draft tokens that the target verified. `is_hit`: the draft had already computed its
    distribution after the committed tokens when the verdict came.
    """

    at_s: float
    committed: int
    submitted: int
    is_hit: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the target; `distributions[i]` is the draft's prediction of `tokens[i]`, or `NO_DISTRIBUTION`.

    `foreseen[i]` is H-RAD's prediction, a `Signal`, of whether no, some or all draft tokens of the window after
    `tokens[i]` are accepted; empty without H-RAD. `moments`: each verdict, if a service recorded the answer.
    """

    tokens: tuple[int, ...]
    distributions: tuple[Distribution, ...]
    prompt: tuple[int, ...] = ()
    foreseen: tuple[int, ...] = ()
    moments: tuple[Moment, ...] = ()

    def runs(self) -> list[int]:
        """Return for each position the number of consecutive tokens, from it on, that are the draft's most likely ones.

        The list has one more entry than the answer has tokens: the last entry, for the end, is 0.
        """
        runs = [0]
        for token, distribution in zip(reversed(self.tokens), reversed(self.distributions), strict=True):
            runs.append(runs[-1] + 1 if distribution.ids[:1] == (token,) else 0)
        return runs[::-1]


@dataclass(frozen=True, slots=True)
class Trace:
    """A target's answers with the draft's distributions."""

    header: Header
    answers: tuple[Answer, ...]

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a trace file and return the trace; raise `TraceError`, which names the cause, such as a wrong line."""
        return read_trace(Path(path))

    def write(self, path: str | Path) -> None:
        """Write the trace, one line per answer, without `moments`; the same trace always gives the same bytes."""
        write_trace(Path(path), self)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all answers together, without prompts."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def has_prompts(self) -> bool:
        """Whether the prompt of every answer is known."""
        return all(answer.prompt for answer in self.answers)

    def match_share(self, rank: int = 1) -> float:
        """Return the share of tokens that are among the `rank` most likely tokens of the draft's distributions.

        Tokens without a distribution do not count; the share is 0 if no token has one. With rank 1 it is how often a
        greedy draft agrees with the target.
        """
        found = [
            token in distribution.ids[:rank]
            for answer in self.answers
            for token, distribution in zip(answer.tokens, answer.distributions, strict=True)
            if distribution.ids
        ]
        return sum(found) / len(found) if found else 0.0


def read_trace(path: Path) -> Trace:
    """Read a trace file and return the trace; raise `TraceError`, which names the cause, such as a wrong line."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    lines = data.splitlines()
    if not lines:
        raise TraceError(f"{path}: empty; a trace begins with a header line")
    header = _decode(path, 1, lines[0], Header)
    if header.format != FORMAT or header.version != VERSION:
        raise TraceError(f"{path}: is {header.format} version {header.version}; this reads {FORMAT} version {VERSION}")
    by_session: dict[int | tuple[int], list[tuple[int, Record]]] = {}
    for number, line in enumerate(lines[1:], start=2):
        record = _decode(path, number, line, Record)
        key = (number,) if record.session is None else record.session
        by_session.setdefault(key, []).append((number, record))
    if not by_session:
        raise TraceError(f"{path}: holds a header but no answer")
    return Trace(header, tuple(_answer(path, records) for records in by_session.values()))


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace, one line per answer; the same trace always gives the same bytes.

    The verdicts that a service recorded with their times, `Answer.moments`, are not written.
    """
    records = [
        Record(
            list(a.tokens),
            [top_k_of(distribution) for distribution in a.distributions],
            [distribution.entropy for distribution in a.distributions],
            list(a.prompt),
            list(a.foreseen),
        )
        for a in trace.answers
    ]
    data = encode_line(trace.header) + b"".join(encode_line(record) for record in records)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def encode_line(line: Header | Record) -> bytes:
    """Return a header or record as one line of a trace file: JSON and a line end."""
    return msgspec.json.encode(line) + b"\n"


def top_k_of(distribution: Distribution, longest: int | None = None) -> _TopK | None:
    """Return a distribution's top-k for a `Record`: the token ids and their probabilities; None if it has no tokens.

    `longest` is the maximum of tokens to return (None: all).
    """
    if not distribution.ids:
        return None
    return list(distribution.ids[:longest]), [float(prob) for prob in distribution.probs[:longest]]


def _answer(path: Path, records: Sequence[tuple[int, Record]]) -> Answer:
    tokens: list[int] = []
    distributions: list[Distribution] = []
    foreseen: list[int] = []
    moments: list[Moment] = []
    for number, record in records:
        if not len(record.tokens) == len(record.heads) == len(record.entropy) > 0:
            raise TraceError(f"{path}:{number}: tokens, heads and entropy must have one common length, at least 1")
        if record.foreseen and len(record.foreseen) != len(record.tokens):
            raise TraceError(f"{path}:{number}: give one signal per token, or none")
        tokens += record.tokens
        distributions += [
            _distribution(path, number, top, h) for top, h in zip(record.heads, record.entropy, strict=True)
        ]
        foreseen += record.foreseen
        if record.session is not None:
            moments.append(Moment(record.at_s, len(record.tokens), record.submitted, record.is_hit))
    return Answer(tuple(tokens), tuple(distributions), tuple(records[0][1].prompt), tuple(foreseen), tuple(moments))


def _distribution(path: Path, number: int, top: _TopK | None, entropy: float) -> Distribution:
    if top is None:
        return NO_DISTRIBUTION
    ids, probs = top
    if not len(ids) == len(probs) > 0:
        raise TraceError(f"{path}:{number}: a top-k needs one probability per id, and at least one id")
    return Distribution(tuple(ids), tuple(probs), entropy)


def _decode(path: Path, number: int, line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: {error}") from error
