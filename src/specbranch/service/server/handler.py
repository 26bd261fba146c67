"""Requests in, replies out, and drafts pushed ahead of the verdicts that they answer.

An answer never waits for the draft step that is under way, unless a planner lets the target wait.

The target then has its answer when the verdict comes, and the round trip is saved. What is told costs nobody anything:
a verdict that was not foreseen is asked for as ever.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from specbranch.core.costs import StepCost
from specbranch.core.planners import SettingError
from specbranch.engines.base import DraftEngine
from specbranch.logs import RateLimitedWarning
from specbranch.service.server.draft_runner import DraftRunner
from specbranch.service.server.draft_session import DraftSession
from specbranch.service.server.lookup import LookupCounts, SessionLookup
from specbranch.service.server.pending import PendingReplies, PendingStep
from specbranch.service.server.prometheus import ServiceMetrics
from specbranch.service.server.recorder import EventSink
from specbranch.service.server.store import FaultGuard, SessionStore
from specbranch.service.server.tenants import ClientActivity
from specbranch.service.wire.messages import (
    MAX_AHEAD,
    MAX_REPLY,
    VERSION,
    DraftReply,
    Drain,
    Draining,
    ErrorReply,
    FrameError,
    Hello,
    OpenSequences,
    Overview,
    OverviewRequest,
    PrefetchPush,
    PrefetchRow,
    Reply,
    StatsReply,
    StatsRequest,
    StepRequest,
    StepRow,
    Welcome,
    decode_request,
)

log = logging.getLogger(__name__)

Client = bytes
Answer = tuple[Client, Reply]
_MAX_WAIT_S = 1.0  # unless another one is chosen
_MAX_NAMESPACES = 4  # of one client; ours use one
_MAX_PROBS = MAX_REPLY // 2  # bytes of probabilities in a message
_MOST = 64  # messages to one client between two of its steps: by then all is drafted that a verdict could use


class RequestHandler:
    """Answers clients. Called by the lookup thread only."""

    def __init__(
        self,
        engine: DraftEngine,
        store: SessionStore,
        runner: DraftRunner,
        observer: EventSink | None = None,
        clock: Callable[[], float] = time.monotonic,
        settings: Mapping[str, str | int] | None = None,
        longest_wait_s: float = _MAX_WAIT_S,
        owner: bytes | None = b"",
    ) -> None:
        """`settings`: how the service was started, for those who ask. None is held back beyond `longest_wait_s`.

        `owner`: the key of the one who may drain the service; empty where no keys are used.
        """
        self._info = engine.info
        self._settings = dict(settings or {})
        self._store = store
        self._runner = runner
        self._observer = observer or EventSink()
        self._clock = clock
        self._longest_wait_s = longest_wait_s
        self._owner = owner
        self._warn = RateLimitedWarning(log, clock)
        self._grown: dict[DraftSession, None] = {}  # since they were last looked at for those who wait
        self._untold: dict[DraftSession, None] = {}  # since they were last told of ahead
        self.faults = FaultGuard(store)
        self.lookup = SessionLookup(engine, store, runner, faults=self.faults, observer=self._observer, clock=clock)
        self._tenants = self.lookup.tenants
        self._waiting = PendingReplies(self.faults, runner.notify)
        self.figures = ServiceMetrics(store, runner, self.lookup.counts, self.faults, clock)

    @property
    def counts(self) -> LookupCounts:
        """What this thread did."""
        return self.lookup.counts

    def handle(self, client: Client, frames: Sequence[bytes], user: bytes = b"") -> Iterator[Answer]:
        """Serve one message. What cannot be served is refused, counted and logged; it never raises.

        An answer is to be sent as soon as it comes: what nobody waits for is done behind it. `user` names the key that
        the client has proved to have; a namespace is then one among those of that key only.
        """
        try:
            yield from self._serve(client, frames, user)
        except (FrameError, SettingError) as error:
            self.counts.refused += 1
            self._warn("refused a message: %s", repr(str(error))[:200])
            yield client, ErrorReply(str(error)[:500])
        except Exception as error:
            yield self._error_reply(client, error)

    def next_deadline_s(self) -> float | None:
        """When `answer_overdue` must be called at the latest."""
        return self._waiting.next_deadline_s()

    def answer_ready(self) -> list[Answer]:
        """Answers that were held back and are complete now; asked after draft steps."""
        self._take_grown()
        grown, self._grown = self._grown, {}
        return self._answers(self._waiting.completed(grown))

    def answer_overdue(self) -> list[Answer]:
        """Answers whose time is up: rows that are not ready go without a draft."""
        overdue = [pending for pending in self._waiting.all() if pending.deadline_s <= self._clock()]
        self.counts.overdue += len(overdue)
        return self._answers(overdue)

    def push_prefetched(self) -> list[Answer]:
        """Answers that nobody has asked for yet; asked after draft steps."""
        self._take_grown()
        untold, self._untold = self._untold, {}
        return list(prefetch_messages(untold, self.faults))

    def _take_grown(self) -> None:
        grown = dict.fromkeys(self._runner.pop_updated())
        self._grown |= grown
        self._untold |= grown

    def _serve(self, client: Client, frames: Sequence[bytes], user: bytes) -> Iterable[Answer]:
        if len(frames) != 1:
            raise FrameError(f"a message has one frame, this one has {len(frames)}")
        request = decode_request(frames[0])
        key, user = user, _short(user)
        if user and isinstance(request, StepRequest | OpenSequences | StatsRequest):
            request = msgspec.structs.replace(request, namespace=user + request.namespace)
        if isinstance(request, StepRequest | OpenSequences):
            self._check_namespace_quota(client, request.namespace)
        if isinstance(request, StepRequest):
            return self._serve_step(client, request)
        if isinstance(request, Hello):
            return [(client, self._serve_hello(request))]
        if isinstance(request, StatsRequest):
            return [(client, self._serve_stats(request))]
        if isinstance(request, OverviewRequest):
            return [(client, Overview(request.round, self._settings, self.figures.as_dict()))]
        if isinstance(request, Drain):
            if key != self._owner:
                raise FrameError("only the key that was made with the service's own (client.key) may drain it")
            return self._serve_drain(client, request)
        assert isinstance(request, OpenSequences)
        return [] if self.lookup.open(client, request, user) else [(client, self._draining())]

    def _check_namespace_quota(self, client: Client, namespace: bytes) -> None:
        """A client that makes up namespaces would count as many tenants."""
        namespaces = self._tenants.step_counter(client).namespaces
        if namespace not in namespaces and len(namespaces) == _MAX_NAMESPACES:
            raise FrameError(f"a client has at most {_MAX_NAMESPACES} namespaces; connect anew for another one")
        namespaces.add(namespace)

    def _error_reply(self, client: Client, error: Exception) -> Answer:
        """The answer where serving failed by a fault of ours: it costs this client one answer, and nobody else."""
        self.faults.record(error, "a message is refused")
        self._waiting.remove(client)
        return (client, ErrorReply("the service failed on this message; see its log"))

    def _serve_hello(self, hello: Hello) -> Welcome:
        if hello.version != VERSION:
            raise FrameError(f"the client speaks version {hello.version}, this service {VERSION}; update the older one")
        info = self._info
        return Welcome(
            VERSION, hello.round, info.model[-256:], info.vocab_len, info.vocab_fingerprint, self._store.is_draining
        )

    def _serve_drain(self, client: Client, request: Drain) -> Iterator[Answer]:
        """Take new sequences, or none, from now on, and tell it to who asked and to everyone who could send some."""
        is_news = self._store.is_draining != request.is_on
        self._store.is_draining = request.is_on
        yield client, self._draining(request.round)
        if is_news:
            log.info("new sequences are %s from now on", "declined" if request.is_on else "taken")
            told = self._draining()
            yield from ((other, told) for other in self._tenants.clients)

    def _draining(self, round: int = 0) -> Draining:
        return Draining(round, self._store.is_draining, self._store.num_active(self._clock()))

    def _serve_stats(self, request: StatsRequest) -> StatsReply:
        sessions, stats = self._store.stats_of(request.namespace)
        cost = self._runner.cost.cost or StepCost(0.0)
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
            first_row_us=round(1e6 * cost.base_s),
            more_row_us=round(1e6 * cost.per_row_s),
            **self._store.undrafted.counts(request.namespace),
        )

    def _serve_step(self, client: Client, step: StepRequest) -> Iterator[Answer]:
        now_s = self._clock()
        self._tenants.record_step(step, now_s)
        self._drop_pending(client)
        self.counts.steps += 1
        step_counter = self._tenants.step_counter(client)
        step_counter.steps += 1
        step_counter.heard_s = now_s
        step_counter.num_ahead = 0
        pending = PendingStep(client=client, step=step, since_s=now_s, deadline_s=now_s + self._wait_s(step))
        self._waiting.add(pending)
        first, later = _split_by_urgency(step.rows)
        seen: dict[tuple[bytes, bytes], int] = {}
        for index in first:
            self._look_up(pending, index, step_counter, seen)
        is_held = bool(pending.waiting)
        answered_s = self._clock()
        if not is_held:
            answer = self._answer(pending, answered_s)
            if first:
                yield answer
        for index in later:
            try:
                self._look_up(pending, index, step_counter, seen)
            except Exception as error:  # the answer has gone out; the row is asked for again
                self.faults.record(error, "a row is not followed")
        self._observer.arrived(client, step, pending.sessions, now_s)
        if not is_held:
            self._note_answer(pending, answered_s)
        elif pending.deadline_s <= now_s:
            yield from self.answer_overdue()

    def _wait_s(self, step: StepRequest) -> float:
        return min(step.wait_ms / 1000, self._longest_wait_s)

    def _look_up(
        self, pending: PendingStep, index: int, step_counter: ClientActivity, seen: dict[tuple[bytes, bytes], int]
    ) -> None:
        """Bring the session of a row up to its verdict, and take what it has to submit.

        `seen` has the rows of the step that were looked up; one that is equal to one of them gets the same answer.
        """
        row = pending.step.rows[index]
        first = seen.setdefault((row.before, row.after), index)
        if first != index and row == pending.step.rows[first]:
            self._waiting.add_row(pending, index, pending.sessions[first], pending.proposals[first])
            return
        session = self.lookup.commit_row(pending.step.namespace, row)
        if session and self._waiting.waits_for(session):  # another client, for a round that may be over
            self._grown[session] = None
        self._waiting.add_row(pending, index, session, self._proposal(session, row) if session else None)
        if session:
            session.touch(step_counter)
            if session.is_draftable:
                self._runner.notify(session)

    def _proposal(self, session: DraftSession, row: StepRow) -> list[int] | None:
        """What to answer for a row; nothing if the target was told ahead."""
        if row.prefetched is not None:
            return self.faults.guard(session, session.mark_prefetched_used, row.prefetched)
        return self.faults.guard(session, session.propose)

    def _drop_pending(self, client: Client) -> None:
        """The client has gone on: nobody waits for its last step's drafts any more."""
        pending = self._waiting.remove(client)
        if pending is not None:
            self._note_answer(pending, min(self._clock(), pending.deadline_s))

    def _answers(self, done: Iterable[PendingStep]) -> list[Answer]:
        """The answers to these steps; rows that are not ready go with what there is."""
        answers: list[Answer] = []
        for pending in done:
            try:
                self._waiting.expire(pending)
                now_s = self._clock()
                answers.append(self._answer(pending, now_s))
                self._note_answer(pending, now_s)
            except Exception as error:
                answers.append(self._error_reply(pending.client, error))
        return answers

    def _answer(self, pending: PendingStep, now_s: float) -> Answer:
        self._waiting.remove(pending.client)
        self.counts.wait_s += now_s - pending.since_s
        self._tenants.record_reply(pending.step.namespace, now_s)
        probs = pending.probs if any(pending.probs) else []
        return (pending.client, DraftReply(pending.step.round, pending.proposals, probs))

    def _note_answer(self, pending: PendingStep, at_s: float) -> None:
        self._observer.answered(pending.client, pending.step, pending.since_s, at_s, pending.num_held)


