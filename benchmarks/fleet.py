#!/usr/bin/env python
"""How 1,000 clients spread over 125 draft services, what a step costs them, and what happens when 30 services leave.

The selection is the client's own code in virtual time, drawn from one seed: `rendezvous_order`, `ServiceSelection` and
`RendezvousRouter`. An attempt to connect takes 20 ms, or two seconds if nobody answers, as in the client. The cost of a
step is that of the real client with real sockets and stub services in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from specbranch.launch.child import PIPE, Child
from specbranch.machine import provenance
from specbranch.service.client.discovery import Health, ServiceSelection, rendezvous_order, selection_key
from specbranch.service.client.interface import ClientOptions, SequenceUpdate
from specbranch.service.client.pool import DraftPool, RendezvousRouter
from specbranch.service.wire.messages import (
    VERSION,
    DraftReply,
    Hello,
    OpenSequences,
    StepRequest,
    Welcome,
    decode_request,
    encode,
)

RESULT = Path(__file__).parent / "fleet.json"
NUM_CLIENTS, NUM_SERVICES, NUM_LEAVING, NUM_ROWS = 1000, 125, 30, 16
SIZES = (3, 4, 5)  # of `max_services`
LATENCY_S, TIMEOUT_S = 0.02, 2.0  # of an attempt to connect
NOTICE_S = (
    0.35,
    1.25,
)  # from the end of a service until its client gives its place away: the last one, or one of several
STEP_S = 0.1  # between two looks at the selection
IDLE_S = 10.0  # from when a service gets no new sequences of a client until its last one has ended
STEPS, WARM_UP, ROUNDS = 300, 100, 5


@dataclass
class SimulatedClient:
    """One client: the selection of its services, and its attempts to connect."""

    identity: bytes
    selection: ServiceSelection
    health: dict[str, Health] = field(default_factory=dict)
    attempts: list[tuple[float, str]] = field(default_factory=list)
    down_s: dict[str, float] = field(default_factory=dict)  # when a connected service was gone
    retiring_s: dict[str, float] = field(default_factory=dict)  # since when a service gets no new sequences

    def learn(self, known: Sequence[str]) -> None:
        """Learn the set of services, as from a name that has changed."""
        self.selection.set_known(rendezvous_order(known, selection_key(self.identity)))

    def step(self, now_s: float, alive: frozenset[str]) -> None:
        """Let attempts end, notice services that are gone, and follow the selection."""
        while self.attempts and self.attempts[0][0] <= now_s:
            _, address = heapq.heappop(self.attempts)
            self.selection.finish_attempt(address, address in alive, now_s)
            if address in alive:
                self.health[address] = Health.UP
        working = self.working(alive)
        for address in self.health.keys() - alive:
            patience_s = NOTICE_S[bool(working)]
            if now_s - self.down_s.setdefault(address, now_s) >= patience_s:
                self.health[address] = Health.DOWN
        retiring = self.selection.retiring
        self.retiring_s = {address: self.retiring_s.get(address, now_s) for address in retiring}
        idle = {address for address, since_s in self.retiring_s.items() if now_s - since_s > IDLE_S}
        change = self.selection.update(self.health, idle, now_s)
        for address in change.close:
            del self.health[address]
            self.down_s.pop(address, None)
        for address in change.connect:
            heapq.heappush(self.attempts, (now_s + (LATENCY_S if address in alive else TIMEOUT_S), address))

    def working(self, alive: frozenset[str]) -> set[str]:
        """The services that the client is connected to and that answer."""
        return {address for address, health in self.health.items() if health is Health.UP and address in alive}


@dataclass
class Fleet:
    """All clients, and the services that are alive."""

    clients: list[SimulatedClient]
    alive: frozenset[str]
    now_s: float = 0.0
    without_s: Counter[int] = field(default_factory=Counter)  # steps without a service, by the number of the client
    max_connections: int = 0  # of one client

    @classmethod
    def of(cls, num_clients: int, num_services: int, max_services: int) -> Fleet:
        """Return a fleet in which every client has connected."""
        services = [f"tcp://10.0.{number // 250}.{number % 250 + 1}:5757" for number in range(num_services)]
        rng = np.random.default_rng(1)
        clients = [SimulatedClient(rng.bytes(16), ServiceSelection(max_services)) for _ in range(num_clients)]
        fleet = cls(clients, frozenset(services))
        fleet.learn(services)
        fleet.run(1.0)
        fleet.without_s.clear()
        return fleet

    def learn(self, known: Sequence[str]) -> None:
        """Let all clients learn the set of services."""
        for client in self.clients:
            client.learn(known)

    def run(self, duration_s: float, step_s: float = STEP_S) -> None:
        """Let the clients take steps for so long."""
        for _ in range(round(duration_s / step_s)):
            for number, client in enumerate(self.clients):
                client.step(self.now_s, self.alive)
                self.max_connections = max(self.max_connections, len(client.health))
                if not client.working(self.alive):
                    self.without_s[number] += 1
            self.now_s += step_s

    def links(self) -> list[frozenset[str]]:
        """The services of each client."""
        return [frozenset(client.working(self.alive)) for client in self.clients]


def sequences_of(fleet: Fleet) -> Counter[str]:
    """How many sequences each service gets, of clients with 16 each, routed as the client routes them."""
    rng = np.random.default_rng(2)
    found: Counter[str] = Counter(dict.fromkeys(fleet.alive, 0))
    for client, services in zip(fleet.clients, fleet.links(), strict=True):
        router = RendezvousRouter(client.identity)
        for row in range(NUM_ROWS):
            address = router.assign([int(token) for token in rng.integers(0, 50_000, 64)], sorted(services))
            if address is not None:
                router.pin(bytes([row]), address)
                found[address] += 1
    return found


def balance(fleet: Fleet) -> dict[str, Any]:
    """Connections and loads: all, and of the fullest service over the mean."""
    links = fleet.links()
    clients = Counter(dict.fromkeys(fleet.alive, 0))
    clients.update(address for services in links for address in services)
    sequences = sequences_of(fleet)
    return {
        "connections": sum(map(len, links)),
        "services_of_a_client": [min(map(len, links)), max(map(len, links))],
        "clients_of_a_service": [min(clients.values()), max(clients.values())],
        "clients_max_over_mean": round(max(clients.values()) * len(clients) / clients.total(), 2),
        "sequences_max_over_mean": round(max(sequences.values()) * len(sequences) / sequences.total(), 2),
        "sequences_without_service": len(links) * NUM_ROWS - sequences.total(),
    }


def leave(max_services: int, is_named: bool, num_clients: int, num_services: int, num_leaving: int) -> dict[str, Any]:
    """Thirty services end at once; the name says so (`is_named`), or the clients have to notice it themselves."""
    fleet = Fleet.of(num_clients, num_services, max_services)
    before = fleet.links()
    everyone = sorted(fleet.alive)
    gone = frozenset(np.random.default_rng(3).permutation(everyone)[:num_leaving].tolist())
    fleet.alive -= gone
    if is_named:
        fleet.learn(sorted(fleet.alive))
    fleet.max_connections = 0
    fleet.run(30.0)
    after = fleet.links()
    moved = [len(old - new) for old, new in zip(before, after, strict=True)]
    lost = [len(old & gone) for old in before]
    result = {
        "clients_that_move": round(sum(map(bool, moved)) / num_clients, 3),
        "connections_that_move": round(sum(moved) / sum(map(len, before)), 3),
        "moved_without_need": sum(moved) - sum(lost),
        "clients_that_lose_all": sum(num == len(old) for num, old in zip(lost, before, strict=True)),
        "longest_without_service_s": round(max(fleet.without_s.values(), default=0) * STEP_S, 1),
        "without_service_after": sum(not services for services in after),
        "most_connections_of_a_client": fleet.max_connections,
        "after": balance(fleet),
    }
    fleet.alive |= gone
    if is_named:
        fleet.learn(everyone)
    fleet.run(180.0, 1.0)
    result["back_as_before"] = round(sum(a == b for a, b in zip(before, fleet.links(), strict=True)) / num_clients, 3)
    return result


def simulated(num_clients: int, num_services: int, num_leaving: int) -> list[dict[str, Any]]:
    """All of it, for each number of services of a client."""
    sizes = (num_clients, num_services)
    return [
        {
            "max_services": max_services,
            "steady": balance(Fleet.of(*sizes, max_services)),
            "leave_the_name": leave(max_services, True, *sizes, num_leaving),
            "end_unannounced": leave(max_services, False, *sizes, num_leaving),
        }
        for max_services in SIZES
    ]


def stub(addresses: Sequence[str]) -> None:
    """Services that answer every step with one draft token a row, until who started them is gone."""
    context = zmq.Context()
    poller = zmq.Poller()
    for address in addresses:
        router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        router.bind(address)
        poller.register(router, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)
    while True:
        for ready, _ in poller.poll():
            if not isinstance(ready, zmq.Socket):
                os._exit(0)
            client, frame = ready.recv_multipart()
            if (reply := answer(decode_request(frame))) is not None:
                ready.send_multipart([client, encode(reply)])


def answer(request: object) -> Welcome | DraftReply | None:
    """What a stub replies to a request."""
    if isinstance(request, Hello):
        return Welcome(VERSION, request.round, "stub", 50_000)
    if isinstance(request, StepRequest):
        return DraftReply(request.round, [[1] for _ in request.rows])
    assert isinstance(request, OpenSequences)
    return None


@contextlib.contextmanager
def stubs() -> Iterator[list[str]]:
    """Addresses of 125 stub services that are up."""
    with tempfile.TemporaryDirectory(prefix="specbranch-") as name:
        addresses = [f"ipc://{name}/{number}.sock" for number in range(NUM_SERVICES)]
        child = Child([sys.executable, __file__, "--stub", *addresses], stdin=PIPE)
        try:
            last = Path(addresses[-1].removeprefix("ipc://"))
            if child.wait_until(lambda: last.exists() or None, 60.0) is None:
                raise SystemExit(f"the stub services {child.exit_summary}")
            yield addresses
        finally:
            child.kill()


def step_costs() -> list[dict[str, Any]]:
    """CPU time of a client's calls by known services and places, in turns: medians of all rounds, lowest first."""
    kinds = [(4, 4), (NUM_SERVICES, 4), (NUM_SERVICES, NUM_SERVICES)]
    with stubs() as addresses:
        rounds = [[step_cost(addresses[:known], places) for known, places in kinds] for _ in range(ROUNDS)]
    return [
        {"known": known, "max_services": places, "cpu_ms": sorted(one[number] for one in rounds)}
        for number, (known, places) in enumerate(kinds)
    ]


