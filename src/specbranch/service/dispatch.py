"""Messages in, answers out. No socket and no thread here: frames come in, frames go out.

An answer never waits for the draft step that is under way, unless a planner lets the target wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from specbranch.core.costs import StepCost
from specbranch.core.planners import SettingError
from specbranch.engines.protocol import DraftEngine
from specbranch.service.ahead import tell_ahead
from specbranch.service.compute import Compute
from specbranch.service.faults import Faults
from specbranch.service.figures import Figures
from specbranch.service.lookup import Lookup, LookupCounts
from specbranch.service.observer import Observer
from specbranch.service.sessions import DraftSession, SessionStore, StepCounter
from specbranch.service.waiting import Pending, Waiting
from specbranch.service.wire import (
    VERSION,
    FrameError,
    Hello,
    Open,
    Overview,
    OverviewRequest,
    Proposals,
    Refused,
    Reply,
    StatsReply,
    StatsRequest,
    Step,
    StepRow,
    Welcome,
    decode_request,
)

log = logging.getLogger(__name__)

Client = bytes
Answer = tuple[Client, Reply]


class Dispatch:
    """Answers clients. Called by the lookup thread only."""

    def __init__(
        self,
        engine: DraftEngine,
        store: SessionStore,
        compute: Compute,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        settings: Mapping[str, str | int] | None = None,
    ) -> None:
        """`settings`: how the service was started, for those who ask."""
        self._info = engine.info
        self._settings = dict(settings or {})
        self._store = store
        self._compute = compute
        self._observer = observer or Observer()
        self._clock = clock
        self.faults = Faults(store)
        self.lookup = Lookup(engine, store, compute, faults=self.faults, observer=self._observer, clock=clock)
        self._tenants = self.lookup.tenants
        self._waiting = Waiting(self.faults, compute.tell)
        self.figures = Figures(store, compute, self.lookup.counts, self.faults, clock)

    @property
    def counts(self) -> LookupCounts:
        """What this thread did."""
        return self.lookup.counts

    def handle(self, client: Client, frames: Sequence[bytes]) -> Iterator[Answer]:
        """Serve one message. What cannot be served is refused, counted and logged; it never raises.

        An answer is to be sent as soon as it comes: what nobody waits for is done behind it.
        """
        try:
            yield from self._serve(client, frames)
        except (FrameError, SettingError) as error:
            self.counts.refused += 1
            log.warning("refused a message: %s", repr(str(error))[:200])
            yield client, Refused(str(error)[:500])
        except Exception as error:
            yield self._refuse(client, error)

    def next_deadline_s(self) -> float | None:
        """When `answer_overdue` must be called at the latest."""
        return self._waiting.next_deadline_s()

    def answer_ready(self) -> list[Answer]:
        """Answers that were held back and are complete now; asked after draft steps."""
        return self._answers(self._waiting.is_ready)

    def answer_overdue(self) -> list[Answer]:
        """Answers whose time is up: rows that are not ready go without a draft."""
        return self._answers(self._is_overdue)

    def tell_ahead(self) -> list[Answer]:
        """Answers that nobody has asked for yet; asked after draft steps."""
        return list(tell_ahead(self._compute.take_grown(), self.faults))

    def _serve(self, client: Client, frames: Sequence[bytes]) -> Iterable[Answer]:
        if len(frames) != 1:
            raise FrameError(f"a message has one frame, this one has {len(frames)}")
        request = decode_request(frames[0])
        if isinstance(request, Step):
            return self._serve_step(client, request)
        if isinstance(request, Hello):
            return [(client, self._serve_hello(request))]
        if isinstance(request, StatsRequest):
            return [(client, self._serve_stats(request))]
        if isinstance(request, OverviewRequest):
            return [(client, Overview(request.round, self._settings, self.figures.by_name()))]
        assert isinstance(request, Open)
        self.lookup.open(client, request)
        return []

    def _refuse(self, client: Client, error: Exception) -> Answer:
        """The answer where serving failed by a fault of ours: it costs this client one answer, and nobody else."""
        self.faults.note(error, "a message is refused")
        self._waiting.remove(client)
        return (client, Refused("the service failed on this message; see its log"))

    def _serve_hello(self, hello: Hello) -> Welcome:
        if hello.version != VERSION:
            raise FrameError(f"the client speaks version {hello.version}, this service {VERSION}; update the older one")
        info = self._info
        return Welcome(VERSION, hello.round, info.model[-256:], info.vocab_len, info.vocab_sample)

    def _serve_stats(self, request: StatsRequest) -> StatsReply:
        sessions, stats = self._store.stats_of(request.namespace)
        cost = self._compute.cost.cost or StepCost(0.0)
        return StatsReply(
            round=request.round,
            sessions=sessions,
            rounds=stats.rounds,
            hits=stats.hits,
            submitted=stats.submitted,
            accepted=stats.accepted,
            rows=stats.rows,
            rejected=stats.rejected,
            unused=stats.unused,
            cut=stats.cut,
            first_row_us=round(1e6 * cost.first_s),
            more_row_us=round(1e6 * cost.more_s),
            **self._store.undrafted.counts(request.namespace),
        )

    def _serve_step(self, client: Client, step: Step) -> Iterator[Answer]:
        now_s = self._clock()
        self._tenants.step_ended(step, now_s)
        self._drop_pending(client)
        self.counts.steps += 1
        step_counter = self._tenants.step_counter(client)
        step_counter.steps += 1
        step_counter.num_ahead = 0
        pending = Pending(client=client, step=step, since_s=now_s, deadline_s=now_s + step.wait_ms / 1000)
        self._waiting.add(pending)
        first, later = _in_turn(step.rows)
        for index in first:
            self._look_up(pending, index, step_counter)
        is_held = bool(pending.waiting)
        answered_s = self._clock()
        if not is_held:
            answer = self._answer(pending, answered_s)
            if first:
                yield answer
        for index in later:
            try:
                self._look_up(pending, index, step_counter)
            except Exception as error:  # the answer has gone out; the row is asked for again
                self.faults.note(error, "a row is not followed")
        self._observer.arrived(client, step, pending.sessions, now_s)
        if not is_held:
            self._note_answer(pending, answered_s)
        elif pending.deadline_s <= now_s:
            yield from self.answer_overdue()

    def _look_up(self, pending: Pending, index: int, step_counter: StepCounter) -> None:
        """Bring the session of a row up to its verdict, and take what it has to submit."""
        row = pending.step.rows[index]
        session = self.lookup.session_of(pending.step.namespace, row)
        pending.add(index, session, self._proposal(session, row) if session else None)
        if session:
            session.hear(step_counter)
            self._compute.tell(session)

    def _proposal(self, session: DraftSession, row: StepRow) -> list[int] | None:
        """What to answer for a row; nothing if the target was told ahead."""
        if row.taken is not None:
            return self.faults.contain(session, session.adopt, row.taken)
        return self.faults.contain(session, session.propose)

    def _drop_pending(self, client: Client) -> None:
        """The client has gone on: nobody waits for its last step's drafts any more."""
        pending = self._waiting.remove(client)
        if pending is not None:
            self._note_answer(pending, min(self._clock(), pending.deadline_s))

    def _is_overdue(self, pending: Pending) -> bool:
        if self._clock() < pending.deadline_s:
            return False
        self.counts.overdue += 1
        self._waiting.give_up(pending)
        return True

    def _answers(self, is_done: Callable[[Pending], bool]) -> list[Answer]:
        answers: list[Answer] = []
        for pending in self._waiting.all():
            try:
                if is_done(pending):
                    now_s = self._clock()
                    answers.append(self._answer(pending, now_s))
                    self._note_answer(pending, now_s)
            except Exception as error:
                answers.append(self._refuse(pending.client, error))
        return answers

    def _answer(self, pending: Pending, now_s: float) -> Answer:
        self._waiting.remove(pending.client)
        self.counts.wait_s += now_s - pending.since_s
        self._tenants.answered(pending.step.namespace, now_s)
        probs = pending.probs if any(pending.probs) else []
        return (pending.client, Proposals(pending.step.round, pending.proposals, probs))

    def _note_answer(self, pending: Pending, at_s: float) -> None:
        self._observer.answered(pending.client, pending.step, pending.since_s, at_s, pending.num_held)


def _in_turn(rows: Sequence[StepRow]) -> tuple[list[int], list[int]]:
    """The rows that somebody waits for, and those that may be followed after the answer.

    What the target was told ahead it verifies already. But where a row that asks shares a sequence with such a row, the
    first of the two gets the session.
    """
    asked = {name for row in rows if row.taken is None for name in (row.before, row.after)}
    turns: tuple[list[int], list[int]] = [], []
    for index, row in enumerate(rows):
        turns[row.taken is not None and row.before not in asked].append(index)
    return turns
