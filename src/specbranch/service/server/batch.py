"""Sessions that may have something to draft, by tenant, each tenant's in turn: a step costs what it plans."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from specbranch.service.server.draft_session import DraftSession

_SILENT_S, _MAX_SILENT_S = 1.0, 20.0  # a tenant of which nothing is heard for so long may be gone
_PAUSE_S = 0.05  # between two messages of a tenant, not within one
_Queues = OrderedDict[bytes, OrderedDict[DraftSession, None]]  # by tenant


@dataclass(slots=True)
class TenantActivity:
    """When there was news of a tenant. One with slow steps may be silent for longer: for two of its pauses."""

    last_s: float = -math.inf
    pause_s: float = 0.0

    def record(self, now_s: float) -> None:
        """There is news."""
        pause_s = now_s - self.last_s
        if _PAUSE_S < pause_s < math.inf:
            self.pause_s = max(pause_s, self.pause_s / 2)
        self.last_s = now_s

    def is_present(self, now_s: float) -> bool:
        """Whether it is still there, as far as is known."""
        return now_s - self.last_s < min(max(_SILENT_S, 2 * self.pause_s), _MAX_SILENT_S)


class RunnableSessions:
    """Texts that targets wait for, those that they decode, and those that were only announced. One thread uses it."""

    def __init__(self) -> None:
        self._awaited, self._decoded, self._announced = self._kinds = _Queues(), _Queues(), _Queues()
        self._kind_of: dict[DraftSession, _Queues] = {}
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._kind_of)

    def __contains__(self, session: DraftSession) -> bool:
        return session in self._kind_of

    def __iter__(self) -> Iterator[DraftSession]:
        return chain.from_iterable(queue for kind in self._kinds for queue in kind.values())

    @property
    def tenants(self) -> set[bytes]:
        """Whose sessions these are."""
        return {tenant for kind in self._kinds for tenant in kind}

    def add(self, session: DraftSession) -> None:
        """There is news of this session."""
        kind = self._announced
        if session.is_target_waiting:
            kind = self._awaited
        elif session.has_verdict:
            kind = self._decoded
        if self._kind_of.get(session) is not kind:
            self.discard(session)
            kind.setdefault(session.tenant, OrderedDict())[session] = None
            self._kind_of[session] = kind

    def discard(self, session: DraftSession) -> None:
        """Nothing is to be done for it until there is news."""
        kind = self._kind_of.pop(session, None)
        if kind is not None:
            del kind[session.tenant][session]
            if not kind[session.tenant]:
                del kind[session.tenant]

    def select(
        self, most: int, most_others: int, present: Collection[bytes]
    ) -> tuple[list[DraftSession], list[DraftSession]]:
        """So many whose turn it is, the first of every tenant before a second one of any, awaited ones first.

        And beside them at most `most_others` that were only announced, or whose tenants are not `present`.
        """
        needed: dict[bytes, list[DraftSession]] = {}
        others: list[list[DraftSession]] = []
        for tenant, queue in self._awaited.items():
            needed[tenant] = list(islice(queue, most))
        for tenant, queue in self._decoded.items():
            if tenant in present:
                needed.setdefault(tenant, []).extend(islice(queue, most))
            else:
                others.append(list(islice(queue, most_others)))
        others += [list(islice(queue, most_others)) for queue in self._announced.values()]
        self._num_taken += most_others > 0
        first = self._num_taken % max(len(others), 1)  # another one each time: neither kind waits for the other
        others = others[first:] + others[:first]
        taken = list(islice(_alternating([*needed.values()]), most)), list(islice(_alternating(others), most_others))
        for session in chain(*taken):
            kind = self._kind_of[session]
            kind[session.tenant].move_to_end(session)
            kind.move_to_end(session.tenant)
        return taken


def _alternating(queues: Sequence[Sequence[DraftSession]]) -> Iterator[DraftSession]:
    """The first of every queue, then the second one of each, and so on."""
    for rank in range(max(map(len, queues), default=0)):
        yield from (queue[rank] for queue in queues if rank < len(queue))
