"""The metrics of a run, without vLLM: what the proposer shows, what the service says, and what appears."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbranch.core.text_drafter import TextCounts
from specbranch.plugins.vllm import stats_file
from specbranch.plugins.vllm.metrics import STATES, Collector
from specbranch.plugins.vllm.stats_file import (
    RUN,
    PublishedStats,
    StatsFile,
    open_stats_file,
    read_stats_files,
    remove_stats_files,
)
from specbranch.service.client.client import DraftClient
from specbranch.service.client.gate import Decision
from specbranch.service.client.interface import ClientOptions
from specbranch.service.client.stats import StatsClient
from specbranch.service.client.transport import ZmqTransport
from tests.service.harness import PATIENCE_S, VOCAB, Walk, scripted_service, wait_for

COUNTS = {"calls": 9, "answered": 7, "timeouts": 2, "wait_s": 0.5}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(RUN, "r1")
    return "r1"


HITS = "specbranch_hits_total", "3"


def show(address: str | list[str], namespace: bytes = b"ours", engine: int = 0, **changes: Any) -> StatsFile:
    common = {"model": "target", "engine": engine, "address": address, "namespace": namespace}
    counters = {"counts": COUNTS, "lens": [4, 0, 3, 2], "asides": {"lora": 6}}
    written = open_stats_file(lambda: ("target", engine))
    assert written is not None
    written.publish(PublishedStats(**{**common, **counters, **changes}))
    return written


@pytest.fixture
def collector(run: str) -> Iterator[Collector]:
    with contextlib.closing(Collector(run)) as collector:
        yield collector


def samples(collector: Collector) -> dict[tuple[str, ...], float]:
    """All samples by name and label values; the model's name is left out."""
    found = {}
    for family in collector.collect():
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            found[sample.name, *labels] = sample.value
    return found


def rounds_of(found: dict[tuple[str, ...], float]) -> dict[str, float]:
    return {
        engines: found["specbranch_hits_total", engines] + found["specbranch_misses_total", engines]
        for engines in ("0", "1,2")
        if ("specbranch_hits_total", engines) in found
    }


def test_without_a_proposer_nothing_appears(collector: Collector) -> None:
    assert collector.describe() == []
    assert collector.collect() == []


def test_a_process_that_no_endpoint_belongs_to_writes_no_file(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN)

    assert open_stats_file(lambda: ("target", 0)) is None


def test_what_the_proposer_counts_appears_also_without_a_service(collector: Collector) -> None:
    show("ipc:///nowhere/draft.sock")
    found = samples(collector)

    assert found["specbranch_calls_total", "0"] == 9
    assert found["specbranch_timeouts_total", "0"] == 2
    assert found["specbranch_wait_seconds_total", "0"] == 0.5
    assert found["specbranch_aside_rows_total", "0", "lora"] == 6
    assert [found["specbranch_submitted_tokens_bucket", "0", le] for le in ("0.0", "1.0", "2.0", "3.0", "+Inf")] == [
        4,
        4,
        7,
        9,
        9,
    ]
    assert found["specbranch_submitted_tokens_sum", "0"] == 12
    assert found["specbranch_state", "0", "unreachable"] == 1
    assert found["specbranch_state", "0", "on"] == 0
    assert ("specbranch_hits_total", "0") not in found


def test_what_the_service_knows_appears_by_engine_and_once_for_a_shared_namespace(
    collector: Collector, tmp_path: Path
) -> None:
    with scripted_service(tmp_path) as service:
        for engine, namespace in enumerate((b"one", b"two", b"two")):
            show(service.address, namespace, engine, is_lagging=engine == 1)
            client = DraftClient(ClientOptions(service.address, "pearl", {"gamma": 3}, "confidence", 60.0, namespace))
            client.hello(PATIENCE_S)
            walk = Walk(client, [1, 2, engine])
            for _ in range(10):
                walk.step()
            client.hello(PATIENCE_S)  # answered in order, so the last step has come
            client.close()
        # A message that came late is counted later, and a step that reads tells nothing of the time of a row.
        end_s = time.monotonic() + PATIENCE_S
        while (
            rounds_of(found := samples(collector)) != {"0": 9, "1,2": 18}
            or not found["specbranch_draft_first_row_seconds", "0"]
        ):
            assert time.monotonic() < end_s, rounds_of(found)
            time.sleep(0.2)

    assert found["specbranch_sessions", "1,2"] == 2
    assert 0 < found["specbranch_draft_first_row_seconds", "0"] < PATIENCE_S
    assert found["specbranch_state", "0", "on"] == found["specbranch_state", "1", "lagging"] == 1
    assert {labels[2] for labels in found if labels[:2] == ("specbranch_rolled_back_tokens_total", "0")} == {
        "rejected",
        "unused",
        "cut",
    }


