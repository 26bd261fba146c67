"""Answers before they are asked for: after a draft step, what to submit after which verdict goes to the target.

The target then has its answer when the verdict comes, and the round trip is saved. What is told costs nobody anything:
a verdict that was not foreseen is asked for as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specbranch.service.faults import Faults
from specbranch.service.sessions import DraftSession
from specbranch.service.wire import MAX_AHEAD, Ahead, AheadRow

_MOST = 64  # messages to one client between two of its steps: by then all is drafted that a verdict could use


def tell_ahead(sessions: Iterable[DraftSession], faults: Faults) -> Iterator[tuple[bytes, Ahead]]:
    """Messages with what has changed for these sessions, each for the client whose verdict is awaited."""
    rows: dict[bytes, list[AheadRow]] = {}
    counters = {}
    for session in sessions:
        counter = session.step_counter
        if session.is_forgotten or not session.is_draftable or counter.num_ahead >= _MOST:
            continue
        outcomes = faults.contain(session, session.foresee)
        if outcomes:
            rows.setdefault(counter.client, []).append(AheadRow(session.key[1], outcomes))
            counters[counter.client] = counter
    for client, told in rows.items():
        counters[client].num_ahead += 1
        for start in range(0, len(told), MAX_AHEAD):
            yield client, Ahead(told[start : start + MAX_AHEAD])
