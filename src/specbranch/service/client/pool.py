"""Several draft services behind one client: rendezvous routing, failover and drain.

A call sends to all services that it needs and then waits for all of them at once, until the one deadline that it has.
A service that cannot be reached, does not answer, refuses, or has another vocabulary gets nothing until it is found
well again; the sequences that it had go on elsewhere, where they are opened anew. One that is draining keeps its own.

A new sequence goes where its first tokens lead by rendezvous hashing, so that equal prompts of several targets meet at
one service and share its cache, and so do the turns of a chat. When a service comes or goes, no other's prompts move.
A sequence stays where it is, whatever it becomes. Where many prompts begin alike, some go to the next service in
their order: no service gets much more than its share of a target's sequences.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from specbranch.service.client.client import DraftClient, PreparedStep
from specbranch.service.client.interface import ClientOptions, DraftSource, SequenceUpdate
from specbranch.service.client.sequences import SequenceDelta
from specbranch.service.client.transport import ZmqTransport, poll_any
from specbranch.service.wire.addresses import normalize_addresses
from specbranch.service.wire.messages import MAX_ROWS, OtherRows, Reply, pack_tokens
from specbranch.service.wire.payloads import Digest, Tokens

log = logging.getLogger(__name__)

_SILENCE_S = 0.25  # after so much of it, sequences leave a service; not sooner, as others would have to prefill them
_REFUSED_S = 5.0  # after a refusal nothing is sent for so long, unless all refuse
KEY_LEN = 64  # tokens at the beginning of a prompt that decide where it goes
_MOST = 4096  # sequences; engines run fewer at once, and never say that one has ended
_EXCESS = 1.25  # times the mean of all services: more sequences than that none gets
_FEW = 4  # so many it gets in any case


def draft_client(options: ClientOptions) -> DraftSource:
    """The client for one address, or for several."""
    return DraftClient(options) if len(normalize_addresses(options.address)) == 1 else DraftPool(options)


class DraftPool(DraftSource):
    """A connection to each of several draft services with the same draft. Services are numbered as their addresses."""

    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options)
        self._addresses = normalize_addresses(options.address)
        own = [replace(options, address=address, namespace=self._namespace) for address in self._addresses]
        transports = [ZmqTransport(address, options.keys) for address in self._addresses]
        self._services = [
            DraftClient(one, self._synced, self.counts, transport)
            for one, transport in zip(own, transports, strict=True)
        ]
        self._links = dict(zip(self._services, transports, strict=True))
        self._flaws: list[str | None] = [None] * len(own)  # as last logged
        self._router = RendezvousRouter(self._addresses, self._namespace)

    @property
    def is_lagging(self) -> bool:
        return all(service.is_lagging for service in self._services)

    @property
    def vocab_mismatch(self) -> bool:
        return all(service.vocab_mismatch for service in self._services)

    def is_owner_process(self) -> bool:
        return self._services[0].is_owner_process()

    def close(self) -> None:
        for service in self._services:
            service.close()

    def _propose(self, rows: Sequence[SequenceUpdate], end_s: float, step_us: int) -> list[list[int]] | None:
        usable = self._usable(end_s)
        grown = {index: self._follow(row) for index, row in enumerate(rows) if self._fits(row)}
        placed = self._place(rows, grown, usable)
        questions: dict[DraftClient, PreparedStep] = {}
        for number, indices in placed.items():
            service = self._services[number]
            service.sampled_from = self.sampled_from  # one list, in which each has its rows
            questions[service] = service.prepare_step(rows, indices, [grown[index] for index in indices])
        if sum(map(len, placed.values())) < len(rows):
            step_us = 0  # rows that are left out were in the step too
        besides = _besides(questions)
        asked = {
            service: question
            for service, question in questions.items()
            if service.send_step(question, end_s, step_us, besides[service])
        }
        return self._collect(rows, asked, end_s) if asked else None

    def _announce_prompts(self, prompts: Sequence[Tokens], end_s: float) -> None:
        usable = self._usable(end_s)
        placed: dict[int, list[Tokens]] = {}
        for prompt in prompts:
            name = Digest(prompt).name
            number = self._router.lookup(name)
            if number not in usable:
                number = self._router.assign(prompt, self._taking(usable))
            if number is not None:
                self._router.pin(name, number)
                placed.setdefault(number, []).append(prompt)
        for number, own in placed.items():
            self._services[number].open(own, end_s)

    def _usable(self, end_s: float) -> set[int]:
        """The services that drafts may come from. The others are asked, now and then, what they are."""
        now_s = self._clock()
        flaws = []
        for service in self._services:
            service.drain_replies(end_s)
            flaws.append(_flaw(service, now_s))
            if flaws[-1] is not None or service.is_draining:
                service.ping()
        if flaws != self._flaws:
            self._tell(flaws)
        usable = {
            number
            for number, service in enumerate(self._services)
            if flaws[number] is None and not _has_refused(service, now_s)
        }
        return usable or {number for number, flaw in enumerate(flaws) if flaw is None}

    def _taking(self, usable: Collection[int]) -> list[int]:
        """Those that take new sequences."""
        return [number for number in usable if not self._services[number].is_draining]

    def _tell(self, flaws: list[str | None]) -> None:
        for address, before, now in zip(self._addresses, self._flaws, flaws, strict=True):
            if now is not None and now != before:
                log.warning("the draft service at %s %s; its texts go on at others", address, now)
            elif now is None and before is not None:
                log.info("the draft service at %s is back and gets new texts", address)
        self._flaws = flaws

    def _place(
        self, rows: Sequence[SequenceUpdate], grown: Mapping[int, SequenceDelta], usable: Collection[int]
    ) -> dict[int, list[int]]:
        """The rows by their service. New ones, and those whose service cannot be used, are given one."""
        homes = {index: self._router.lookup(growth.before) for index, growth in grown.items()}
        self._router.forget([growth.before for growth in grown.values()])
        self._router.reset_loads()
        taking = self._taking(usable)
        placed: dict[int, list[int]] = {}
        for index, home in sorted(homes.items(), key=lambda item: item[1] not in usable):
            row, number = rows[index], home
            if number not in usable:
                number = self._router.assign(row.tokens[: len(row.tokens) - row.num_new], taking)
                self.counts.rerouted += home is not None and number is not None
            if number is not None:
                placed.setdefault(number, []).append(index)
            settled = home if number is None else number
            if settled is not None:
                self._router.pin(grown[index].after, settled)
        return {number: indices[:MAX_ROWS] for number, indices in placed.items()}

    def _collect(
        self, rows: Sequence[SequenceUpdate], asked: Mapping[DraftClient, PreparedStep], end_s: float
    ) -> list[list[int]]:
        """What to submit for every row, as far as those who were asked say it in time."""
        replies = self._await([service for service, question in asked.items() if service.needs_reply(question)], end_s)
        found: list[list[int]] = [[] for _ in rows]
        for service, question in asked.items():
            drafts, unknown = service.finish_step(question, replies.get(service))
            for index, draft in drafts.items():
                found[index] = draft
            if service.is_draining:
                self._router.forget(unknown)  # the next step finds another service for them
            elif unknown:
                service.resend_unknown(unknown, end_s)
        return found

    def _await(self, services: Sequence[DraftClient], end_s: float) -> dict[DraftClient, Reply]:
        """The replies of those that answer until then; the others are given up."""
        waiting = {self._links[service]: service for service in services}
        replies: dict[DraftClient, Reply] = {}
        while waiting and (ready := poll_any(list(waiting), end_s - self._clock())):
            for transport in ready:
                reply = waiting[transport].poll_reply(end_s, waits=False)
                if reply is not None:
                    replies[waiting.pop(transport)] = reply
        for service in waiting.values():
            service.mark_timeout()
        return replies


def _flaw(service: DraftClient, now_s: float) -> str | None:
    """Why a service cannot be used; None if it can."""
    if not service.is_connected:
        return "cannot be reached"
    if service.vocab_mismatch:
        return "has a draft with another vocabulary"
    if service.lagging_s is not None and now_s - service.lagging_s > _SILENCE_S:
        return "does not answer"
    return None


def _has_refused(service: DraftClient, now_s: float) -> bool:
    return service.refused_s is not None and now_s - service.refused_s < _REFUSED_S


def _besides(questions: Mapping[DraftClient, PreparedStep]) -> dict[DraftClient, OtherRows | None]:
    """For each service, what the step has beside the rows that it is asked for."""
    if len(questions) < 2:
        return dict.fromkeys(questions)
    sums = {
        service: (
            len(question.step_rows),
            sum(row.num_submitted for row in question.step_rows),
            sum(len(row.tokens) for row in question.step_rows),
        )
        for service, question in questions.items()
    }
    rows, submitted, committed = map(sum, zip(*sums.values(), strict=True))
    return {service: OtherRows(rows - own[0], submitted - own[1], committed - own[2]) for service, own in sums.items()}


class RendezvousRouter:
    """Services by number. Sequences are named by their digests; the least recently used are forgotten."""

    def __init__(self, addresses: Sequence[str], namespace: bytes) -> None:
        self._services = [address.encode() for address in addresses]
        self._namespace = namespace
        self._router: OrderedDict[bytes, int] = OrderedDict()
        self._loads = [0] * len(addresses)

    def lookup(self, name: bytes) -> int | None:
        """The service that has a sequence; None for a new one."""
        return self._router.get(name)

    def assign(self, tokens: Tokens, usable: Collection[int]) -> int | None:
        """Where a sequence with this beginning is to go; None if no service is usable."""
        if not usable:
            return None
        most = max(_FEW, math.ceil(_EXCESS * (sum(self._loads) + 1) / len(usable)))
        return next(service for service in self._order(tokens) if service in usable and self._loads[service] < most)

    def pin(self, name: bytes, service: int) -> None:
        """A service has this sequence from now on, as one more."""
        self._router[name] = service
        self._router.move_to_end(name)
        self._loads[service] += 1
        if len(self._router) > _MOST:
            self._router.popitem(last=False)

    def forget(self, names: Collection[bytes]) -> None:
        """These sequences have grown and have other names, or have no home any more."""
        for name in names:
            self._router.pop(name, None)

    def reset_loads(self) -> None:
        """A step begins: sequences that are not settled again count no more."""
        self._loads = [0] * len(self._services)

    def _order(self, tokens: Tokens) -> list[int]:
        key = hashlib.blake2b(pack_tokens(tokens[:KEY_LEN]), key=self._namespace, digest_size=16).digest()
        return sorted(
            range(len(self._services)),
            key=lambda service: hashlib.blake2b(self._services[service], key=key, digest_size=8).digest(),
        )
