"""Stats of a running service: one namespace only, and never a long wait."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.client.stats import ServiceStatus, StatsClient
from specbranch.service.wire.messages import StatsReply, StatsRequest
from tests.service.harness import PATIENCE_S, START_S, Walk, WatchedLink, scripted_service, wait_for
from tests.service.rogue import rogue
from tests.service.server.test_lookup import Bench
from tests.world.schedule import Clock

TIMEOUT_S = 0.03


@contextlib.contextmanager
def reporter_for(address: str, namespace: bytes = b"ours") -> Iterator[StatsClient]:
    with contextlib.closing(StatsClient(address, namespace)) as stats_client:
        yield stats_client


def ask_until(stats_client: StatsClient, reach: ServiceStatus, timeout_s: float = PATIENCE_S) -> None:
    end_s = time.monotonic() + timeout_s
    while (found := stats_client.poll(TIMEOUT_S)) is not reach:
        assert time.monotonic() < end_s, f"the service is still {found}"
        time.sleep(0.02)


def test_figures_are_of_one_namespace_and_add_up(tmp_path: Path) -> None:
    with scripted_service(tmp_path) as service, reporter_for(service.address) as stats_client:
        options = ClientOptions(service.address, "pearl", {"gamma": 4}, deadline_s=PATIENCE_S, namespace=b"ours")
        with contextlib.closing(DraftClient(options)) as client:
            client.hello(PATIENCE_S)
            walk = Walk(client, [1, 2, 3])
            end_s = time.monotonic() + PATIENCE_S
            while len(walk.calls_s) < 40 or walk.num_accepted < 10:
                assert time.monotonic() < end_s, client.counts
                walk.step()
                time.sleep(0.01)
            client.hello(PATIENCE_S)  # answered in order, so the last step has come
        wait_for(lambda: stats_client.poll(TIMEOUT_S) is ServiceStatus.ANSWERS and is_timed(stats_client))
        figures = stats_client.stats

        assert figures is not None and figures.sessions == 1
        # The service learns of a verdict with the next step, so the last one is not among them.
        assert 0 < figures.accepted <= walk.num_accepted
        assert figures.rounds == len(walk.calls_s) - 1
        assert 0 < figures.hits <= figures.rounds
        assert figures.accepted <= figures.submitted <= figures.accepted + figures.rejected + 4
        with reporter_for(service.address, b"another") as stranger:
            ask_until(stranger, ServiceStatus.ANSWERS)
            assert stranger.stats is not None and stranger.stats.rounds == 0 == stranger.stats.sessions


def is_timed(stats_client: StatsClient) -> bool:
    """Whether the service has told what a row of a draft step takes; a step that reads a text does not say it."""
    return stats_client.stats is not None and stats_client.stats.first_row_us > 0


def test_a_service_that_hangs_is_waited_for_once_and_one_that_died_not_at_all(tmp_path: Path) -> None:
    """Its own clock stands still: what is late and what is silent does not depend on the machine."""
    clock = Clock()
    with scripted_service(tmp_path) as service:
        link = WatchedLink(service.address, clock)
        with contextlib.closing(StatsClient(service.address, b"ours", transport=link, clock=link.now)) as stats_client:
            ask_until(stats_client, ServiceStatus.ANSWERS)
            service.signal(signal.SIGSTOP)
            assert [waits(stats_client, link, ServiceStatus.LATE) for _ in range(5)] == [True, *[False] * 4]
            clock.leap(1.1)
            assert not waits(stats_client, link, ServiceStatus.SILENT)

            service.signal(signal.SIGCONT)
            ask_until(stats_client, ServiceStatus.ANSWERS)
            service.kill()
            ask_until(stats_client, ServiceStatus.ABSENT)
            assert not waits(stats_client, link, ServiceStatus.ABSENT)
            assert stats_client.stats is not None

            service.start()
            ask_until(stats_client, ServiceStatus.ANSWERS, START_S)


def waits(stats_client: StatsClient, link: WatchedLink, reach: ServiceStatus) -> bool:
    """Whether a question that finds the service like this waits for the answer."""
    num_waits = len(link.waits_s)
    assert stats_client.poll(TIMEOUT_S) is reach
    return len(link.waits_s) > num_waits


def test_a_service_that_sends_without_end_holds_nobody_up(tmp_path: Path) -> None:
    """No question goes on past its time."""
    with rogue(tmp_path, "garbage") as service:
        link = WatchedLink(service.address)
        with contextlib.closing(StatsClient(service.address, b"ours", transport=link, clock=link.now)) as stats_client:
            stats_client.poll(PATIENCE_S)  # this one connects
            for _ in range(20):
                with link.call(TIMEOUT_S):
                    stats_client.poll(TIMEOUT_S)
                time.sleep(0.02)

    assert link.overstays == []


def test_forgotten_sessions_stay_in_the_sums_of_their_namespace() -> None:
    bench = Bench(max_sessions=1)
    for namespace in (b"ours", b"theirs", b"ours"):
        bench.open([1, 2], namespace=namespace)
        bench.step([1, 2], 3, namespace=namespace)
    (ours,) = bench.ask(StatsRequest(5, b"ours"))
    (theirs,) = bench.ask(StatsRequest(6, b"theirs"))

    assert isinstance(ours, StatsReply) and isinstance(theirs, StatsReply)
    assert (ours.round, ours.sessions, ours.rounds) == (5, 1, 2)
    assert (theirs.round, theirs.sessions, theirs.rounds) == (6, 0, 1)
    assert bench.store.stats().rounds == 3


def test_the_sums_of_more_namespaces_than_are_kept_apart_are_not_lost() -> None:
    bench = Bench(max_sessions=1)
    names = [number.to_bytes(2, "big") for number in range(1030)]
    for name in names:
        bench.client = name
        bench.open([1, 2], namespace=name)
        bench.step([1, 2], 3, namespace=name)

    assert bench.store.stats().rounds == len(names)
    assert bench.store.stats_of(names[0])[1].rounds == 0
    assert bench.store.stats_of(names[-1])[1].rounds == 1


COLLECTED = """
import gc
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.client.stats import StatsClient
for owner in (DraftClient(ClientOptions("ipc:///nowhere")), StatsClient("ipc:///nowhere", b"ours")):
    owner.itself = owner
    del owner
gc.collect()
DraftClient(ClientOptions("ipc:///nowhere")).close()
kept = DraftClient(ClientOptions("ipc:///nowhere"))
"""


def test_a_connection_that_nobody_closed_does_not_hang_the_program() -> None:
    """In a cycle, as in an engine that was let go of, the collector chooses the order."""
    subprocess.run([sys.executable, "-c", COLLECTED], check=True, timeout=START_S)
