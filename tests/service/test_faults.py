"""Faults on real processes and sockets: no call raises or overstays, and drafts come back by themselves."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from specbranch.service.client.interface import ClientOptions, SequenceUpdate
from specbranch.service.wire.messages import VERSION, DraftReply, Hello, StepRequest, Welcome, decode_request, encode
from tests.service.harness import PATIENCE_S, VOCAB, Walk, WatchedClient, proposed, scripted_service

DEADLINE_S = 0.2


def client_for(address: str, planner: str = "pearl", deadline_s: float = DEADLINE_S, **more: bytes) -> WatchedClient:
    settings: dict[str, int | bool] = {"gamma": 4}
    if planner == "specbranch":
        settings["wait_for_draft"] = (
            True  # these targets take no time, so a draft that is not waited for always comes late
        )
    return WatchedClient(
        ClientOptions(address, planner, settings, deadline_s=deadline_s, namespace=more.get("namespace"))
    )


def walk_until_accepted(walk: Walk, more: int = 5, timeout_s: float = PATIENCE_S) -> None:
    """Go on until drafts are accepted again."""
    goal, end_s = walk.num_accepted + more, time.monotonic() + timeout_s
    while walk.num_accepted < goal:
        assert time.monotonic() < end_s, f"no drafts were accepted: {walk.client.counts}"
        walk.step()
        time.sleep(0.01)


class Traffic(threading.Thread):
    """One client that decodes without pause until it is told to stop."""

    def __init__(self, address: str, number: int, planner: str) -> None:
        super().__init__(daemon=True)
        self.client = client_for(address, planner)
        self.walk = Walk(self.client, [number, number + 1, 3])
        self.is_stopping = False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.is_stopping:
                self.walk.step()
                time.sleep(0.01)
        except BaseException as error:
            self.error = error


@contextlib.contextmanager
def driving(traffic: list[Traffic]) -> Iterator[None]:
    # The clients are threads here only to be many; with Python's 5 ms they would wait for each other, not for the wire.
    # Nor is the collector's pause over a test process full of other tests' objects of any interest.
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    gc.collect()
    gc.freeze()
    for one in traffic:
        one.start()
    try:
        yield
    finally:
        for one in traffic:
            one.is_stopping = True
        for one in traffic:
            one.join(PATIENCE_S)
            one.client.close()
        gc.unfreeze()
        sys.setswitchinterval(before_s)


def test_a_service_killed_fifty_times_under_traffic_of_eight_clients_costs_speed_only(tmp_path: Path) -> None:
    rng = random.Random(0)
    with scripted_service(tmp_path) as service:
        planners = ["pearl", "sps", "specbranch", "ssd"] * 2
        traffic = [Traffic(service.address, number, planner) for number, planner in enumerate(planners)]
        with driving(traffic):
            for _ in range(50):
                time.sleep(rng.uniform(0.02, 0.3))
                service.kill()
                service.start()
                service.wait_until_up()
            before, end_s = [one.walk.num_accepted for one in traffic], time.monotonic() + PATIENCE_S
            while any(one.walk.num_accepted == then for one, then in zip(traffic, before, strict=True)):
                assert time.monotonic() < end_s, (
                    f"no drafts after the last restart: {[one.client.counts for one in traffic]}"
                )
                time.sleep(0.1)

    for one in traffic:
        assert one.error is None
        assert one.client.counts.faults == 0
        assert one.client.watched.overstays == []
        one.walk.assert_text_is_the_targets()


def test_a_hung_service_is_waited_for_once_and_used_again_when_it_wakes(tmp_path: Path) -> None:
    """Of eighty calls one asks for a wait; the others tell the service what was committed and go on."""
    with scripted_service(tmp_path) as service, contextlib.closing(client_for(service.address)) as client:
        walk = Walk(client, [1, 2])
        walk_until_accepted(walk)
        walk.step_until(lambda: not client.is_lagging)
        assert client.hello(PATIENCE_S)  # answered in order, so that no other answer is on its way
        service.signal(signal.SIGSTOP)
        num_timeouts = client.counts.timeouts
        waiting = []
        for _ in range(80):
            num_waits = len(client.watched.waits_s)
            walk.step()
            waiting.append(len(client.watched.waits_s) > num_waits)
        num_timeouts = client.counts.timeouts - num_timeouts
        service.signal(signal.SIGCONT)
        walk_until_accepted(walk)

        assert num_timeouts == sum(waiting) == 1
        assert client.watched.overstays == []
        walk.assert_text_is_the_targets()


def test_without_a_service_a_call_costs_next_to_nothing_and_drafts_start_when_one_comes(tmp_path: Path) -> None:
    """A call looks for late answers, tries to send twice, and waits for nothing."""
    address = f"ipc://{tmp_path}/draft.sock"
    with contextlib.closing(client_for(address)) as client:
        walk = Walk(client, [1, 2])
        for _ in range(100):
            walk.step()

        assert client.watched.num_uses <= 3 * 100 and client.watched.waits_s == []
        assert client.counts.unreachable == 100
        with scripted_service(tmp_path):
            walk_until_accepted(walk)
        walk.assert_text_is_the_targets()


@contextlib.contextmanager
def belated_service(address: str) -> Iterator[None]:
    """Something that answers a step only when the next one has come, with the round's number as its proposal."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(address)
    done = threading.Event()

    def answer() -> None:
        round_before = 0
        while not done.is_set():
            if router.poll(20):
                identity, frame = router.recv_multipart()
                request = decode_request(frame)
                if isinstance(request, StepRequest):
                    router.send_multipart((identity, encode(DraftReply(round_before, [[round_before]]))))
                    round_before = request.round
                elif isinstance(request, Hello):
                    router.send_multipart((identity, encode(Welcome(VERSION, request.round, "belated", VOCAB))))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        router.close()
        context.term()


