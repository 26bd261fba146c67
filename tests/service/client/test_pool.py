"""Several services for several targets: real sockets, real processes where one is killed or hangs."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import zmq
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.core.costs import StepTimeModel
from specbranch.service.client import pool
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, SequenceUpdate, client_keys
from specbranch.service.client.pool import KEY_LEN, DraftPool, RendezvousRouter, draft_client, rows_beside
from specbranch.service.client.stats import ServiceStatus, StatsClient
from specbranch.service.client.transport import ZmqTransport, poll_any
from specbranch.service.server.server import Server, ServiceOptions
from specbranch.service.server.tenants import Tenants
from specbranch.service.wire.addresses import AddressError, ServiceKeys, make_keys, normalize_addresses
from specbranch.service.wire.messages import (
    VERSION,
    Drain,
    Draining,
    Hello,
    OpenSequences,
    OtherRows,
    StepRequest,
    StepRow,
    Welcome,
    decode_request,
    encode,
    pack_tokens,
)
from specbranch.service.wire.payloads import Digest
from specbranch.simulation.scripted import ScriptedEngine
from tests.service.client.test_stats import ask_until
from tests.service.harness import (
    DRAFT,
    PATIENCE_S,
    VOCAB,
    Walk,
    be_patient,
    free_port,
    proposed,
    scripted_service,
    wait_for,
)
from tests.service.rogue import rogue
from tests.service.server.test_lookup import Bench
from tests.service.test_faults import walk_until_accepted

NAMESPACE = b"shared"
DEADLINE_S = 0.2


@contextlib.contextmanager
def serving(addresses: Sequence[str], keys: ServiceKeys | None = None) -> Iterator[list[Server]]:
    """Services in this process, one at each address."""
    servers = [Server(ScriptedEngine(DRAFT), ServiceOptions(address, keys)) for address in addresses]
    threads = [threading.Thread(target=server.serve) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
        for thread in threads:
            thread.join(PATIENCE_S)


@contextlib.contextmanager
def pool_of(addresses: Sequence[str], is_up: bool = True, **changes: object) -> Iterator[DraftPool]:
    """A target's pool; it has met all services if these are up."""
    chosen = {"deadline_s": DEADLINE_S, "namespace": NAMESPACE, **changes}
    with contextlib.closing(DraftPool(ClientOptions(addresses, "pearl", {"gamma": 4}, **chosen))) as pool:  # type: ignore[arg-type]
        for client in clients_of(pool) if is_up else ():
            assert client.hello(PATIENCE_S) is not None
        yield pool


def clients_of(pool: DraftPool) -> list[DraftClient]:
    """The clients of a pool's services, in the order of their addresses."""
    return [service.client for service in pool._services.values()]


def flaws_of(pool: DraftPool) -> list[str | None]:
    return [service.flaw for service in pool._services.values()]


def sockets(directory: Path, *names: str) -> list[str]:
    return [f"ipc://{directory}/{name}.sock" for name in names]


def prompts_for(addresses: Sequence[str], service: int, count: int = 1) -> list[list[int]]:
    """Prompts whose first choice is this service."""
    homes = RendezvousRouter(NAMESPACE)
    found = ([one, two, 5] for one in range(VOCAB) for two in range(VOCAB))
    return [text for text in found if homes.assign(text, addresses) == addresses[service]][:count]


def texts_at(server: Server) -> set[tuple[int, ...]]:
    """The prompts that a service knows."""
    return {tuple(session.core.tokens[:3]) for session in server.store.snapshot()}


def test_equal_prompts_of_several_targets_meet_at_one_service_and_all_services_are_used(tmp_path: Path) -> None:
    addresses = sockets(tmp_path, "one", "two", "three")
    prompts = [prompt for service in range(3) for prompt in prompts_for(addresses, service, 2)]
    with (
        serving(addresses) as servers,
        pool_of(addresses, deadline_s=PATIENCE_S) as ours,
        pool_of(addresses[::-1], deadline_s=PATIENCE_S) as theirs,
    ):
        walks = [Walk(pool, prompt) for pool in (ours, theirs) for prompt in prompts]
        for walk in walks:
            walk_until_accepted(walk)
        held = [texts_at(server) for server in servers]

    assert held == [set(map(tuple, prompts[start : start + 2])) for start in (0, 2, 4)]
    assert ours.counts.rerouted == theirs.counts.rerouted == ours.counts.faults == theirs.counts.faults == 0
    for walk in walks:
        walk.assert_text_is_the_targets()


