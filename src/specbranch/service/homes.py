"""Which of several draft services has which sequence. No socket and no clock here.

A new sequence goes where its first tokens lead by rendezvous hashing, so that equal prompts of several targets meet at
one service and share its cache, and so do the turns of a chat. When a service comes or goes, no other's prompts move.
A sequence stays where it is, whatever it becomes. Where many prompts begin alike, some go to the next service in
their order: no service gets much more than its share of a target's sequences.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence

from specbranch.service.digest import Tokens
from specbranch.service.wire import pack

KEY_LEN = 64  # tokens at the beginning of a prompt that decide where it goes
_MOST = 4096  # sequences; engines run fewer at once, and never say that one has ended
_EXCESS = 1.25  # times the mean of all services: more sequences than that none gets
_FEW = 4  # so many it gets in any case


class Homes:
    """Services by number. Sequences are named by their digests; the least recently used are forgotten."""

    def __init__(self, addresses: Sequence[str], namespace: bytes) -> None:
        self._services = [address.encode() for address in addresses]
        self._namespace = namespace
        self._homes: OrderedDict[bytes, int] = OrderedDict()
        self._loads = [0] * len(addresses)

    def find(self, name: bytes) -> int | None:
        """The service that has a sequence; None for a new one."""
        return self._homes.get(name)

    def choose(self, tokens: Tokens, usable: Collection[int]) -> int | None:
        """Where a sequence with this beginning is to go; None if no service is usable."""
        if not usable:
            return None
        most = max(_FEW, math.ceil(_EXCESS * (sum(self._loads) + 1) / len(usable)))
        return next(service for service in self._order(tokens) if service in usable and self._loads[service] < most)

    def settle(self, name: bytes, service: int) -> None:
        """A service has this sequence from now on, as one more."""
        self._homes[name] = service
        self._homes.move_to_end(name)
        self._loads[service] += 1
        if len(self._homes) > _MOST:
            self._homes.popitem(last=False)

    def forget(self, names: Collection[bytes]) -> None:
        """These sequences have grown and have other names, or have no home any more."""
        for name in names:
            self._homes.pop(name, None)

    def count_anew(self) -> None:
        """A step begins: sequences that are not settled again count no more."""
        self._loads = [0] * len(self._services)

    def _order(self, tokens: Tokens) -> list[int]:
        key = hashlib.blake2b(pack(tokens[:KEY_LEN]), key=self._namespace, digest_size=16).digest()
        return sorted(
            range(len(self._services)),
            key=lambda service: hashlib.blake2b(self._services[service], key=key, digest_size=8).digest(),
        )