def _split_by_urgency(rows: Sequence[StepRow]) -> tuple[list[int], list[int]]:
    """The rows that somebody waits for, and those that may be followed after the answer.

    What the target was told ahead it verifies already. But where a row that asks shares a sequence with such a row, the
    first of the two gets the session.
    """
    asked = {name for row in rows if row.prefetched is None for name in (row.before, row.after)}
    turns: tuple[list[int], list[int]] = [], []
    for index, row in enumerate(rows):
        turns[row.prefetched is not None and row.before not in asked].append(index)
    return turns


def _short(user: bytes) -> bytes:
    """A short name of a key; empty for none."""
    return hashlib.blake2b(user, digest_size=16).digest() if user else b""


def prefetch_messages(sessions: Iterable[DraftSession], faults: FaultGuard) -> Iterator[tuple[bytes, PrefetchPush]]:
    """Messages with what has changed for these sessions, each for the client whose verdict is awaited."""
    rows: dict[bytes, list[PrefetchRow]] = {}
    counters = {}
    for session in sessions:
        counter = session.step_counter
        if session.is_dropped or not session.is_draftable or counter.num_ahead >= _MOST:
            continue
        outcomes = faults.guard(session, session.prefetch)
        if outcomes:
            rows.setdefault(counter.client, []).append(PrefetchRow(session.key[1], outcomes))
            counters[counter.client] = counter
    for client, told in rows.items():
        for part in _parts(told):
            counters[client].num_ahead += 1
            yield client, PrefetchPush(part)


def _parts(rows: Sequence[PrefetchRow]) -> Iterator[list[PrefetchRow]]:
    """Rows that fit into one message, by number and by size."""
    part: list[PrefetchRow] = []
    size = 0
    for row in rows:
        row_size = sum(len(outcome.probs) for outcome in row.outcomes)
        if part and (len(part) == MAX_AHEAD or size + row_size > _MAX_PROBS):
            yield part
            part, size = [], 0
        part.append(row)
        size += row_size
    yield part
