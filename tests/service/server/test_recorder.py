"""Traces recorded by a service: what the file says is what happened, also when the service was killed."""

from __future__ import annotations

import logging
import os
import resource
from contextlib import closing
from pathlib import Path

import pytest

from specbranch.core.distribution import Distribution
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.server.recorder import TraceRecorder, VerdictRecord
from specbranch.trace import read_trace
from tests.service.harness import DRAFT, PATIENCE_S, Walk, scripted_service


def test_a_killed_service_leaves_a_whole_trace_of_what_it_drafted_for(tmp_path: Path) -> None:
    """A real process; the texts, the distributions and the submissions in its file are those of the run."""
    path = tmp_path / "trace.jsonl"
    with scripted_service(tmp_path, "--record", str(path)) as service:
        with closing(DraftClient(ClientOptions(service.address, "sps", {"gamma": 3}, deadline_s=PATIENCE_S))) as client:
            assert client.hello(PATIENCE_S) is not None
            walks = [Walk(client, [1, 2, 3]), Walk(client, [4, 5])]
            for _ in range(40):
                for walk in walks:
                    walk.step()
        service.kill()
    trace = read_trace(path)

    assert trace.header.draft == "scripted"
    assert len(trace.answers) == 2
    for walk, answer in zip(walks, trace.answers, strict=True):
        text = (*answer.prompt, *answer.tokens)
        assert text == tuple(walk.tokens[: len(text)])
        assert len(walk.tokens) - len(text) <= 6, "all but the last verdict was told"
        assert len(answer.moments) == 39, "the first step opens the text"
        assert sum(moment.committed for moment in answer.moments) == len(answer.tokens)
        assert [moment.at_s for moment in answer.moments] == sorted(moment.at_s for moment in answer.moments)
        known = [index for index, distribution in enumerate(answer.distributions) if distribution.ids]
        assert len(known) > len(answer.tokens) / 2
        for index in known:
            true = DRAFT.distribution(text[: len(answer.prompt) + index])
            assert answer.distributions[index].ids == true.ids[:10]
            assert answer.distributions[index].probs == pytest.approx([float(prob) for prob in true.probs[:10]])


def test_a_service_that_starts_again_goes_on_with_the_file(tmp_path: Path) -> None:
    """The first one was killed within a line; its sessions are not taken for those of the second."""
    path = tmp_path / "trace.jsonl"
    distribution = Distribution((3, 4), (0.5, 0.25), 1.0)
    for _ in range(2):
        recorder = TraceRecorder(path, "small")
        recorder.note(VerdictRecord(1, 0.0, [7], [3], [distribution], 0, False))
        recorder.note(VerdictRecord(1, 1.0, [], [5], [None], 1, False))
        recorder.close()
        with path.open("ab") as file:
            file.write(b'{"tokens": [1')
    recorder = TraceRecorder(path, "small")
    recorder.close()

    answers = read_trace(path).answers
    assert [answer.tokens for answer in answers] == [(3, 5), (3, 5)]


def test_a_full_file_says_so_once_and_stays_readable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path, "small", max_bytes=400)
    with caplog.at_level(logging.WARNING):
        for at_s in range(20):
            recorder.note(
                VerdictRecord(
                    1, float(at_s), [7] if at_s == 0 else [], [3], [Distribution((3, 4), (0.5, 0.25), 1.0)], 1, True
                )
            )
            recorder.flush()
    recorder.close()

    assert path.stat().st_size <= 400
    assert len(caplog.records) == 1 and "limit" in caplog.records[0].message
    (answer,) = read_trace(path).answers
    assert 0 < len(answer.tokens) < 20 and answer.prompt == (7,)


def test_a_disk_that_is_full_to_the_end_costs_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A real file that may not grow. What was not written is written again when the file is closed, again in vain."""
    recorder = TraceRecorder(tmp_path / "trace.jsonl", "small")
    recorder.note(VerdictRecord(1, 0.0, [7], [3], [None], 0, False))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        recorder.flush()
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert (tmp_path / "trace.jsonl").stat().st_size <= 10
    assert ["ends here" in record.message for record in caplog.records] == [True, False]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_trace_can_be_read_by_its_owner_only_and_one_that_was_there_stays_as_it_was(
    tmp_path: Path, umask: int
) -> None:
    """It holds what users wrote. Whoever opened an older one to others meant it."""
    (tmp_path / "shared.jsonl").touch()
    (tmp_path / "shared.jsonl").chmod(0o640)
    before = os.umask(umask)
    try:
        for name in ("new.jsonl", "shared.jsonl"):
            recorder = TraceRecorder(tmp_path / name, "small")
            recorder.note(VerdictRecord(1, 0.0, [7], [3], [None], 0, False))
            recorder.close()
    finally:
        os.umask(before)

    assert (tmp_path / "new.jsonl").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "shared.jsonl").stat().st_mode & 0o777 == 0o640
    assert len(read_trace(tmp_path / "shared.jsonl").answers) == 1