def test_of_several_services_the_sums_appear_and_the_state_of_the_best(collector: Collector, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    nowhere = f"ipc://{tmp_path}/nowhere.sock"
    with scripted_service(tmp_path / "one") as one, scripted_service(tmp_path / "two") as two:
        show([one.address, nowhere, two.address], b"ours")
        for service, num_steps in ((one, 4), (two, 7)):
            client = DraftClient(ClientOptions(service.address, "pearl", {"gamma": 3}, "confidence", 60.0, b"ours"))
            with contextlib.closing(client):
                client.hello(PATIENCE_S)
                walk = Walk(client, [1, 2, 3])
                for _ in range(num_steps):
                    walk.step()
                client.hello(PATIENCE_S)  # answered in order, so the last step has come
        end_s = time.monotonic() + PATIENCE_S
        while (
            rounds_of(found := samples(collector)) != {"0": 3 + 6}
            or not found["specbranch_state", "0", "on"]
            or not found["specbranch_draft_first_row_seconds", "0"]
        ):
            assert time.monotonic() < end_s, found
            time.sleep(0.2)

    assert found["specbranch_sessions", "0"] == 2
    assert 0 < found["specbranch_draft_first_row_seconds", "0"] < PATIENCE_S


def test_texts_that_are_not_drafted_for_appear_by_reason_and_target(collector: Collector, tmp_path: Path) -> None:
    with scripted_service(tmp_path, "--cache-tokens", "100") as service:
        for engine, namespace in enumerate((b"one", b"two")):
            show(service.address, namespace, engine, counts={"oversized": 4})
        client = DraftClient(ClientOptions(service.address, "pearl", {"gamma": 3}, "confidence", 60.0, b"two"))
        with contextlib.closing(client):
            client.hello(PATIENCE_S)
            client.announce_prompts([[1] * 90, [2] * 91, [3, VOCAB], [4, 5]])
            end_s = time.monotonic() + PATIENCE_S
            while (found := samples(collector)).get(("specbranch_sessions", "1")) != 4:
                assert time.monotonic() < end_s, found
                time.sleep(0.2)

    reasons = ("too_long", "foreign_token", "no_room")
    assert [found["specbranch_undrafted_total", "1", reason] for reason in reasons] == [2, 1, 0]
    assert [found["specbranch_undrafted_total", "0", reason] for reason in reasons] == [0, 0, 0]
    assert found["specbranch_aside_rows_total", "1", "oversized"] == 4


def test_a_service_that_hangs_delays_one_scrape_a_little_and_the_next_not_at_all(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first waits once, within the one timeout of all engines; the others ask for no wait."""
    waits_s: list[float] = []

    class NotedLink(ZmqTransport):
        def await_readable(self, timeout_s: float) -> bool:
            waits_s.append(timeout_s)
            return super().await_readable(timeout_s)

    monkeypatch.setattr("specbranch.service.client.stats.ZmqTransport", NotedLink)
    with scripted_service(tmp_path) as service:
        for engine in range(4):
            show(service.address, bytes([engine]), engine)
        wait_for(lambda: is_on(samples(collector)) and not any(map(is_asking, collector._stats_clients.values())))
        service.signal(signal.SIGSTOP)
        waits_s.clear()
        samples(collector)
        first_s = list(waits_s)
        wait_for(lambda: is_lagging(samples(collector)))
        found = samples(collector)
        service.signal(signal.SIGCONT)

    assert first_s == sorted(first_s, reverse=True) and 0 < first_s[0] <= 0.04
    assert waits_s == first_s
    assert found[HITS] == 0


def is_asking(stats_client: StatsClient) -> bool:
    """Whether a question is open: its answer came late, so that the next question is not waited for."""
    return stats_client._open_s is not None


def is_on(found: dict[tuple[str, ...], float]) -> bool:
    return HITS in found and all(found["specbranch_state", str(engine), "on"] for engine in range(4))


def is_lagging(found: dict[tuple[str, ...], float]) -> bool:
    return all(found["specbranch_state", str(engine), "lagging"] for engine in range(4))


def test_what_the_gate_decided_appears_by_load(collector: Collector) -> None:
    decisions = [Decision(8, False, 9.0, 9.5, 256), Decision(1, True, 4.0, 2.0, 512), Decision(2, True, 5.0, 3.0, 512)]
    show("ipc:///nowhere/draft.sock", gate=decisions)
    found = samples(collector)

    assert [found["specbranch_gate_open", "0", rows] for rows in ("1", "2", "5-8")] == [1, 1, 0]
    assert found["specbranch_gate_tokens_per_second", "0", "5-8", "drafts"] == 9.0
    assert found["specbranch_gate_tokens_per_second", "0", "5-8", "plain"] == 9.5


def test_a_proposer_that_does_not_draft_is_off(collector: Collector) -> None:
    show("ipc:///nowhere/draft.sock", namespace=b"")

    assert samples(collector)["specbranch_state", "0", "off"] == 1


def test_a_name_is_shown_by_the_services_that_are_used_and_unreachable_without_any(collector: Collector) -> None:
    show("dns://drafts:5757", services=[])
    show("dns://drafts:5757", engine=1, services=["ipc:///nowhere/draft.sock"])
    found = samples(collector)

    assert found["specbranch_state", "0", "unreachable"] == found["specbranch_state", "1", "unreachable"] == 1


def test_a_proposer_without_a_service_drafts_from_the_text_or_is_off(collector: Collector) -> None:
    text = TextCounts(text_drafts=5, text_tokens=20, text_accepted=12, text_faults=1)
    show([], namespace=b"", counts=text.as_dict())
    show([], namespace=b"", engine=1, counts={})
    found = samples(collector)

    assert found["specbranch_state", "0", "text"] == found["specbranch_state", "1", "off"] == 1
    assert found["specbranch_text_drafts_total", "0"] == 5
    assert found["specbranch_text_tokens_total", "0"] == 20
    assert found["specbranch_text_accepted_tokens_total", "0"] == 12
    assert found["specbranch_text_faults_total", "0"] == 1


def test_a_draft_with_another_vocabulary_is_a_state_of_its_own_while_it_is_there(
    collector: Collector, tmp_path: Path
) -> None:
    counts = {**COUNTS, "other_vocab": 8}
    with scripted_service(tmp_path) as service:
        show(service.address, vocab_mismatch=True, is_lagging=True, is_closed=True, counts=counts)
        end_s = time.monotonic() + PATIENCE_S
        while (found := samples(collector))["specbranch_state", "0", "vocabulary"] != 1:
            assert time.monotonic() < end_s, found
            time.sleep(0.2)
    after = samples(collector)

    assert sum(found["specbranch_state", "0", state] for state in STATES) == 1
    assert found["specbranch_other_vocabulary_total", "0"] == 8
    assert after["specbranch_state", "0", "unreachable"] == 1


def test_an_address_that_cannot_be_used_costs_the_metrics_and_nothing_else(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    show("tcp://127.0.0.1:1")
    with caplog.at_level(logging.WARNING):
        assert collector.collect() == []

    assert "could not be collected" in caplog.text


def test_a_reader_never_sees_half_of_what_is_written(run: str) -> None:
    written = show("ipc:///nowhere", lens=[0] * 40)
    is_over = threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            written.publish(
                PublishedStats(model="m", engine=0, address="a" * (number % 50), namespace=b"n", lens=[number] * 40)
            )

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen: list[PublishedStats] = []
        end_s = time.monotonic() + PATIENCE_S
        while len(seen) <= 200:
            assert time.monotonic() < end_s, len(seen)
            seen += read_stats_files(run)
    finally:
        is_over.set()
        writer.join()

    assert all(len(set(shown.lens)) == 1 for shown in seen)


def test_stats_files_can_be_read_by_their_owner_only_and_go_with_the_run(run: str, tmp_path: Path) -> None:
    show("ipc:///nowhere")
    (path,) = tmp_path.glob("specbranch-metrics-*")
    assert path.stat().st_mode & 0o777 == 0o600
    remove_stats_files(run)

    assert list(read_stats_files(run)) == []


def test_what_is_too_long_to_show_is_not_shown(run: str) -> None:
    show("ipc:///nowhere", asides={str(number): number for number in range(5000)})

    assert list(read_stats_files(run)) == []


def test_the_first_process_names_the_run_and_its_children_keep_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN, "inherited")
    assert stats_file.begin_run() != "inherited"
    monkeypatch.setenv(RUN, "inherited")
    monkeypatch.setattr(stats_file, "is_first_process", lambda: False)
    assert stats_file.begin_run() == "inherited"
    monkeypatch.delenv(RUN)
    assert stats_file.begin_run()


REGISTER = """
import sys
{before}
from specbranch.plugins.vllm.register import register
register(); register()
assert not {{"torch", "vllm"}} & {{name for name, module in sys.modules.items() if module}}
{after}
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "import prometheus_client",
            "from specbranch.plugins.vllm.metrics import Collector\n"
            "assert sum(isinstance(c, Collector) for c in prometheus_client.REGISTRY._collector_to_names) == 1\n"
            "assert b'specbranch' not in prometheus_client.generate_latest()",
        ),
        ("sys.modules['prometheus_client'] = None", ""),
    ],
    ids=["with prometheus", "without"],
)
def test_the_entry_point_is_light_registers_once_and_never_raises(before: str, after: str) -> None:
    program = REGISTER.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


