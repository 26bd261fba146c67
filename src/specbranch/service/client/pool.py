"""Several draft services behind one client: rendezvous routing, failover and drain.

A call sends to all services that it needs and then waits for all of them at once, until its one deadline. A service
that cannot be reached, does not answer, refuses, or has another vocabulary gets no rows until it works again; its
sequences move to other services, which open them again. So do those of a service that is draining, at their next
step, unless all others drain too.

A new sequence is routed by rendezvous hashing of its first tokens, so that equal prompts of several targets meet at one
service and share its cache, and so do the turns of a chat. When a service comes or goes, prompts of other services do
not move. A sequence stays at its service while it grows. If many prompts begin with the same tokens, some go to the
next service in their rendezvous order: no service gets much more than its share of a target's sequences.

The services of a pool are a few of those that are known (`discovery`). A service that joins later is connected on a
thread of its own and joins when it has answered, so that no step waits for it or sends it rows in vain.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from specbranch.core.round import Draft
from specbranch.service.client.client import DraftClient, PreparedRow
from specbranch.service.client.discovery import (
    AddressWatch,
    Health,
    ServiceSelection,
    is_watched,
    rendezvous_order,
)
from specbranch.service.client.interface import NO_ANSWER, ClientCounts, ClientOptions, DraftSource, SequenceUpdate
from specbranch.service.client.sequences import SequenceDelta, SyncedSequences
from specbranch.service.client.transport import ZmqTransport, poll_any
from specbranch.service.wire.addresses import AddressError, normalize_addresses
from specbranch.service.wire.messages import MAX_ROWS, OtherRows, Reply, StepRow, pack_tokens
from specbranch.service.wire.payloads import Digest, Tokens

log = logging.getLogger(__name__)

_SILENCE_S = 0.25  # the silence after which sequences leave a service; shorter would cost a prefill elsewhere too often
_REFUSED_S = 5.0  # the time after a refusal in which nothing is sent, unless all refuse
_REPLACED_S = 1.0  # the time in which a service cannot be used, after which another one takes its place
_REPLACED_SOON_S = 0.1  # the same while no service can be used; more than a new connection takes
_IDLE_S = 10.0  # the time without rows after which a service that may leave has no sequences any more
_CHECK_S = 0.1  # between two looks at the selection of services; a change of the known ones is seen at once
_CONNECT_S = 2.0  # the longest wait for the first answer of a service that joins
KEY_LEN = 64  # tokens at the beginning of a prompt that route it
_MAX_ROUTED = 4096  # sequences; engines run fewer at once, and never say that one has ended
_MAX_EXCESS = 1.25  # the largest load of a service, as a multiple of the mean of all
_MIN_LOAD = 4  # sequences that a service may get in any case


def draft_client(options: ClientOptions) -> DraftSource:
    """Return a client if the options name one service, or a pool if they name several, or services that may change."""
    addresses = normalize_addresses(options.address)
    return DraftClient(options) if len(addresses) == 1 and not is_watched(addresses[0]) else DraftPool(options)


@dataclass(slots=True, eq=False)
class PoolService:
    """One service of a pool: its connection, and since when it is as it is."""

    client: DraftClient
    transport: ZmqTransport
    used_s: float  # when it last got rows, at first when it joined
    flaw: str | None = None  # why it cannot be used, as last logged
    unusable_s: float | None = None  # since when it has a flaw or refuses

    @property
    def is_draining(self) -> bool:
        """Whether the service accepts no new sequences."""
        return self.client.connection.is_draining

    def health(self, now_s: float, patience_s: float) -> Health:
        """Return the service's health for the selection; it is down after `patience_s` without use."""
        if self.unusable_s is not None and now_s - self.unusable_s >= patience_s:
            return Health.DOWN
        return Health.DRAINING if self.is_draining else Health.UP


