"""Handle the requests of clients, and prefetch drafts: send them before the verdicts that they answer.

A reply never waits for the draft step that is running, unless a planner lets the target wait for its draft.

A prefetched draft saves the target the round trip. Drafts are sent for the likeliest next verdicts; if another verdict
comes, the client asks for a draft as usual.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from specbranch.core.planners import SettingError
from specbranch.core.round import Draft
from specbranch.engines.base import DraftEngine
from specbranch.logs import RateLimitedWarning
from specbranch.service.server.draft_runner import DraftRunner
from specbranch.service.server.draft_session import DraftSession
from specbranch.service.server.lookup import SessionLookup
from specbranch.service.server.pending import PendingReplies, PendingStep
from specbranch.service.server.prometheus import ServiceMetrics
from specbranch.service.server.recorder import EventSink
from specbranch.service.server.store import FaultGuard, SessionStore
from specbranch.service.server.tenants import ClientActivity
from specbranch.service.wire.messages import (
    MAX_AHEAD,
    MAX_REPLY,
    OLDEST_VERSION,
    VERSION,
    DraftReply,
    Drain,
    Draining,
    ErrorReply,
    FrameError,
    Hello,
    OpenSequences,
    OverviewRequest,
    PrefetchPush,
    PrefetchRow,
    Reply,
    Request,
    Rest,
    StatsRequest,
    StepRequest,
    StepRow,
    Welcome,
    common_version,
    decode_request,
)

log = logging.getLogger(__name__)

Client = bytes
Answer = tuple[Client, Reply]
_MAX_PROBS = MAX_REPLY // 2  # bytes of probabilities in a message
_MAX_PUSHES = 64  # to one client between two of its steps: more would not be in time for the verdict
_NO_DRAFT = Draft([])


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOptions:
    """The service's settings, the longest wait for a draft, and the key that may drain the service.

    To drain is to stop new sequences. `settings` has the values that the service was started with, for
    `OverviewRequest`. `owner` returns the public key that may drain the service, empty if the service uses no keys, or
    None if no client may.
    """

    settings: Mapping[str, str | int] = field(default_factory=dict)
    max_wait_s: float = 1.0
    owner: Callable[[], bytes | None] = lambda: b""


class RequestHandler:
    """Serves the messages of clients; returns replies and prefetched drafts to send. Only one thread calls it."""

    def __init__(
        self,
        engine: DraftEngine,
        store: SessionStore,
        runner: DraftRunner,
        observer: EventSink | None = None,
        clock: Callable[[], float] = time.monotonic,
        options: HandlerOptions | None = None,
    ) -> None:
        self._options = options or HandlerOptions()
        self._info = engine.info
        self._store = store
        self._runner = runner
        self._observer = observer
        self._clock = clock
        self._warn = RateLimitedWarning(log, clock)
        self._grown: dict[DraftSession, None] = {}  # sessions with new distributions since the last `answer_ready`
        self._unpushed: dict[DraftSession, None] = {}  # those with new distributions since the last `push_prefetched`
        self.faults = FaultGuard(store)
        self.lookup = SessionLookup(engine, store, runner, faults=self.faults, observer=observer, clock=clock)
        self.counts = self.lookup.counts
        self._waiting = PendingReplies(self.faults, runner.notify)
        self.metrics = ServiceMetrics(
            store,
            (runner.counts, self.counts),
            (runner.faults, self.faults),
            runner.cost,
            self._options.settings,
            clock,
        )
        self._serve_by_type: dict[type[Request], Callable[[Client, Any, bytes], Iterable[Answer]]] = {
            StepRequest: self._serve_step,
            OpenSequences: self._serve_open,
            Hello: self._serve_hello,
            Drain: self._serve_drain,
            Rest: self._serve_rest,
            StatsRequest: lambda client, request, _: [(client, self.metrics.stats_reply(request))],
            OverviewRequest: lambda client, request, _: [(client, self.metrics.overview(request))],
        }

    def handle(self, client: Client, frames: Sequence[bytes], user: bytes = b"") -> Iterator[Answer]:
        """Serve one message and yield the answers to send, an `ErrorReply` if it cannot be served. Never raise.

        A refused message is counted and logged. Send each answer as soon as it is yielded: work that no client waits
        for comes after it. `user` is the public key that the client has proved to hold; its namespaces are then
        separate from those of other keys.
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
        """Return when `answer_overdue` must be called at the latest; None if no reply is held back."""
        return self._waiting.next_deadline_s()

    def answer_ready(self) -> list[Answer]:
        """Return the replies that were held back and are complete now. Call after draft steps."""
        self._take_grown()
        grown, self._grown = self._grown, {}
        return self._expired(self._waiting.completed(grown))

    def answer_overdue(self) -> list[Answer]:
        """Return the replies whose deadline has passed; rows that still wait get the draft that can be submitted."""
        overdue = self._waiting.overdue(self._clock())
        self.counts.overdue += len(overdue)
        return self._expired(overdue) if overdue else []

    def push_prefetched(self) -> list[Answer]:
        """Return messages with prefetched drafts, those for the likeliest next verdicts, where they have changed.

        The drafts then count as sent. Call this after draft steps.
        """
        self._take_grown()
        unpushed, self._unpushed = self._unpushed, {}
        return list(prefetch_messages(unpushed, self.faults))

    def _take_grown(self) -> None:
        grown = dict.fromkeys(self._runner.pop_updated())
        self._grown |= grown
        self._unpushed |= grown

    def _serve(self, client: Client, frames: Sequence[bytes], user: bytes) -> Iterable[Answer]:
        if len(frames) != 1:
            raise FrameError(f"a message has one frame, this one has {len(frames)}; update the client")
        request = decode_request(frames[0])
        if user and isinstance(request, StepRequest | OpenSequences | Rest | StatsRequest):
            request = msgspec.structs.replace(request, namespace=_user_name(user) + request.namespace)
        return self._serve_by_type[type(request)](client, request, user)

    def _error_reply(self, client: Client, error: Exception) -> Answer:
        """Record an internal error, drop the step for which this client awaits a reply, and return the error reply."""
        self.faults.record(error, "a message is refused")
        self._waiting.remove(client)
        return (client, ErrorReply("the service failed on this message; see its log"))

    def _serve_hello(self, client: Client, hello: Hello, _: bytes) -> Iterable[Answer]:
        version = common_version(hello)
        if version is None:
            raise FrameError(
                f"the client speaks version {hello.version}, this service {VERSION} and {OLDEST_VERSION}; "
                "update the older one"
            )
        self.lookup.tenants.greet(client, version)
        info, is_draining = self._info, self._store.is_draining
        name, fingerprint = info.model[-256:], info.vocab_fingerprint
        return [(client, Welcome(version, hello.round, name, info.vocab_len, fingerprint, is_draining))]

    def _serve_open(self, client: Client, request: OpenSequences, user: bytes) -> Iterable[Answer]:
        activity = self.lookup.tenants.client_in(client, request.namespace)
        is_accepted = self.lookup.open(activity, request, _user_name(user) if user else b"")
        return [] if is_accepted else [(client, self._draining())]

    def _serve_drain(self, client: Client, request: Drain, user: bytes) -> Iterator[Answer]:
        """Start or stop accepting new sequences; yield the reply and, if that is a change, a message to every client.

        Raise `FrameError` if the client does not have the owner's key.
        """
        if user != self._options.owner():
            raise FrameError("only the key that was made with the service's own (client.key) may drain it")
        is_change = self._store.is_draining != request.is_on
        self._store.is_draining = request.is_on
        yield client, self._draining(request.round)
        if is_change:
            log.info("the service %s new sequences from now on", "declines" if request.is_on else "accepts")
            state = self._draining()
            yield from ((other, state) for other in self.lookup.tenants.clients)

    def _serve_rest(self, client: Client, request: Rest, _: bytes) -> Iterable[Answer]:
        """Stop drafting for the client until its next step; a reply that it awaited is not sent."""
        self.lookup.tenants.client_in(client, request.namespace).is_resting = True
        self._waiting.remove(client)
        return []

    def _draining(self, round: int = 0) -> Draining:
        return Draining(round, self._store.is_draining, self._store.num_active(self._clock()))

    def _serve_step(self, client: Client, step: StepRequest, _: bytes) -> Iterator[Answer]:
        """Commit the verdicts of a step, and yield its reply if there is one to send now.

        There is none if no row asks for a draft, or if the reply is held back until drafts are ready. Rows whose drafts
        the target has prefetched do not affect the reply; where possible, they are committed after it.
        """
        now_s = self._clock()
        activity = self.lookup.tenants.client_in(client, step.namespace)
        self.lookup.tenants.record_step(step, now_s)
        abandoned = self._waiting.remove(client)
        if abandoned is not None:
            self._trace_reply(abandoned, min(now_s, abandoned.deadline_s))
        self.counts.steps += 1
        activity.begin_step(now_s)
        asking, prefetched = _split_by_urgency(step.rows)
        served = _ServedRows(step, activity)
        pending = self._serve_asking(served, asking, now_s) if asking else None
        replied_s = self._clock()
        held = pending if pending is not None and pending.waiting else None
        if pending is None:
            self.lookup.tenants.record_reply(step.namespace, replied_s)
        elif held is None:
            yield self._reply(pending, replied_s)
        for index in prefetched:
            try:
                self._serve_row(served, index)
            except Exception as error:  # the reply has left; the client asks for this row again
                self.faults.record(error, "a row is not followed")
        if self._observer is not None:
            self._observer.arrived(client, step, served.sessions, now_s)
            if held is None:
                self._observer.answered(client, step, now_s, replied_s, 0)
        if held is not None and held.deadline_s <= now_s:
            yield from self.answer_overdue()

    def _serve_asking(self, served: _ServedRows, rows: Sequence[int], now_s: float) -> PendingStep:
        """Commit the verdicts of `rows`, the rows that ask for a draft, and return a pending step with their drafts.

        The caller must hold the reply back while a row still waits for its draft.
        """
        step = served.step
        pending = PendingStep(
            client=served.client.client,
            step=step,
            since_s=now_s,
            deadline_s=now_s + min(step.wait_ms / 1000, self._options.max_wait_s),
            sessions=served.sessions,
        )
        self._waiting.add(pending)
        for index in rows:
            self._waiting.add_row(pending, index, *self._serve_row(served, index))
        return pending

    def _serve_row(self, served: _ServedRows, index: int) -> tuple[DraftSession | None, Draft | None]:
        """Commit the verdict of a row, and return its session and its draft.

        The session is None if the sequence is unknown; the draft is None if it is not ready. A row that equals an
        earlier row of the step gets the same session and draft. A row with a prefetched draft gets an empty draft.
        """
        row = served.step.rows[index]
        first = served.by_name.setdefault((row.before, row.after), index)
        if first != index and row == served.step.rows[first]:
            served.sessions[index], served.drafts[index] = served.sessions[first], served.drafts[first]
            return served.sessions[index], served.drafts[index]
        session = self.lookup.commit_row(served.step.namespace, row)
        if session is None:
            return None, None
        if self._waiting.waits_for(session):  # another client waits for it, in a round that may be over
            self._grown[session] = None
        draft: Draft | None = None
        with self.faults.guard(session):
            if row.prefetched is None:
                draft = session.propose()
            else:
                session.mark_submitted(row.prefetched)
                draft = _NO_DRAFT
        served.sessions[index], served.drafts[index] = session, draft
        session.touch(served.client)
        if session.is_draftable:
            self._runner.notify(session)
        return session, draft

    def _expired(self, done: Iterable[PendingStep]) -> list[Answer]:
        """Return the replies to these steps; rows that still wait get the draft that can be submitted now."""
        answers: list[Answer] = []
        for pending in done:
            try:
                self._waiting.expire(pending)
                now_s = self._clock()
                answers.append(self._reply(pending, now_s))
                self._trace_reply(pending, now_s)
            except Exception as error:
                answers.append(self._error_reply(pending.client, error))
        return answers

    def _reply(self, pending: PendingStep, now_s: float) -> Answer:
        self._waiting.remove(pending.client)
        self.counts.wait_s += now_s - pending.since_s
        self.lookup.tenants.record_reply(pending.step.namespace, now_s)
        probs = pending.probs if any(pending.probs) else []
        undraftable = [index for index, one in enumerate(pending.sessions) if one is not None and not one.is_draftable]
        return (pending.client, DraftReply(pending.step.round, pending.proposals, probs, undraftable))

    def _trace_reply(self, pending: PendingStep, at_s: float) -> None:
        if self._observer is not None:
            self._observer.answered(pending.client, pending.step, pending.since_s, at_s, pending.num_held)


