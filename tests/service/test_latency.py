"""How fast a lookup is while a draft step of 100 ms is under way."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest

from specbranch.service.client import ClientOptions, Committed, DraftClient
from tests.results import record
from tests.service.harness import PATIENCE_S, TARGET, scripted_service

SESSIONS, LOOKUPS = 64, 2000


def next_token(text: list[int]) -> int:
    return TARGET.distribution(tuple(text)).ids[0]


def test_a_lookup_does_not_wait_for_the_step_under_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--step-ms", "100")
    with scripted_service(tmp_path, *options) as service:
        settings = ClientOptions(service.address, "pearl", {"gamma": 4}, deadline_s=30.0)
        with contextlib.closing(DraftClient(settings)) as client:
            texts = [[1 + number % 40, 2 + number // 40, 3] for number in range(SESSIONS)]
            assert client.hello(PATIENCE_S)
            client.propose([Committed(text, 1) for text in texts])
            single_s = []
            for number in range(LOOKUPS):
                text = texts[number % SESSIONS]
                text.append(next_token(text))
                start_s = time.perf_counter()
                client.propose([Committed(text, 1)])
                single_s.append(time.perf_counter() - start_s)
            batch_s = []
            for _ in range(100):
                for text in texts:
                    text.append(next_token(text))
                start_s = time.perf_counter()
                client.propose([Committed(text, 1) for text in texts])
                batch_s.append(time.perf_counter() - start_s)
        assert client.counts.answered == client.counts.calls
        assert client.counts.timeouts == 0

    single = np.percentile(single_s, [50, 99]) * 1000
    batch = np.percentile(batch_s, [50, 99]) * 1000
    with capsys.disabled():
        print(
            f"\nlookup with a 100 ms step under way, {SESSIONS} sessions, round trip of the client: "
            f"p50 {single[0]:.2f} ms, p99 {single[1]:.2f} ms; all {SESSIONS} rows in one message: "
            f"p50 {batch[0]:.1f} ms, p99 {batch[1]:.1f} ms"
        )
    record(
        "lookup-latency",
        sessions=SESSIONS,
        step_ms=100,
        p50_ms=round(single[0], 3),
        p99_ms=round(single[1], 3),
        batch_p50_ms=round(batch[0], 2),
        batch_p99_ms=round(batch[1], 2),
    )
    # The goal is 1 ms on a quiet machine; shared test machines get some room. One that waits takes 50 ms at the median.
    assert single[0] < 5.0
    assert single[1] < 50.0
