"""Answers before they are asked for: after a draft step, what to submit after which verdict goes to the target.

The target then has its answer when the verdict comes, and the round trip is saved. What is told costs nobody anything:
a verdict that was not foreseen is asked for as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from specbranch.service.faults import Faults
from specbranch.service.sessions import DraftSession
from specbranch.service.wire import MAX_AHEAD, MAX_REPLY, Ahead, AheadRow

_MOST_PROBS = MAX_REPLY // 2  # bytes of probabilities in a message
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
        for part in _parts(told):
            counters[client].num_ahead += 1
            yield client, Ahead(part)


def _parts(rows: Sequence[AheadRow]) -> Iterator[list[AheadRow]]:
    """Rows that fit into one message, by number and by size."""
    part: list[AheadRow] = []
    size = 0
    for row in rows:
        row_size = sum(len(outcome.probs) for outcome in row.outcomes)
        if part and (len(part) == MAX_AHEAD or size + row_size > _MOST_PROBS):
            yield part
            part, size = [], 0
        part.append(row)
        size += row_size
    yield part