MIRROR = """
import multiprocessing, sys, time
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from specbranch.plugins.vllm.register import register
from specbranch.plugins.vllm.stats_file import PublishedStats, open_stats_file

multiprocessing.current_process().name = sys.argv[1]
register()
stats_file = open_stats_file(lambda: ("target", 0))
registry = CollectorRegistry()
MultiProcessCollector(registry)
last = 'specbranch_submitted_tokens_bucket{engine="0",le="0.0",model_name="target"} '  # is carried over last
for calls, total in ((5, 5), (9, 9), (2, 11)):
    lens = [calls, 0, 3]
    counters = {"counts": {"calls": calls}, "lens": lens, "asides": {"lora": 4}}
    stats_file.publish(PublishedStats(model="target", engine=0, address="ipc:///nowhere", namespace=b"n", **counters))
    end_s = time.monotonic() + (120 if sys.argv[1].endswith("0") else 0.6)  # the other one carries nothing over
    while f"{last}{total}.0" not in generate_latest(registry).decode() and time.monotonic() < end_s:
        time.sleep(0.1)
print(generate_latest(registry).decode())
"""


@pytest.mark.parametrize("name", ["ApiServer_0", "ApiServer_1"])
def test_of_several_api_servers_the_first_carries_the_metrics_over(name: str, run: str, tmp_path: Path) -> None:
    """A counter that falls has begun anew, as Prometheus itself would have it."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", MIRROR, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    if name != "ApiServer_0":
        assert "specbranch" not in done.stdout
        return
    lines = done.stdout.splitlines()
    assert 'specbranch_calls_total{engine="0",model_name="target"} 11.0' in lines
    assert 'specbranch_aside_rows_total{cause="lora",engine="0",model_name="target"} 4.0' in lines
    assert 'specbranch_submitted_tokens_bucket{engine="0",le="0.0",model_name="target"} 11.0' in lines
    assert any(re.match(r'specbranch_state\{.*state="unreachable"\} 1\.0', line) for line in lines)