def test_all_services_of_a_pool_are_told_to_rest(tmp_path: Path) -> None:
    addresses = sockets(tmp_path, "one", "two")
    with serving(addresses) as servers, pool_of(addresses) as pool:
        for service in range(2):
            walk_until_accepted(Walk(pool, prompts_for(addresses, service)[0]))
        assert not any(session.is_paused for server in servers for session in server.store.snapshot())
        pool.rest()

        wait_for(lambda: all(session.is_paused for server in servers for session in server.store.snapshot()))
        assert all(server.store.snapshot() for server in servers)


def test_a_batch_is_drafted_for_by_all_services_in_one_call(tmp_path: Path) -> None:
    addresses = sockets(tmp_path, "one", "two", "three")
    prompts = [prompts_for(addresses, service)[0] for service in range(3)]
    with serving(addresses) as servers, pool_of(addresses, deadline_s=PATIENCE_S) as pool:
        pool.announce_prompts(prompts)
        wait_for(lambda: all(len(server.store) for server in servers))
        # The draft's own first token is committed, so that what it has prepared fits.
        texts = [[*prompt, DRAFT.distribution(tuple(prompt)).ids[0]] for prompt in prompts]
        drafts = proposed(pool, *(SequenceUpdate(text, 1) for text in texts))

        assert [draft[0] for draft in drafts] == [DRAFT.distribution(tuple(text)).ids[0] for text in texts]
        assert pool.counts.answered == 3 and pool.counts.opened == 3 and pool.counts.calls == 1


def test_a_text_goes_on_elsewhere_when_its_service_is_killed_and_new_ones_come_back_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with (
        scripted_service(tmp_path / "one") as one,
        scripted_service(tmp_path / "two") as two,
        caplog.at_level(logging.INFO),
    ):
        addresses = [one.address, two.address]
        first, second = prompts_for(addresses, 0, 2)
        with (
            pool_of(addresses, deadline_s=5.0) as pool,
            contextlib.closing(StatsClient(two.address, None)) as stats_client,
        ):
            walk = Walk(pool, first)
            walk_until_accepted(walk)
            assert pool.counts.rerouted == 0
            one.kill()
            walk_until_accepted(walk)
            ask_until(stats_client, ServiceStatus.ANSWERS)
            assert pool.counts.rerouted >= 1
            assert stats_client.overview is not None and stats_client.overview.figures["opened"] >= 1
            one.start()
            one.wait_until_up()
            wait_for(lambda: pool.propose([]) == [] and flaws_of(pool) == [None, None], flaws_of(pool))
            num_moved = pool.counts.rerouted
            new = Walk(pool, second)
            walk_until_accepted(new)
            walk_until_accepted(walk)  # it stays where it went
            with contextlib.closing(StatsClient(one.address, None)) as again:
                ask_until(again, ServiceStatus.ANSWERS)

            assert again.overview is not None and again.overview.figures["sessions"] == 1
            assert pool.counts.rerouted == num_moved and pool.counts.faults == 0
            walk.assert_text_is_the_targets()
            new.assert_text_is_the_targets()
    assert f"{one.address} cannot be reached" in caplog.text or f"{one.address} does not answer" in caplog.text
    assert f"{one.address} is back" in caplog.text