def step_cost(addresses: Sequence[str], max_services: int) -> float:
    """Return the median CPU time of a client's calls in milliseconds: 16 rows a step, each with one new token."""
    options = ClientOptions(addresses, "pearl", {"gamma": 4}, deadline_s=30.0, max_services=max_services)
    times_s: list[float] = []
    rng = np.random.default_rng(4)
    texts = [[int(token) for token in rng.integers(0, 50_000, 100)] for _ in range(NUM_ROWS)]
    with contextlib.closing(DraftPool(options)) as pool:
        for step in range(WARM_UP + STEPS):
            texts = [[*text, step] for text in texts]
            rows = [SequenceUpdate(text, 1, name=str(number)) for number, text in enumerate(texts)]
            start_s = time.thread_time()
            pool.propose(rows)
            times_s.append(time.thread_time() - start_s)
            time.sleep(0.002)
        counts = pool.counts
        assert counts.faults == counts.timeouts == 0 and counts.answered >= STEPS, counts
    return round(1e3 * float(np.median(times_s[WARM_UP:])), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stub", nargs="+", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.stub:
        stub(args.stub)
        return
    logging.getLogger("specbranch").setLevel(logging.ERROR)  # the first step finds services that connect still
    source = provenance()
    document = {
        "provenance": source,
        "load": round(os.getloadavg()[0], 1),
        "clients": NUM_CLIENTS,
        "services": NUM_SERVICES,
        "leaving": NUM_LEAVING,
        "sequences_of_a_client": NUM_ROWS,
        "step": step_costs(),
        "simulated": simulated(NUM_CLIENTS, NUM_SERVICES, NUM_LEAVING),
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["step"]), json.dumps(document["simulated"]), sep="\n")


if __name__ == "__main__":
    main()