class _ServedRows:
    """The sessions and drafts of those rows of one step that were served so far; None for the other rows."""

    def __init__(self, step: StepRequest, client: ClientActivity) -> None:
        self.step = step
        self.client = client
        self.sessions: list[DraftSession | None] = [None] * len(step.rows)
        self.drafts: list[Draft | None] = [None] * len(step.rows)
        self.by_name: dict[tuple[bytes, bytes], int] = {}  # digests before and after the verdict: the first such row


def _split_by_urgency(rows: Sequence[StepRow]) -> tuple[list[int], list[int]]:
    """Return the indices of the rows to serve before the reply, and of those to serve after it.

    A target verifies its prefetched drafts already, so rows with a prefetched draft can wait. But where such a row
    shares a sequence with a row that asks for a draft, both are served before the reply, in their order: the first of
    the two gets the session.
    """
    asked = {name for row in rows if row.prefetched is None for name in (row.before, row.after)}
    parts: tuple[list[int], list[int]] = [], []
    for index, row in enumerate(rows):
        parts[row.prefetched is not None and row.before not in asked].append(index)
    return parts


def _user_name(key: bytes) -> bytes:
    """Return a short name of a public key, its hash of 16 bytes."""
    return hashlib.blake2b(key, digest_size=16).digest()