class ServiceConnector:
    """Connects to services that join a pool and closes those that leave it, on threads that end after two seconds."""

    def __init__(self, options: ClientOptions, synced: SyncedSequences, counts: ClientCounts) -> None:
        self._options = options
        self._synced = synced
        self._counts = counts
        self._ended: deque[tuple[str, PoolService | None]] = deque()
        self._lock = threading.Lock()
        self._is_closed = False

    def connect(self, address: str, now_s: float) -> PoolService:
        """Return a service whose connection is being made; raise `AddressError` if its address cannot be used."""
        return self._service(address, ZmqTransport(address, self._options.keys), now_s)

    def start(self, address: str, now_s: float) -> None:
        """Start to connect to a service; `poll` returns it when it has answered."""
        try:
            threading.Thread(target=self._try, args=(address, now_s), name="specbranch-connect").start()
        except RuntimeError:  # there can be no more threads
            self._ended.append((address, None))

    def poll(self) -> list[tuple[str, PoolService | None]]:
        """Return the attempts that have ended: address and service, None in place of a service that cannot be used."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def dispose(self, service: PoolService) -> None:
        """Close the connection of a service that has left."""
        try:
            threading.Thread(target=service.client.close, name="specbranch-close").start()
        except RuntimeError:
            service.client.close()

    def close(self) -> None:
        """Close what was connected and never polled, now or when its attempt ends."""
        with self._lock:
            self._is_closed = True
        for _, service in self.poll():
            if service is not None:
                service.client.close()

    def _service(self, address: str, transport: ZmqTransport, now_s: float) -> PoolService:
        options = replace(self._options, address=address)
        return PoolService(DraftClient(options, self._synced, self._counts, transport), transport, now_s)

    def _try(self, address: str, now_s: float) -> None:
        service = None
        try:
            service = self._answering(address, now_s)
        except AddressError as error:
            log.warning("the draft service at %s is not used: %s", address, error)
        except Exception:
            log.exception("the draft service at %s is not used", address)
        with self._lock:
            if not self._is_closed:
                self._ended.append((address, service))
                return
        if service is not None:
            service.client.close()

    def _answering(self, address: str, now_s: float) -> PoolService | None:
        """Return a service that has answered with a fitting vocabulary and accepts sequences, or None."""
        transport = ZmqTransport(address, self._options.keys)
        try:
            probe = DraftClient(replace(self._options, address=address), transport=transport)
            welcome = probe.hello(_CONNECT_S)
            if welcome is not None and not welcome.is_draining and not probe.vocab_mismatch:
                return self._service(address, transport, now_s)
        except BaseException:
            transport.close()
            raise
        transport.close()
        return None


class DraftPool(DraftSource):
    """Gets drafts from several services with the same draft model."""

    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options)
        addresses = normalize_addresses(options.address)
        watch = self._watch = AddressWatch(addresses, self._namespace, options.keys)
        own = replace(options, namespace=self._namespace)
        connector = self._connector = ServiceConnector(own, self._synced, self.counts)
        self._selection = ServiceSelection(options.max_services)
        self._known: tuple[str, ...] = ()  # as the selection knows them
        self._checked_s = -math.inf
        # A list that never changes is connected here, as far as the client uses it; everything else on threads.
        chosen = set() if watch.sources else set(watch.known[: options.max_services])
        now_s = self._clock()
        self._services = {address: connector.connect(address, now_s) for address in addresses if address in chosen}
        self._router = RendezvousRouter(self._namespace)
        self._stop = weakref.finalize(self, _stop, watch, connector)
        watch.start()

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self._services)

    @property
    def is_lagging(self) -> bool:
        return all(service.client.is_lagging for service in self._services.values())

    @property
    def vocab_mismatch(self) -> bool:
        return bool(self._services) and all(service.client.vocab_mismatch for service in self._services.values())

    def close(self) -> None:
        self._stop()
        for service in self._services.values():
            service.client.close()

    def _propose(self, rows: Sequence[SequenceUpdate], end_s: float, step_us: int) -> list[Draft] | None:
        usable = self._usable(end_s)
        deltas = {
            index: self._synced.advance(row.name, row.tokens, row.num_new)
            for index, row in enumerate(rows)
            if self._fits(row)
        }
        placed = self._place(rows, deltas, usable)
        prepared = {
            client: client.prepare_step(rows, indices, [deltas[index] for index in indices])
            for client, indices in placed.items()
        }
        if sum(map(len, placed.values())) < len(rows):
            step_us = 0  # rows that are left out were in the step too
        wire = {client: [row.wire for row in own] for client, own in prepared.items()}
        beside = rows_beside(wire)
        sent = {
            client: own
            for client, own in prepared.items()
            if client.connection.send_step(wire[client], end_s, step_us, beside[client])
        }
        return self._collect(len(rows), sent, end_s) if sent else None

    def _announce_prompts(self, prompts: Sequence[Tokens], end_s: float) -> None:
        usable = self._usable(end_s)
        taking = self._taking(usable)
        staying = taking or usable
        placed: dict[str, list[Tokens]] = {}
        for prompt in prompts:
            name = Digest(prompt).name
            address = self._router.lookup(name)
            if address not in staying:
                address = self._router.assign(prompt, taking)
            if address is not None:
                self._router.pin(name, address)
                placed.setdefault(address, []).append(prompt)
        for address, own in placed.items():
            self._services[address].used_s = self._clock()
            self._services[address].client.open(own, end_s)

    def _rest(self) -> None:
        for service in self._services.values():
            service.client.connection.send_rest()

    def _usable(self, end_s: float) -> set[str]:
        """Handle all replies that have come, and return the addresses of the services that can be used.

        A service that refused a message in the last 5 s is included only if no service without a refusal can be used.
        Ping services that cannot be used or are draining. Let services join and leave.
        """
        now_s = self._clock()
        for address, service in self._services.items():
            service.client.connection.drain_replies(end_s)
            flaw = _flaw(service.client, now_s)
            if flaw is not None or service.is_draining:
                service.client.connection.ping()
            if flaw != service.flaw:
                _log_change(address, flaw)
                service.flaw = flaw
            if flaw is None and not _has_refused(service.client, now_s):
                service.unusable_s = None
            elif service.unusable_s is None:
                service.unusable_s = now_s
        self._update_services(now_s)
        usable = {address for address, service in self._services.items() if service.unusable_s is None}
        return usable or {address for address, service in self._services.items() if service.flaw is None}

    def _update_services(self, now_s: float) -> None:
        """Let services join that have answered, close those that leave, and begin to connect to others."""
        ended, known = self._connector.poll(), self._watch.known
        if not ended and known is self._known and now_s - self._checked_s < _CHECK_S:
            return
        self._checked_s = now_s
        if known is not self._known:
            self._known = known
            self._selection.set_known(known)
        for address, joined in ended:
            self._selection.finish_attempt(address, joined is not None, now_s)
            if joined is not None:
                joined.used_s = now_s
                self._services[address] = joined
        is_any_usable = any(service.unusable_s is None for service in self._services.values())
        patience_s = _REPLACED_S if is_any_usable else _REPLACED_SOON_S
        health = {address: service.health(now_s, patience_s) for address, service in self._services.items()}
        idle = {address for address, service in self._services.items() if now_s - service.used_s > _IDLE_S}
        change = self._selection.update(health, idle, now_s)
        for address in change.close:
            self._connector.dispose(self._services.pop(address))
        for address in change.connect:
            self._connector.start(address, now_s)

    def _taking(self, usable: Collection[str]) -> list[str]:
        """Return the usable services that accept new sequences: those that leave only if no other one does."""
        taking = [address for address in usable if not self._services[address].is_draining]
        return [address for address in taking if address not in self._selection.retiring] or taking

    def _place(
        self, rows: Sequence[SequenceUpdate], deltas: Mapping[int, SequenceDelta], usable: Collection[str]
    ) -> dict[DraftClient, list[int]]:
        """Assign rows to services, and return the indices of the rows by the client of the service.

        A sequence keeps its service. New sequences, and those whose service cannot be used or drains, are routed to one
        that accepts them. If all drain, each keeps its sequences.
        """
        homes = {index: self._router.lookup(delta.before) for index, delta in deltas.items()}
        self._router.forget([delta.before for delta in deltas.values()])
        self._router.reset_loads()
        taking = self._taking(usable)
        staying = taking or usable
        placed: dict[str, list[int]] = {}
        for index, home in sorted(homes.items(), key=lambda item: item[1] not in staying):
            row, address = rows[index], home
            if address not in staying:
                address = self._router.assign(row.tokens[: len(row.tokens) - row.num_new], taking)
                self.counts.rerouted += home is not None and address is not None
            if address is not None:
                placed.setdefault(address, []).append(index)
            settled = home if address is None else address
            if settled is not None:
                self._router.pin(deltas[index].after, settled)
        for address in placed:
            self._services[address].used_s = self._clock()
        return {self._services[address].client: indices[:MAX_ROWS] for address, indices in placed.items()}

    def _collect(self, num_rows: int, sent: Mapping[DraftClient, Sequence[PreparedRow]], end_s: float) -> list[Draft]:
        """Wait for the replies until `end_s`, and return a draft for each row; a row without a reply gets an empty one.

        `sent` has the rows that were sent to each service. If a reply says that the service does not know a sequence,
        open the sequence there.
        """
        waiting = [service for service, rows in sent.items() if any(row.draft is None for row in rows)]
        replies = self._await([service for service in waiting if service.connection.may_wait()], end_s)
        found = [NO_ANSWER for _ in range(num_rows)]
        for service, rows in sent.items():
            drafts, unknown = service.finish_step(rows, replies.get(service))
            for index, draft in drafts.items():
                found[index] = draft
            if service.connection.is_draining:
                self._router.forget(unknown)  # the next step finds another service for them
            elif unknown:
                service.resend_unknown(unknown, end_s)
        return found

    def _await(self, services: Sequence[DraftClient], end_s: float) -> dict[DraftClient, Reply]:
        """Wait for a reply from each of these services until `end_s`, and return the replies by service.

        Mark a service that has not replied as lagging, and count its timeout.
        """
        transports = {service.client: service.transport for service in self._services.values()}
        waiting = {transports[service]: service for service in services}
        replies: dict[DraftClient, Reply] = {}
        while waiting and (ready := poll_any(list(waiting), end_s - self._clock())):
            for transport in ready:
                reply = waiting[transport].connection.poll_reply(end_s, waits=False)
                if reply is not None:
                    replies[waiting.pop(transport)] = reply
        for service in waiting.values():
            service.connection.mark_timeout()
        return replies


def _stop(watch: AddressWatch, connector: ServiceConnector) -> None:
    watch.close()
    connector.close()


def _log_change(address: str, flaw: str | None) -> None:
    if flaw is None:
        log.info("the draft service at %s is back and gets new texts", address)
    else:
        log.warning("the draft service at %s %s; its texts go on at others", address, flaw)


def _flaw(service: DraftClient, now_s: float) -> str | None:
    """Return a phrase for the log that says why a service cannot be used; None if it can be used."""
    connection = service.connection
    if not connection.is_connected:
        return "cannot be reached"
    if service.vocab_mismatch:
        return "has a draft with another vocabulary"
    if connection.lagging_s is not None and now_s - connection.lagging_s > _SILENCE_S:
        return "does not answer"
    return None


def _has_refused(service: DraftClient, now_s: float) -> bool:
    refused_s = service.connection.refused_s
    return refused_s is not None and now_s - refused_s < _REFUSED_S


def rows_beside(rows: Mapping[DraftClient, Sequence[StepRow]]) -> dict[DraftClient, OtherRows | None]:
    """Return, for each service, totals of the rows that the other services get; None if there is only one service."""
    if len(rows) < 2:
        return dict.fromkeys(rows)
    sums = {
        service: (len(own), sum(row.num_submitted for row in own), sum(len(row.tokens) for row in own))
        for service, own in rows.items()
    }
    total, submitted, committed = map(sum, zip(*sums.values(), strict=True))
    return {service: OtherRows(total - own[0], submitted - own[1], committed - own[2]) for service, own in sums.items()}


class RendezvousRouter:
    """Chooses a service for each new sequence, and remembers the service by the sequence's id.

    It knows how many sequences each service got in this step (its load). Beyond a maximum, the sequences used least
    recently are evicted.
    """

    def __init__(self, namespace: bytes) -> None:
        self._namespace = namespace
        self._routes: OrderedDict[bytes, str] = OrderedDict()
        self._loads: Counter[str] = Counter()

    def lookup(self, sequence_id: bytes) -> str | None:
        """Return the address of the service that has a sequence; None for an unknown sequence."""
        return self._routes.get(sequence_id)

    def assign(self, tokens: Tokens, usable: Collection[str]) -> str | None:
        """Return the address of the service for a new sequence that begins with `tokens`; None if `usable` is empty.

        Take the first of the `usable` services, in the rendezvous order of the sequence, whose load is below its
        maximum: 1.25 times the mean, or 4 if that is more.
        """
        if not usable:
            return None
        max_load = max(_MIN_LOAD, math.ceil(_MAX_EXCESS * (self._loads.total() + 1) / len(usable)))
        key = hashlib.blake2b(pack_tokens(tokens[:KEY_LEN]), key=self._namespace, digest_size=16).digest()
        return next(service for service in rendezvous_order(usable, key) if self._loads[service] < max_load)

    def pin(self, sequence_id: bytes, service: str) -> None:
        """Assign a sequence to the service with the address `service`, and add 1 to that service's load."""
        self._routes[sequence_id] = service
        self._routes.move_to_end(sequence_id)
        self._loads[service] += 1
        if len(self._routes) > _MAX_ROUTED:
            self._routes.popitem(last=False)

    def forget(self, ids: Collection[bytes]) -> None:
        """Remove these sequence ids: the sequences have got new ids, or their service does not have them."""
        for one in ids:
            self._routes.pop(one, None)

    def reset_loads(self) -> None:
        """Set the loads of all services to zero, so that only the sequences of the step that begins count."""
        self._loads.clear()
