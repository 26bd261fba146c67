"""Trace files: written, read back, and refused with a reason."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from specbranch.simulation.presets import PAIRS, make_trace
from specbranch.trace import NO_DISTRIBUTION, Trace, TraceError, read_trace, write_trace

TRACES = sorted((Path(__file__).parents[1] / "traces").glob("*.jsonl.gz"))


@pytest.fixture
def trace() -> Trace:
    return make_trace(PAIRS["llama-68m-7b"], 2, 20, random.Random(0))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_trace_survives_the_file(trace: Trace, tmp_path: Path, name: str) -> None:
    write_trace(tmp_path / name, trace)

    assert read_trace(tmp_path / name) == trace


def test_the_same_trace_gives_the_same_bytes(trace: Trace, tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_trace(tmp_path / name, trace)

    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_a_place_without_a_distribution_stays_without_one(trace: Trace, tmp_path: Path) -> None:
    first = trace.answers[0]
    gap = replace(
        first,
        distributions=(NO_DISTRIBUTION, *first.distributions[1:]),
        prompt=(3, 4),
        foreseen=(1,) * len(first.tokens),
    )
    write_trace(tmp_path / "a.jsonl", replace(trace, answers=(gap,)))

    assert read_trace(tmp_path / "a.jsonl").answers == (gap,)


HEADER = '{"format":"specbranch-trace","version":1}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        ("nonsense\n", ":1: "),
        ('{"format":"other"}\n', "is other version 1"),
        ('{"version":2}\n', "version 2; this reads"),
        (HEADER, "no answer"),
        (HEADER + '{"tokens":[1],"heads":[],"entropy":[0.1]}\n', ":2: tokens, heads and entropy"),
        (HEADER + '{"tokens":[1],"heads":[[[1,2],[0.5]]],"entropy":[0.1]}\n', "one probability per id"),
        (HEADER + '{"tokens":[1],"heads":[null],"entropy":[0],"foreseen":[1,2]}\n', "one signal per token"),
        (HEADER + '{"tokens":["x"],"heads":[],"entropy":[]}\n', ":2: Expected `int`"),
    ],
)
def test_a_bad_file_is_refused_with_the_line_and_the_reason(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)

    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "trace.jsonl.gz"
    damaged.write_bytes(b"not gzip")

    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(damaged)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "absent.jsonl")


def test_traces_of_the_flagship_pair_are_kept_here() -> None:
    assert [path.name.split("-")[-1].split(".")[0] for path in TRACES] == [
        "chat",
        "gsm8k",
        "humaneval",
        "summarization",
    ]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_a_recorded_trace_can_be_read_and_its_draft_is_of_some_use(path: Path) -> None:
    trace = read_trace(path)

    assert trace.num_tokens > 1000
    assert 0.5 < trace.match_share() < trace.match_share(3) < 1
