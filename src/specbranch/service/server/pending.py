"""Answers that are held back until a draft is long enough or the time of the client is up, as its planner wants."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from specbranch.service.server.draft_session import DraftSession, State
from specbranch.service.server.store import FaultGuard
from specbranch.service.wire.messages import StepRequest


@dataclass(slots=True, kw_only=True)
class PendingStep:
    """A step that is not answered yet; one entry for each row in `sessions` and `proposals`."""

    client: bytes
    step: StepRequest
    since_s: float
    deadline_s: float
    sessions: list[DraftSession | None] = field(init=False)
    proposals: list[list[int] | None] = field(init=False)
    probs: list[bytes] = field(init=False)  # what the tokens of the proposals were drawn from
    waiting: set[int] = field(default_factory=set)  # rows that are not ready
    num_held: int = 0  # rows that were not ready at once

    def __post_init__(self) -> None:
        rows = self.step.rows
        self.sessions, self.probs = [None] * len(rows), [b""] * len(rows)
        self.proposals = [None if row.prefetched is None else [] for row in rows]  # what was told is not said again

    def set_draft(self, index: int, proposal: list[int] | None) -> None:
        """The proposal of a row, with what it was drawn from: the next row may go on with the same session."""
        session = self.sessions[index]
        if self.step.rows[index].prefetched is None:
            self.proposals[index] = proposal
        if session is not None and proposal and self.step.rows[index].sampling is not None:
            self.probs[index] = session.probs()


class PendingReplies:
    """The steps that wait, one for each client. `notify` lets the draft thread look at a session again.

    However many rows wait for a session, it is asked once, and only after it has grown.
    """

    def __init__(self, faults: FaultGuard, notify: Callable[[DraftSession], None]) -> None:
        self._faults = faults
        self._notify = notify
        self._pending: dict[bytes, PendingStep] = {}
        self._rows: dict[DraftSession, dict[tuple[bytes, int], None]] = {}  # that wait for a session: client, index

    def add(self, pending: PendingStep) -> None:
        """From now on this client waits."""
        self._pending[pending.client] = pending

    def add_row(
        self, pending: PendingStep, index: int, session: DraftSession | None, proposal: list[int] | None
    ) -> None:
        """The session of a row of a step. If it has no proposal yet, the row waits for it."""
        pending.sessions[index] = session
        if session and proposal is None and session.is_target_waiting:
            pending.waiting.add(index)
            pending.num_held += 1
            self._rows.setdefault(session, {})[pending.client, index] = None
        pending.set_draft(index, proposal)

    def remove(self, client: bytes) -> PendingStep | None:
        """The client waits no more: it was answered, or it has gone on."""
        pending = self._pending.pop(client, None)
        if pending is not None:
            for index in list(pending.waiting):
                self._release(pending, index)
        return pending

    def waits_for(self, session: DraftSession) -> bool:
        """Whether a row waits for this session."""
        return session in self._rows

    def all(self) -> list[PendingStep]:
        """Everyone who waits."""
        return list(self._pending.values())

    def next_deadline_s(self) -> float | None:
        """When the first of them must be answered."""
        return min((pending.deadline_s for pending in self._pending.values()), default=None)

    def completed(self, grown: Collection[DraftSession]) -> list[PendingStep]:
        """Steps all of whose rows have their proposals, or need not wait, now that these sessions have grown."""
        touched: dict[bytes, None] = {}
        for session in [one for one in self._rows if one in grown or one.is_dropped or one.is_far_behind]:
            proposal = None if session.is_dropped else self._faults.guard(session, session.propose)
            if proposal is None and not session.is_dropped:
                continue
            for client, index in list(self._rows[session]):
                touched[client] = None
                if proposal is None:
                    self._give_up(self._pending[client], index)
                else:
                    self._pending[client].set_draft(index, proposal)
                    self._release(self._pending[client], index)
            if session.is_far_behind and session.set_state(State.PREFILLING):
                self._notify(session)  # it goes on with its prefill
        return [self._pending[client] for client in touched if not self._pending[client].waiting]

    def expire(self, pending: PendingStep) -> None:
        """The time is up: rows that are not ready go with what there is."""
        for index in list(pending.waiting):
            self._give_up(pending, index)

    def _give_up(self, pending: PendingStep, index: int) -> None:
        session = pending.sessions[index]
        assert session is not None, "only sessions are waited for"
        pending.set_draft(index, self._faults.guard(session, session.propose_without_waiting))
        self._release(pending, index)
        self._notify(session)

    def _release(self, pending: PendingStep, index: int) -> None:
        """The row waits no more; nor is its session awaited, unless another client waits for it."""
        pending.waiting.discard(index)
        session = pending.sessions[index]
        assert session is not None, "only sessions are waited for"
        rows = self._rows[session]
        rows.pop((pending.client, index), None)
        if rows:
            session.set_state(State.TARGET_WAITING)
            return
        del self._rows[session]
        if session.is_target_waiting:
            session.set_state(State.PREPARING)