def test_a_late_reply_is_never_taken_for_the_reply_of_another_round(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/slow.sock"
    with belated_service(address), contextlib.closing(client_for(address, deadline_s=0.02)) as client:
        assert client.hello(PATIENCE_S)
        end_s = time.monotonic() + PATIENCE_S
        while client.counts.late < 5 or client.counts.timeouts < 5:
            assert time.monotonic() < end_s, client.counts
            assert proposed(client, SequenceUpdate([1, 2, 3], 1)) == [[]]

        assert client.watched.overstays == []


def test_equal_texts_share_a_draft_only_in_a_namespace_given_on_purpose(tmp_path: Path) -> None:
    with scripted_service(tmp_path) as service:
        shared = [client_for(service.address, deadline_s=PATIENCE_S, namespace=b"ours") for _ in range(2)]
        alone = client_for(service.address, deadline_s=PATIENCE_S)
        assert all(client.hello(PATIENCE_S) for client in (*shared, alone))
        walks = [Walk(client, [7, 8, 9]) for client in (*shared, alone)]
        walks[0].step()
        assert shared[0].hello(PATIENCE_S)  # answered in order, so the text has come
        for walk in walks[1:]:
            walk.step()

        assert [walk.client.counts.opened for walk in walks] == [1, 0, 1]
        for walk in walks:
            walk_until_accepted(walk, 1)
            walk.assert_text_is_the_targets()
            walk.client.close()


def test_clients_that_vanish_in_mid_round_leave_the_service_well(tmp_path: Path) -> None:
    with scripted_service(tmp_path, "--step-ms", "20", "--max-sessions", "16") as service:
        for number in range(60):
            gone = client_for(service.address, "sps", deadline_s=0.001)
            gone.hello(PATIENCE_S)
            Walk(gone, [number % VOCAB_SAFE, 2, 3]).step()
            gone.close()
        with contextlib.closing(client_for(service.address, "sps", deadline_s=0.2)) as client:
            walk = Walk(client, [1, 2])
            walk_until_accepted(walk)
            walk.assert_text_is_the_targets()


VOCAB_SAFE = 40


def test_a_service_stops_cleanly_on_sigterm_and_takes_its_socket_along(tmp_path: Path) -> None:
    with scripted_service(tmp_path) as service, contextlib.closing(client_for(service.address)) as client:
        walk = Walk(client, [1, 2])
        walk_until_accepted(walk)
        assert (tmp_path / "draft.sock").stat().st_mode & 0o777 == 0o600

        assert service.stop() == 0
        assert not (tmp_path / "draft.sock").exists()