def test_a_text_leaves_a_service_that_hangs(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with scripted_service(tmp_path / "one") as one, scripted_service(tmp_path / "two") as two:
        addresses = [one.address, two.address]
        with pool_of(addresses) as pool:
            walk = Walk(pool, prompts_for(addresses, 0)[0])
            walk_until_accepted(walk)
            one.signal(signal.SIGSTOP)
            end_s = time.monotonic() + PATIENCE_S
            while not pool.counts.rerouted:
                assert time.monotonic() < end_s, pool.counts
                walk.step()
            walk_until_accepted(walk)
            one.signal(signal.SIGCONT)
            wait_for(lambda: pool.propose([]) == [] and flaws_of(pool) == [None, None], flaws_of(pool))
            walk.assert_text_is_the_targets()


def test_a_text_leaves_a_service_that_refuses(tmp_path: Path) -> None:
    (other,) = sockets(tmp_path, "other")
    with rogue(tmp_path, "old") as bad, serving([other]):
        addresses = [bad.address, other]
        with pool_of(addresses) as pool:
            walk = Walk(pool, prompts_for(addresses, 0)[0])
            walk_until_accepted(walk)

            assert pool.counts.refused >= 1 and pool.counts.rerouted >= 1
            walk.assert_text_is_the_targets()


def test_a_service_with_another_vocabulary_gets_no_texts(tmp_path: Path) -> None:
    (other,) = sockets(tmp_path, "other")
    with rogue(tmp_path, "unknown") as bad, serving([other]):  # of 49,201 tokens
        addresses = [bad.address, other]
        with pool_of(addresses, vocab_len=VOCAB) as pool:
            walk = Walk(pool, prompts_for(addresses, 0)[0])
            walk_until_accepted(walk)

            assert not pool.vocab_mismatch
            walk.assert_text_is_the_targets()


def watch_waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """What pools wait for from now on: for how many services, and how long at most."""
    waits: list[tuple[int, float]] = []

    def noted(links: Sequence[ZmqTransport], timeout_s: float) -> list[ZmqTransport]:
        waits.append((len(links), timeout_s))
        return poll_any(links, timeout_s)

    monkeypatch.setattr("specbranch.service.client.pool.poll_any", noted)
    return waits


def test_without_any_service_a_call_returns_at_once_and_drafts_begin_when_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = sockets(tmp_path, "one", "two", "three")
    with pool_of(addresses, is_up=False, deadline_s=PATIENCE_S) as pool:
        waits = watch_waits(monkeypatch)
        walk = Walk(pool, [1, 2, 5])
        for _ in range(50):
            walk.step()
        assert waits == []
        assert walk.num_accepted == pool.counts.timeouts == pool.counts.faults == 0
        with serving(addresses[1:2]):
            walk_until_accepted(walk)
        walk.assert_text_is_the_targets()


@dataclass
class Mute:
    """A service that greets and then says nothing more, on a thread. It keeps what it was told."""

    address: str
    heard: list[StepRequest | OpenSequences] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def serve(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.bind(self.address)
        while not self._is_over.is_set():
            if router.poll(10):
                client, frame = router.recv_multipart()
                request = decode_request(frame)
                if isinstance(request, Hello):
                    router.send_multipart((client, encode(Welcome(VERSION, request.round, "mute", VOCAB))))
                elif isinstance(request, StepRequest | OpenSequences):
                    self.heard.append(request)
        router.close(linger=0)
        context.term()

    @contextlib.contextmanager
    def running(self) -> Iterator[Mute]:
        thread = threading.Thread(target=self.serve)
        thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            thread.join(PATIENCE_S)


@contextlib.contextmanager
def mutes(addresses: Sequence[str]) -> Iterator[list[Mute]]:
    with contextlib.ExitStack() as exits:
        yield [exits.enter_context(Mute(address).running()) for address in addresses]


def test_services_that_do_not_answer_cost_one_deadline_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of them: every wait of a call is for all, and none is longer than what the one before has left."""
    addresses = sockets(tmp_path, "one", "two", "three", "four")
    rows = [SequenceUpdate([*prompts_for(addresses, service)[0], 1], 1) for service in range(4)]
    with mutes(addresses) as services, pool_of(addresses) as pool:
        waits = watch_waits(monkeypatch)
        assert proposed(pool, *rows) == [[]] * 4
        assert pool.counts.timeouts == 4 and pool.is_lagging
        wait_for(lambda: all(service.heard for service in services))

    timeouts_s = [timeout_s for _, timeout_s in waits]
    assert {num_services for num_services, _ in waits} == {4}
    assert timeouts_s == sorted(timeouts_s, reverse=True) and timeouts_s[0] <= DEADLINE_S
    assert all(sum(isinstance(message, StepRequest) for message in service.heard) == 1 for service in services)


def test_who_answers_is_not_blamed_for_who_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mute one is waited for until the deadline, which comes as soon as the other has answered."""
    addresses = sockets(tmp_path, "mute", "other")
    (silent,), (spoken,) = prompts_for(addresses, 0), prompts_for(addresses, 1)
    with mutes(addresses[:1]), serving(addresses[1:]), pool_of(addresses, deadline_s=PATIENCE_S) as pool:
        walk = Walk(pool, spoken)
        walk_until_accepted(walk)
        num_answered = pool.counts.answered
        mute = pool._services[addresses[0]].transport
        monkeypatch.setattr(
            "specbranch.service.client.pool.poll_any",
            lambda links, timeout_s: poll_any(links, timeout_s) if links != [mute] else [],
        )
        pool.propose([SequenceUpdate([*silent, 1], 1), SequenceUpdate(walk.tokens, walk._num_new, len(walk.proposal))])

        assert [client.is_lagging for client in clients_of(pool)] == [True, False]
        assert pool.counts.answered == num_answered + 1 and pool.counts.timeouts == 1


def drain(*words: str) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        done = CliRunner().invoke(app, ["drain", *words])
    return done.exit_code, done.stdout or done.stderr


def test_a_drained_service_gets_no_new_texts_and_moves_the_running_ones_at_their_next_step(tmp_path: Path) -> None:
    addresses = sockets(tmp_path, "one", "two")
    old, new, late = prompts_for(addresses, 0, 3)
    with serving(addresses) as (one, two), pool_of(addresses, deadline_s=PATIENCE_S) as pool:
        walk = Walk(pool, old)
        walk_until_accepted(walk)
        assert drain(addresses[0]) == (0, f"{addresses[0]} accepts no new requests; 1 request active\n")
        wait_for(lambda: pool.propose([]) == [] and clients_of(pool)[0].connection.is_draining)
        pool.announce_prompts([new])
        other = Walk(pool, new)
        walk_until_accepted(other)
        assert texts_at(one) == {tuple(old)} and texts_at(two) == {tuple(new)}
        walk_until_accepted(walk)
        assert texts_at(two) == {tuple(new), tuple(old)}
        (moved,) = (session for session in two.store.snapshot() if session.core.tokens[:3] == old)
        assert moved.core.tokens[: len(walk.tokens)] == walk.tokens[: len(moved.core.tokens)], "in full"
        assert pool.counts.rerouted == 1

        assert drain(addresses[0], "--undo")[0] == 0
        wait_for(lambda: pool.propose([]) == [] and not clients_of(pool)[0].connection.is_draining)
        walk_until_accepted(Walk(pool, late))
        walk_until_accepted(walk)  # it stays where it went
        assert texts_at(one) == {tuple(old), tuple(late)}
        assert pool.counts.rerouted == 1
        walk.assert_text_is_the_targets()
        other.assert_text_is_the_targets()


def test_where_all_services_drain_each_keeps_its_texts(tmp_path: Path) -> None:
    addresses = sockets(tmp_path, "one", "two")
    with serving(addresses) as (one, two), pool_of(addresses, deadline_s=PATIENCE_S) as pool:
        walks = [Walk(pool, prompts_for(addresses, service)[0]) for service in range(2)]
        for walk in walks:
            walk_until_accepted(walk)
        for address in addresses:
            assert drain(address)[0] == 0
        wait_for(lambda: pool.propose([]) == [] and all(one.is_draining for one in pool._services.values()))
        for walk in walks:
            walk_until_accepted(walk)

        assert [texts_at(server) for server in (one, two)] == [{tuple(walk.prompt)} for walk in walks]
        assert pool.counts.rerouted == 0


def test_services_are_updated_one_by_one_and_no_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drain, stop and start again, first one and then the other, while four texts go on."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with scripted_service(tmp_path / "one") as one, scripted_service(tmp_path / "two") as two:
        addresses = [one.address, two.address]
        with pool_of(addresses) as pool:
            waits = watch_waits(monkeypatch)
            walks = [Walk(pool, text) for service in range(2) for text in prompts_for(addresses, service, 2)]
            for service in (one, two):
                for walk in walks:
                    walk_until_accepted(walk)
                assert drain(service.address)[0] == 0
                at_service = pool._services[service.address]
                walks[0].step_until(lambda at_service=at_service: at_service.is_draining)  # type: ignore[misc]
                for walk in walks:
                    walk_until_accepted(walk)
                assert service.stop() == 0
                for walk in walks:
                    walk_until_accepted(walk)
                service.start()
                service.wait_until_up()
                wait_for(lambda: pool.propose([]) == [] and flaws_of(pool) == [None, None], flaws_of(pool))
            for walk in walks:
                walk_until_accepted(walk)
                walk.assert_text_is_the_targets()

            assert (pool.counts.faults, pool.counts.refused, pool.counts.other_vocab) == (0, 0, 0)
            assert pool.counts.rerouted >= len(walks)
    assert max(timeout_s for _, timeout_s in waits) <= DEADLINE_S


def test_a_text_that_a_draining_service_has_forgotten_goes_on_elsewhere(tmp_path: Path) -> None:
    addresses = sockets(tmp_path, "one", "two")
    with serving(addresses) as (one, two), pool_of(addresses, deadline_s=PATIENCE_S) as pool:
        walk = Walk(pool, prompts_for(addresses, 0)[0])
        walk_until_accepted(walk)
        assert drain(addresses[0])[0] == 0
        for session in one.store.snapshot():
            one.store.drop(session)
        walk_until_accepted(walk)

        assert len(one.store) == 0 and len(two.store) == 1
        walk.assert_text_is_the_targets()


def test_a_target_with_one_service_that_drains_goes_on_without_drafts_for_new_texts(tmp_path: Path) -> None:
    (address,) = sockets(tmp_path, "one")
    options = ClientOptions(address, "pearl", {"gamma": 4}, deadline_s=PATIENCE_S)
    with serving([address]) as (server,), contextlib.closing(DraftClient(options)) as client:
        assert drain(address)[0] == 0
        assert client.hello(PATIENCE_S) is not None and client.connection.is_draining
        walk = Walk(client, [1, 2, 3])
        for _ in range(5):
            walk.step()

        assert len(server.store) == client.counts.opened == walk.num_accepted == 0
        walk.assert_text_is_the_targets()


def test_drain_waits_until_no_text_is_in_use(tmp_path: Path) -> None:
    (address,) = sockets(tmp_path, "one")
    assert CliRunner().invoke(app, ["drain", address]).exit_code == 1, "nobody listens"
    options = ClientOptions(address, "pearl", {"gamma": 4}, deadline_s=PATIENCE_S)
    with serving([address]) as (server,), contextlib.closing(DraftClient(options)) as client:
        assert client.hello(PATIENCE_S) is not None
        walk_until_accepted(Walk(client, [1, 2, 3]))
        assert drain(address, "--wait", "0.6")[0] == 1
        for session in server.store.snapshot():
            session.client.last_message_s -= 20  # its target has been silent since
        code, told = drain(address, "--wait", "60", "--json")

    assert code == 0
    assert '"is_draining": true' in told and '"sessions": 0' in told


def test_draining_is_told_to_everyone_and_counted() -> None:
    bench = Bench()
    bench.open([1, 2])
    bench.step([1, 2], 3)
    told = list(bench.handler.handle(b"other", [encode(Drain(7))]))

    assert told == [(b"other", Draining(7, True, 1)), (b"me", Draining(0, True, 1))]
    assert bench.ask(Drain(8)) == [Draining(8, True, 1)], "it is no news any more"
    figures = bench.handler.metrics.as_dict()
    assert (figures["draining"], figures["active_sessions"], figures["sessions"]) == (1, 1, 1)
    bench.now_s += 11
    assert bench.handler.metrics.as_dict()["active_sessions"] == 0


def test_a_draining_service_declines_new_texts_only() -> None:
    bench = Bench()
    bench.open([1, 2])
    bench.ask(Drain(1))
    bench.open([1, 2])
    request = OpenSequences(b"ours", "pearl", {"gamma": 3}, "confidence", [pack_tokens([1, 2]), pack_tokens([3, 4])])

    assert bench.ask(request) == [Draining(0, True, 1)]
    assert len(bench.store) == 1
    assert isinstance(bench.ask(Hello(VERSION, 3))[0], Welcome)
    assert bench.ask(Hello(VERSION, 3))[0].is_draining  # type: ignore[union-attr]
    bench.ask(Drain(2, False))
    bench.open([3, 4])
    assert len(bench.store) == 2


def test_rows_that_find_no_room_in_a_draft_step_are_counted() -> None:
    engine = ScriptedEngine(DRAFT)
    engine.info = replace(engine.info, row_limit=2)
    bench = Bench(engine)
    bench.open([1, 2], [3, 4], [5, 6], [7, 8])
    bench.runner.run_step()
    assert bench.handler.metrics.as_dict()["waiting_rows"] == 2
    bench.work(100)
    bench.now_s += 2  # figures are read anew
    assert bench.handler.metrics.as_dict()["waiting_rows"] == 0


def test_keys_open_all_services_of_a_pool(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    keys = ServiceKeys(tmp_path / "keys" / "service.key_secret", tmp_path / "keys" / "clients")
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    prompts = [prompts_for(addresses, service)[0] for service in range(2)]
    ours = client_keys(str(tmp_path / "keys"))
    with serving(addresses, keys) as servers, pool_of(addresses, keys=ours, deadline_s=PATIENCE_S) as pool:
        for prompt in prompts:
            walk_until_accepted(Walk(pool, prompt))
        assert [texts_at(server) for server in servers] == [{tuple(prompt)} for prompt in prompts]
        assert drain(addresses[0], "--keys", str(tmp_path / "keys"))[0] == 0
        assert drain(addresses[0])[0] == 2, "TCP needs keys"
    with pytest.raises(AddressError, match="TCP needs CURVE keys"):
        DraftPool(ClientOptions(addresses))


def test_over_tcp_only_the_key_that_came_with_the_services_own_may_drain(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        make_keys(tmp_path / name)
    (tmp_path / "ours" / "clients" / "theirs.key").write_bytes((tmp_path / "theirs" / "client.key").read_bytes())
    (tmp_path / "theirs" / "service.key").write_bytes((tmp_path / "ours" / "service.key").read_bytes())
    keys = ServiceKeys(tmp_path / "ours" / "service.key_secret", tmp_path / "ours" / "clients")
    address = f"tcp://127.0.0.1:{free_port()}"
    with serving([address], keys) as (server,):
        code, text = drain(address, "--keys", str(tmp_path / "theirs"))
        assert code != 0
        assert "only the key that was made with the service's own" in " ".join(text.replace("│", " ").split())
        assert not server.store.is_draining
        assert drain(address, "--keys", str(tmp_path / "ours"))[0] == 0
        assert server.store.is_draining


def test_one_address_needs_no_pool(tmp_path: Path) -> None:
    one, two = sockets(tmp_path, "one", "two")
    for address, kind in ((one, DraftClient), ([one], DraftClient), ([one, one], DraftClient), ([one, two], DraftPool)):
        with contextlib.closing(draft_client(ClientOptions(address))) as client:
            assert type(client) is kind
    for wrong in ([], [1], None):
        with pytest.raises(AddressError, match="is no address of a draft service"):
            normalize_addresses(wrong)  # type: ignore[arg-type]
    with pytest.raises(AddressError, match="is no address"):
        DraftPool(ClientOptions([one, "somewhere"]))


def test_each_service_learns_the_time_of_the_whole_step(tmp_path: Path) -> None:
    """What a step costs depends on all its tokens, whoever drafted them."""
    names = [Digest([number]).name for number in range(3)]
    rows = [
        StepRow(names[0], [1], names[1], 4),
        StepRow(names[1], [1, 2], names[2], 3),
        StepRow(names[2], [1], names[0], 0),
    ]
    with pool_of(sockets(tmp_path, "one", "two"), is_up=False) as pool:
        one, two = clients_of(pool)
        besides = rows_beside({one: rows[:2], two: rows[2:]})
        assert besides == {one: OtherRows(1, 0, 1), two: OtherRows(2, 7, 3)}
        assert rows_beside({one: rows}) == {one: None}
    whole, parts = Tenants(StepTimeModel()), Tenants(StepTimeModel())
    whole.record_step(StepRequest(1, b"ours", 1.0, rows, 50_000), 0.0)
    parts.record_step(StepRequest(1, b"ours", 1.0, rows[2:], 50_000, besides[two]), 0.0)

    costs = [tenants.costs(b"ours") for tenants in (whole, parts)]
    assert costs[0].target.cost == costs[1].target.cost
    assert costs[0].target.tokens_per_step.submitted == costs[1].target.tokens_per_step.submitted


def test_the_time_of_a_step_goes_to_all_services_with_what_is_beside_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = sockets(tmp_path, "one", "two")
    prompts = [*prompts_for(addresses, 0), *prompts_for(addresses, 1, 2)]
    monkeypatch.setattr("specbranch.service.client.pool._SILENCE_S", math.inf)  # no text leaves the mute ones
    with mutes(addresses) as services, pool_of(addresses, deadline_s=0.01) as pool:
        for length in (1, 2):
            rows = [SequenceUpdate([*prompt, *[1] * length], 1, length) for prompt in prompts]
            pool.propose(rows, step_s=None if length == 1 else 0.02)
        wait_for(lambda: all(len(service.heard) == 2 for service in services))

    last = [service.heard[1] for service in services]
    assert all(isinstance(step, StepRequest) and step.step_us > 0 for step in last)
    assert [step.beside for step in last if isinstance(step, StepRequest)] == [OtherRows(2, 4, 2), OtherRows(1, 2, 1)]


ADDRESSES = ["ipc:///one", "ipc:///two", "ipc:///three"]


def homes(namespace: bytes = b"ours") -> RendezvousRouter:
    return RendezvousRouter(namespace)


def prompt(number: int) -> list[int]:
    return [number, 7, 8]


def test_equal_beginnings_meet_at_one_service_whoever_asks() -> None:
    """Targets may name the services in another order, and may hand over arrays."""
    ours, theirs = homes(), homes()
    long = list(range(KEY_LEN))
    for text in (*map(prompt, range(50)), long):
        chosen = ours.assign(text, ADDRESSES)
        assert chosen is not None
        assert theirs.assign(np.array(text), ADDRESSES[::-1]) == chosen
    assert len({homes().assign([*long, number], ADDRESSES) for number in range(50)}) == 1


def test_another_namespace_shares_nothing_and_so_is_spread_on_its_own() -> None:
    places = [(homes().assign(prompt(n), ADDRESSES), homes(b"theirs").assign(prompt(n), ADDRESSES)) for n in range(300)]

    assert min(Counter(places).values()) > 15 and len(Counter(places)) == 9


def test_texts_are_spread_evenly() -> None:
    found = Counter(homes().assign(prompt(number), ADDRESSES) for number in range(3000))

    # The standard deviation of each is 26.
    assert all(900 < found[service] < 1100 for service in ADDRESSES)


def test_only_the_texts_of_a_service_that_fails_move_and_they_move_apart() -> None:
    before = {number: homes().assign(prompt(number), ADDRESSES) for number in range(600)}
    after = {number: homes().assign(prompt(number), [ADDRESSES[0], ADDRESSES[2]]) for number in range(600)}

    assert all(after[number] == home for number, home in before.items() if home != ADDRESSES[1])
    moved = Counter(after[number] for number, home in before.items() if home == ADDRESSES[1])
    assert min(moved[ADDRESSES[0]], moved[ADDRESSES[2]]) > 60
    assert homes().assign(prompt(1), []) is None


def test_where_all_texts_begin_alike_no_service_gets_much_more_than_its_share() -> None:
    ours = homes()
    for number in range(48):
        chosen = ours.assign([1] * KEY_LEN, ADDRESSES)
        assert chosen is not None
        ours.pin(bytes([number]), chosen)
        if number < 4:
            assert chosen == homes().assign([1] * KEY_LEN, ADDRESSES), "a few may stay together"
    loads = Counter(ours.lookup(bytes([number])) for number in range(48))

    assert sorted(loads.values()) == [8, 20, 20]
    ours.reset_loads()
    assert ours.assign([1] * KEY_LEN, ADDRESSES) == homes().assign([1] * KEY_LEN, ADDRESSES)


def test_a_text_is_found_by_the_name_that_it_has_now() -> None:
    ours = homes()
    ours.pin(b"before", "two")
    ours.pin(b"after", "two")
    ours.forget([b"before", b"unknown"])

    assert ours.lookup(b"after") == "two" and ours.lookup(b"before") is None


def test_texts_that_have_ended_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_MAX_ROUTED", 2)
    ours = homes()
    for name in (b"a", b"b", b"a", b"c"):
        ours.pin(name, "one")

    assert [ours.lookup(name) for name in (b"a", b"b", b"c")] == ["one", None, "one"]