def prefetch_messages(sessions: Iterable[DraftSession], faults: FaultGuard) -> Iterator[tuple[bytes, PrefetchPush]]:
    """Yield pairs of a client and a message for it: the changed drafts of the `sessions` whose sequences it decodes.

    The drafts then count as sent. A session that fails is dropped through `faults`.
    """
    rows: dict[ClientActivity, list[PrefetchRow]] = {}
    for session in sessions:
        if session.is_dropped or not session.is_draftable or session.client.num_pushes >= _MAX_PUSHES:
            continue
        outcomes = None
        with faults.guard(session):
            outcomes = session.prefetch()
        if outcomes:
            rows.setdefault(session.client, []).append(PrefetchRow(session.key[1], outcomes))
    for client, changed in rows.items():
        for part in _split_by_size(changed):
            client.num_pushes += 1
            yield client.client, PrefetchPush(part)


def _split_by_size(rows: Sequence[PrefetchRow]) -> Iterator[list[PrefetchRow]]:
    """Yield the rows in parts that fit into one message each, by number and by bytes."""
    part: list[PrefetchRow] = []
    size = 0
    for row in rows:
        row_size = sum([len(outcome.probs) for outcome in row.outcomes])
        if part and (len(part) == MAX_AHEAD or size + row_size > _MAX_PROBS):
            yield part
            part, size = [], 0
        part.append(row)
        size += row_size
    yield part
