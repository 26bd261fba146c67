"""Replies held back, for planners that let a target wait, until all drafts are ready or the deadline has passed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from specbranch.core.round import Draft
from specbranch.service.server.draft_session import DraftSession, State
from specbranch.service.server.store import FaultGuard
from specbranch.service.wire.messages import StepRequest
from specbranch.service.wire.payloads import pack_probs


@dataclass(slots=True, kw_only=True)
class PendingStep:
    """A step without a reply yet; `sessions`, `proposals` and `probs` have one entry for each row."""

    client: bytes
    step: StepRequest
    since_s: float
    deadline_s: float
    sessions: list[DraftSession | None]
    proposals: list[list[int] | None] = field(init=False)
    probs: list[bytes] = field(init=False)  # the packed distributions that the proposals were sampled from
    waiting: set[int] = field(default_factory=set)  # rows that have no draft yet
    num_held: int = 0  # rows that had no draft at once

    def __post_init__(self) -> None:
        self.proposals = [None if row.prefetched is None else [] for row in self.step.rows]
        self.probs = [b""] * len(self.step.rows)

    def set_draft(self, index: int, draft: Draft | None) -> None:
        """Set the draft of a row, None for no draft, with its distributions; ignore rows with a prefetched draft."""
        row = self.step.rows[index]
        if row.prefetched is None:
            self.proposals[index] = None if draft is None else draft.tokens
            if draft is not None and row.sampling is not None:
                self.probs[index] = pack_probs(draft.sampled_from)


class PendingReplies:
    """The steps without a reply, one for each client. `notify` tells the draft thread that a session has changed.

    However many rows wait for a session, the session is asked for one draft, and only after it got new distributions.
    """

    def __init__(self, faults: FaultGuard, notify: Callable[[DraftSession], None]) -> None:
        self._faults = faults
        self._notify = notify
        self._pending: dict[bytes, PendingStep] = {}
        self._rows: dict[DraftSession, dict[tuple[bytes, int], None]] = {}  # waiting rows by session: client, index

    def add(self, pending: PendingStep) -> None:
        """Store a step that has no reply yet; its client must have no other stored step."""
        self._pending[pending.client] = pending

    def add_row(self, pending: PendingStep, index: int, session: DraftSession | None, draft: Draft | None) -> None:
        """Set the session and the draft of a row; if the draft is None, let the row wait for the session.

        The row does not wait if the session is None or its state is not TARGET_WAITING.
        """
        pending.sessions[index] = session
        if session and draft is None and session.is_target_waiting:
            pending.waiting.add(index)
            pending.num_held += 1
            self._rows.setdefault(session, {})[pending.client, index] = None
        pending.set_draft(index, draft)

    def remove(self, client: bytes) -> PendingStep | None:
        """Remove the stored step of a client, end the wait of its rows, and return it; None if the client has none."""
        pending = self._pending.pop(client, None)
        if pending is not None:
            for index in list(pending.waiting):
                self._release(pending, index)
        return pending

    def waits_for(self, session: DraftSession) -> bool:
        """Return whether a row of a stored step waits for a draft of this session."""
        return session in self._rows

    def all(self) -> list[PendingStep]:
        """Return all steps without a reply."""
        return list(self._pending.values())

    def overdue(self, now_s: float) -> list[PendingStep]:
        """Return the steps whose deadline has passed."""
        return [pending for pending in self._pending.values() if pending.deadline_s <= now_s]

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline; None if no step waits."""
        return min((pending.deadline_s for pending in self._pending.values()), default=None)

    def completed(self, grown: Collection[DraftSession]) -> list[PendingStep]:
        """Ask awaited sessions in `grown`, which have new distributions, for drafts; return steps that are complete.

        Rows that wait for a session that was dropped, or that has more than 32 tokens to prefill, stop waiting too.
        """
        touched: dict[bytes, None] = {}
        for session in [one for one in self._rows if one in grown or one.is_dropped or one.is_far_behind]:
            draft = None
            if not session.is_dropped:
                with self._faults.guard(session):
                    draft = session.propose()
            if draft is None and not session.is_dropped:
                self._notify(session)  # its planner may have rows now
                continue
            for client, index in list(self._rows[session]):
                touched[client] = None
                if draft is None:
                    self._give_up(self._pending[client], index)
                else:
                    self._pending[client].set_draft(index, draft)
                    self._release(self._pending[client], index)
            if session.is_far_behind and session.set_state(State.PREFILLING):
                self._notify(session)  # its prefill must go on
        return [self._pending[client] for client in touched if not self._pending[client].waiting]

    def expire(self, pending: PendingStep) -> None:
        """End the wait of each waiting row of a step, and set its draft by `DraftSession.propose_without_waiting`."""
        for index in list(pending.waiting):
            self._give_up(pending, index)

    def _give_up(self, pending: PendingStep, index: int) -> None:
        session = pending.sessions[index]
        assert session is not None, "a row waits for a session"
        draft = None
        with self._faults.guard(session):
            draft = session.propose_without_waiting()
        pending.set_draft(index, draft)
        self._release(pending, index)
        self._notify(session)

    def _release(self, pending: PendingStep, index: int) -> None:
        """End the wait of a row; if no other row waits for its session, end the session's state TARGET_WAITING."""
        pending.waiting.discard(index)
        session = pending.sessions[index]
        assert session is not None, "a row waits for a session"
        rows = self._rows[session]
        rows.pop((pending.client, index), None)
        if rows:
            session.set_state(State.TARGET_WAITING)
            return
        del self._rows[session]
        if session.is_target_waiting:
            session.set_state(State.PREPARING)
