"""Several draft services behind one client: rendezvous routing, failover and drain.

A call sends to all services that it needs and then waits for all of them at once, until its one deadline. A service
that cannot be reached, does not answer, refuses, or has another vocabulary gets no rows until it works again; its
sequences move to other services, which open them again. So do those of a service that is draining, at their next
step, unless all others drain too.

A new sequence is routed by rendezvous hashing of its first tokens, so that equal prompts of several targets meet at one
service and share its cache, and so do the turns of a chat. When a service comes or goes, prompts of other services do
not move. A sequence stays at its service while it grows. If many prompts begin with the same tokens, some go to the
next service in their rendezvous order: no service gets much more than its share of a target's sequences.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from specbranch.core.round import Draft
from specbranch.service.client.client import DraftClient, PreparedRow
from specbranch.service.client.interface import NO_ANSWER, ClientOptions, DraftSource, SequenceUpdate
from specbranch.service.client.sequences import SequenceDelta
from specbranch.service.client.transport import ZmqTransport, poll_any
from specbranch.service.wire.addresses import normalize_addresses
from specbranch.service.wire.messages import MAX_ROWS, OtherRows, Reply, StepRow, pack_tokens
from specbranch.service.wire.payloads import Digest, Tokens

log = logging.getLogger(__name__)

_SILENCE_S = 0.25  # the silence after which sequences leave a service; shorter would cost a prefill elsewhere too often
_REFUSED_S = 5.0  # the time after a refusal in which nothing is sent, unless all refuse
KEY_LEN = 64  # tokens at the beginning of a prompt that route it
_MAX_ROUTED = 4096  # sequences; engines run fewer at once, and never say that one has ended
_MAX_EXCESS = 1.25  # the largest load of a service, as a multiple of the mean of all
_MIN_LOAD = 4  # sequences that a service may get in any case


def draft_client(options: ClientOptions) -> DraftSource:
    """Return a client if the options name one address, or a pool if they name several addresses."""
    return DraftClient(options) if len(normalize_addresses(options.address)) == 1 else DraftPool(options)


class DraftPool(DraftSource):
    """Gets drafts from several services with the same draft model, numbered in the order of their addresses."""

    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options)
        self._addresses = normalize_addresses(options.address)
        own = [replace(options, address=address, namespace=self._namespace) for address in self._addresses]
        transports = [ZmqTransport(address, options.keys) for address in self._addresses]
        self._services = [
            DraftClient(one, self._synced, self.counts, transport)
            for one, transport in zip(own, transports, strict=True)
        ]
        self._transports = dict(zip(self._services, transports, strict=True))
        self._flaws: list[str | None] = [None] * len(own)  # as last logged
        self._router = RendezvousRouter(self._addresses, self._namespace)

    @property
    def is_lagging(self) -> bool:
        return all(service.is_lagging for service in self._services)

    @property
    def vocab_mismatch(self) -> bool:
        return all(service.vocab_mismatch for service in self._services)

    def close(self) -> None:
        for service in self._services:
            service.close()

    def _propose(self, rows: Sequence[SequenceUpdate], end_s: float, step_us: int) -> list[Draft] | None:
        usable = self._usable(end_s)
        deltas = {
            index: self._synced.advance(row.name, row.tokens, row.num_new)
            for index, row in enumerate(rows)
            if self._fits(row)
        }
        placed = self._place(rows, deltas, usable)
        prepared = {
            self._services[number]: self._services[number].prepare_step(
                rows, indices, [deltas[index] for index in indices]
            )
            for number, indices in placed.items()
        }
        if sum(map(len, placed.values())) < len(rows):
            step_us = 0  # rows that are left out were in the step too
        wire = {service: [row.wire for row in own] for service, own in prepared.items()}
        beside = rows_beside(wire)
        sent = {
            service: own
            for service, own in prepared.items()
            if service.connection.send_step(wire[service], end_s, step_us, beside[service])
        }
        return self._collect(len(rows), sent, end_s) if sent else None

    def _announce_prompts(self, prompts: Sequence[Tokens], end_s: float) -> None:
        usable = self._usable(end_s)
        taking = self._taking(usable)
        staying = taking or usable
        placed: dict[int, list[Tokens]] = {}
        for prompt in prompts:
            name = Digest(prompt).name
            number = self._router.lookup(name)
            if number not in staying:
                number = self._router.assign(prompt, taking)
            if number is not None:
                self._router.pin(name, number)
                placed.setdefault(number, []).append(prompt)
        for number, own in placed.items():
            self._services[number].open(own, end_s)

    def _usable(self, end_s: float) -> set[int]:
        """Handle all replies that have come, and return the numbers of the services that can be used.

        A service that refused a message in the last 5 s is included only if no service without a refusal can be used.
        Ping services that cannot be used or are draining.
        """
        now_s = self._clock()
        flaws = []
        for service in self._services:
            service.connection.drain_replies(end_s)
            flaws.append(_flaw(service, now_s))
            if flaws[-1] is not None or service.connection.is_draining:
                service.connection.ping()
        if flaws != self._flaws:
            self._log_changes(flaws)
        usable = {
            number
            for number, service in enumerate(self._services)
            if flaws[number] is None and not _has_refused(service, now_s)
        }
        return usable or {number for number, flaw in enumerate(flaws) if flaw is None}

    def _taking(self, usable: Collection[int]) -> list[int]:
        """Return the numbers of the usable services that accept new sequences."""
        return [number for number in usable if not self._services[number].connection.is_draining]

    def _log_changes(self, flaws: list[str | None]) -> None:
        for address, before, now in zip(self._addresses, self._flaws, flaws, strict=True):
            if now is not None and now != before:
                log.warning("the draft service at %s %s; its texts go on at others", address, now)
            elif now is None and before is not None:
                log.info("the draft service at %s is back and gets new texts", address)
        self._flaws = flaws

    def _place(
        self, rows: Sequence[SequenceUpdate], deltas: Mapping[int, SequenceDelta], usable: Collection[int]
    ) -> dict[int, list[int]]:
        """Assign rows to services, and return the indices of the rows by the number of the service.

        A sequence keeps its service. New sequences, and those whose service cannot be used or drains, are routed to one
        that accepts them. If all drain, each keeps its sequences.
        """
        homes = {index: self._router.lookup(delta.before) for index, delta in deltas.items()}
        self._router.forget([delta.before for delta in deltas.values()])
        self._router.reset_loads()
        taking = self._taking(usable)
        staying = taking or usable
        placed: dict[int, list[int]] = {}
        for index, home in sorted(homes.items(), key=lambda item: item[1] not in staying):
            row, number = rows[index], home
            if number not in staying:
                number = self._router.assign(row.tokens[: len(row.tokens) - row.num_new], taking)
                self.counts.rerouted += home is not None and number is not None
            if number is not None:
                placed.setdefault(number, []).append(index)
            settled = home if number is None else number
            if settled is not None:
                self._router.pin(deltas[index].after, settled)
        return {number: indices[:MAX_ROWS] for number, indices in placed.items()}

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
        waiting = {self._transports[service]: service for service in services}
        replies: dict[DraftClient, Reply] = {}
        while waiting and (ready := poll_any(list(waiting), end_s - self._clock())):
            for transport in ready:
                reply = waiting[transport].connection.poll_reply(end_s, waits=False)
                if reply is not None:
                    replies[waiting.pop(transport)] = reply
        for service in waiting.values():
            service.connection.mark_timeout()
        return replies


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

    def __init__(self, addresses: Sequence[str], namespace: bytes) -> None:
        self._services = [address.encode() for address in addresses]
        self._namespace = namespace
        self._routes: OrderedDict[bytes, int] = OrderedDict()
        self._loads = [0] * len(addresses)

    def lookup(self, sequence_id: bytes) -> int | None:
        """Return the number of the service that has a sequence; None for an unknown sequence."""
        return self._routes.get(sequence_id)

    def assign(self, tokens: Tokens, usable: Collection[int]) -> int | None:
        """Return the number of the service for a new sequence that begins with `tokens`; None if `usable` is empty.

        Take the first of the `usable` services, in the rendezvous order of the sequence, whose load is below its
        maximum: 1.25 times the mean, or 4 if that is more.
        """
        if not usable:
            return None
        max_load = max(_MIN_LOAD, math.ceil(_MAX_EXCESS * (sum(self._loads) + 1) / len(usable)))
        return next(service for service in self._order(tokens) if service in usable and self._loads[service] < max_load)

    def pin(self, sequence_id: bytes, service: int) -> None:
        """Assign a sequence to the service with the number `service`, and add 1 to that service's load."""
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
        self._loads = [0] * len(self._services)

    def _order(self, tokens: Tokens) -> list[int]:
        key = hashlib.blake2b(pack_tokens(tokens[:KEY_LEN]), key=self._namespace, digest_size=16).digest()
        return sorted(
            range(len(self._services)),
            key=lambda service: hashlib.blake2b(self._services[service], key=key, digest_size=8).digest(),
        )
