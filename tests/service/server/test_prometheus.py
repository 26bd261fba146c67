"""What a service tells of itself: the same figures to whoever asks, and no names of targets."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from pathlib import Path

from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.client.stats import ServiceStatus, StatsClient, parse_metrics_text
from specbranch.service.wire.messages import VERSION, Overview, OverviewRequest, encode
from specbranch.version import __version__
from tests.service.client.test_stats import ask_until
from tests.service.harness import PATIENCE_S, VOCAB, Walk, free_port, scripted_service
from tests.service.rogue import rogue
from tests.service.server.test_lookup import Bench

CHANGING = {"uptime_seconds", "memory_bytes"}


def overview_of(bench: Bench) -> Overview:
    (reply,) = bench.ask(OverviewRequest(7), client=b"other")
    assert isinstance(reply, Overview) and reply.round == 7
    return reply


def page_figures(port: int) -> dict[str, float]:
    """The samples of a service's endpoint, by the names of the wire."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
        samples = list(parse_metrics_text(page.read().decode()))
    return {
        "/".join([sample.name.removeprefix("specbranch_draft_").removesuffix("_total"), *sample.labels.values()]): (
            sample.value
        )
        for sample in samples
    }


def test_prometheus_and_the_wire_tell_the_same(tmp_path: Path) -> None:
    port, begin_s = free_port(), time.monotonic()
    with (
        scripted_service(tmp_path, "--metrics-port", str(port)) as service,
        contextlib.closing(StatsClient(service.address, None)) as stats_client,
    ):
        options = ClientOptions(service.address, "pearl", {"gamma": 4}, deadline_s=PATIENCE_S)
        with contextlib.closing(DraftClient(options)) as client:
            client.hello(PATIENCE_S)
            walk = Walk(client, [1, 2, 3])
            for _ in range(20):
                walk.step()
            client.hello(PATIENCE_S)  # answered in order, so the last step has come
        end_s = time.monotonic() + PATIENCE_S
        while True:  # until the draft has nothing left to prepare
            ask_until(stats_client, ServiceStatus.ANSWERS)
            assert stats_client.overview is not None
            told, scraped = stats_client.overview.figures, page_figures(port)
            if {name: told[name] for name in told.keys() - CHANGING} == {
                name: scraped[name] for name in scraped.keys() - CHANGING
            }:
                break
            assert time.monotonic() < end_s, (told, scraped)

    assert told["hits"] + told["misses"] == 19
    assert told["target_steps"] == 20
    assert told["step_seconds"] > 0.002 * told["steps"] > 0
    assert told["sessions"] == told["targets"] == 1
    assert told["memory_bytes"] > 10_000_000
    assert 0 < told["uptime_seconds"] < time.monotonic() - begin_s
    assert stats_client.overview.settings == {
        "version": __version__,
        "wire": VERSION,
        "model": "scripted",
        "device": "none",
        "vocab_len": VOCAB,
        "cache_tokens": 1 << 30,
        "max_handles": 1 << 30,
        "row_limit": 64,
        "max_sessions": 256,
        "max_session_tokens": 4_000_000,
        "prefill_chunk": 512,
    }


def test_targets_are_counted_and_not_named() -> None:
    bench = Bench()
    for namespace in (b"secret-one", b"secret-two", b"secret-two"):
        bench.open([1, 2, len(bench.store)], namespace=namespace)
    bench.now_s += 30
    overview = overview_of(bench)

    assert (overview.figures["targets"], overview.figures["sessions"]) == (2, 3)
    assert overview.figures["uptime_seconds"] == 30
    assert b"secret" not in encode(overview)


def test_the_sums_are_over_all_targets_and_those_that_were_forgotten() -> None:
    bench = Bench(max_sessions=1)
    for namespace in (b"ours", b"theirs"):
        bench.open([1, 2], namespace=namespace)
        bench.step([1, 2], 3, namespace=namespace)
    figures = overview_of(bench).figures

    assert figures["hits"] + figures["misses"] == 2
    assert (figures["sessions"], figures["evictions"]) == (1, 1)


def test_a_service_of_an_older_release_is_known_by_its_refusal(tmp_path: Path) -> None:
    with rogue(tmp_path, "old") as service, contextlib.closing(StatsClient(service.address, None)) as stats_client:
        ask_until(stats_client, ServiceStatus.ANSWERS)

    assert stats_client.refusal is not None and "get-overview" in stats_client.refusal
    assert stats_client.overview is None
