"""Lookups: a verdict comes in, a proposal goes out, without waiting for the draft step that is under way.

No socket and no thread here: frames in, frames out. A planner may let a target wait; such an answer is held back until
the draft is long enough or the client's time is up, whichever is first.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from specbranch.core.costs import Costs, StepCost
from specbranch.core.draw import TopDraw
from specbranch.core.planners import SettingError, make_planner
from specbranch.core.planners.none import NonePlanner
from specbranch.core.planners.protocol import Planner, Predictor
from specbranch.core.round import Outlook, Signal
from specbranch.core.session import Session
from specbranch.engines.binding import Binding
from specbranch.engines.protocol import DraftEngine
from specbranch.predictor.fixed import CONSTANTS
from specbranch.predictor.told import ToldPredictor
from specbranch.service.compute import Compute
from specbranch.service.digest import Digest
from specbranch.service.faults import Faults
from specbranch.service.recorder import Note, Recorder
from specbranch.service.sessions import DraftSession, SessionStore, StepCounter
from specbranch.service.timeline import RowVerdict, TimelineRecorder
from specbranch.service.wire import (
    VERSION,
    Figures,
    FrameError,
    Hello,
    Open,
    Proposals,
    Refused,
    Reply,
    Report,
    Step,
    StepRow,
    Welcome,
    WireOutlook,
    decode_request,
    unpack,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
Client = bytes
Answer = tuple[Client, Reply]
_PREDICTORS: dict[str, Predictor] = {**CONSTANTS, "hrad": ToldPredictor()}
_MAX_NAMESPACES = 1024
# No target waits for a draft that has so many tokens yet to read: there are none to come for a while.
_FAR_BEHIND = 32
# A pause longer than this between two steps is a client at rest, not a target's step.
_LONGEST_STEP_S = 10.0


@dataclass(slots=True)
class LookupCounts:
    """What the lookup thread did."""

    steps: int = 0
    lookups: int = 0
    unknown: int = 0
    opened: int = 0
    undraftable: int = 0
    refused: int = 0
    overdue: int = 0
    outlooks: int = 0  # verdicts that came with one
    wait_s: float = 0.0


@dataclass(slots=True)
class _Tenant:
    """What is known of one namespace: how long its target's steps take."""

    costs: Costs
    answered_s: float | None = None


@dataclass(slots=True)
class _Pending:
    """A step whose answer waits for drafts."""

    client: Client
    step: Step
    sessions: list[DraftSession | None]
    proposals: list[list[int] | None]
    since_s: float
    deadline_s: float
    waiting: set[int] = field(default_factory=set)
    num_held: int = 0  # rows that were not ready at once


class Lookup:
    """Answers clients. Called by one thread only."""

    def __init__(
        self,
        engine: DraftEngine,
        store: SessionStore,
        compute: Compute,
        clock: Callable[[], float] = time.monotonic,
        timeline: TimelineRecorder | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._timeline = timeline
        self._recorder = recorder
        self._engine = engine
        self._info = engine.info
        self._store = store
        self._compute = compute
        self._clock = clock
        self._start_s = clock()
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()
        self._step_counters: OrderedDict[Client, StepCounter] = OrderedDict()
        self._pending: dict[Client, _Pending] = {}
        self.faults = Faults(store)
        self.counts = LookupCounts()

    def handle(self, client: Client, frames: Sequence[bytes]) -> list[Answer]:
        """Serve one message. What cannot be served is refused, counted and logged; it never raises."""
        try:
            return self._serve(client, frames)
        except (FrameError, SettingError) as error:
            self.counts.refused += 1
            log.warning("refused a message: %s", repr(str(error))[:200])
            return [(client, Refused(str(error)[:500]))]
        except Exception as error:
            return [self._refuse(client, error)]

    def next_deadline_s(self) -> float | None:
        """When `answer_overdue` must be called at the latest."""
        return min((pending.deadline_s for pending in self._pending.values()), default=None)

    def answer_ready(self) -> list[Answer]:
        """Answers that were held back and are complete now; asked after draft steps."""
        return self._answers(self._is_ready)

    def answer_overdue(self) -> list[Answer]:
        """Answers whose time is up: rows that are not ready go without a draft."""
        return self._answers(self._is_overdue)

    def _serve(self, client: Client, frames: Sequence[bytes]) -> list[Answer]:
        if len(frames) != 1:
            raise FrameError(f"a message of {len(frames)} frames; one is taken")
        request = decode_request(frames[0])
        if isinstance(request, Step):
            return self._serve_step(client, request)
        if isinstance(request, Hello):
            return [(client, self._serve_hello(request))]
        if isinstance(request, Report):
            return [(client, self._serve_report(request))]
        self._serve_open(client, request)
        return []

    def _refuse(self, client: Client, error: Exception) -> Answer:
        """The answer where serving met a fault of ours: it costs this client one answer, and nobody else anything."""
        self.faults.note(error, "a message is refused")
        self._release(client)
        return (client, Refused("the service failed on this message; see its log"))

    def _serve_hello(self, hello: Hello) -> Welcome:
        if hello.version != VERSION:
            raise FrameError(f"the client speaks version {hello.version}, this service {VERSION}; update the older one")
        return Welcome(VERSION, hello.round, self._info.model, self._info.vocab_len)

    def _serve_report(self, report: Report) -> Figures:
        sessions, stats = self._store.stats_of(report.namespace)
        cost = self._compute.cost.cost or StepCost(0.0)
        return Figures(
            report.round,
            sessions,
            stats.rounds,
            stats.hits,
            stats.submitted,
            stats.accepted,
            stats.rows,
            stats.rejected,
            stats.unused,
            stats.cut,
            round(1e6 * cost.first_s),
            round(1e6 * cost.more_s),
        )

    def _serve_open(self, client: Client, request: Open) -> None:
        if request.predictor not in _PREDICTORS:
            raise SettingError(f"no predictor is called {request.predictor!r}; choose from {', '.join(_PREDICTORS)}")
        for tokens in map(unpack, request.sequences):
            planner = make_planner(request.planner, request.settings, _PREDICTORS[request.predictor])
            # Rows with equal sequences ask for it once each; what is drafted already stays.
            if self._store.find((request.namespace, Digest(tokens).name)) is None:
                self._put(request.namespace, tokens.tolist(), planner).hear(self._step_counter(client))
                self.counts.opened += 1
        if self._timeline is not None:
            num_tokens = sum(len(unpack(packed)) for packed in request.sequences)
            lane = (client, request.namespace)
            self._timeline.open(lane, self._clock(), request.planner, len(request.sequences), num_tokens)

    def _put(self, namespace: bytes, tokens: Sequence[int], planner: Planner) -> DraftSession:
        is_undraftable = not self._can_draft(tokens, len(tokens))
        if is_undraftable:
            planner = NonePlanner()
            self.counts.undraftable += 1
        core = Session(tokens, planner, TopDraw(), self._tenant(namespace).costs)
        session = DraftSession(namespace, core, Binding(self._engine), is_undraftable)
        self._store.put(session)
        # The target goes on without a draft; prefill and preparing for its verdict begin at once.
        core.stand_aside()
        self._compute.tell(session)
        return session

    def _can_draft(self, tokens: Sequence[int], length: int) -> bool:
        """Whether the draft model knows these tokens, and its cache can hold the sequence with some room to draft."""
        return max(tokens) < self._info.vocab_len and length + 64 <= self._info.max_tokens

    def _serve_step(self, client: Client, step: Step) -> list[Answer]:
        now_s = self._clock()
        self._observe_target(step.namespace, now_s)
        self._drop_pending(client)
        self.counts.steps += 1
        step_counter = self._step_counter(client)
        step_counter.steps += 1
        pending = self._pending[client] = _Pending(client, step, [], [], now_s, now_s + step.wait_ms / 1000)
        for index, row in enumerate(step.rows):
            session = self._draft_of(step.namespace, row)
            proposal = self.faults.contain(session, self._propose, session) if session else None
            if session and proposal is None:
                session.is_awaited = True  # before the look: the compute thread tells of what it forgets from now on
                if not session.is_forgotten:
                    pending.waiting.add(index)
            pending.sessions.append(session)
            pending.proposals.append(proposal)
            if session:
                session.hear(step_counter)
                self._compute.tell(session)
        pending.num_held = len(pending.waiting)
        if self._timeline is not None:
            verdicts = [_row_verdict(row, session) for row, session in zip(step.rows, pending.sessions, strict=True)]
            self._timeline.arrive((client, step.namespace), now_s, verdicts)
        if not pending.waiting:
            return [self._answer(pending)]
        return self.answer_overdue() if pending.deadline_s <= now_s else []

    def _drop_pending(self, client: Client) -> None:
        """The client has gone on: nobody waits for its last step's drafts any more."""
        pending = self._release(client)
        if pending is not None:
            self._note_answer(pending, min(self._clock(), pending.deadline_s))

    def _release(self, client: Client) -> _Pending | None:
        """Let nobody wait for this client's step any more."""
        pending = self._pending.pop(client, None)
        for session in pending.sessions if pending else ():
            if session is not None:
                session.is_awaited = False
        return pending

    def _draft_of(self, namespace: bytes, row: StepRow) -> DraftSession | None:
        """The draft of a row, brought up to the row's sequence; None if the sequence is not known."""
        self.counts.lookups += 1
        # An equal sequence may have come this far already: two requests then share one draft.
        session = self._store.find((namespace, row.after))
        if session is not None:
            return session
        session = self._store.find((namespace, row.before))
        if session is not None and not session.is_undraftable:
            length = len(session.core.tokens) + len(row.tokens)
            if not self._can_draft(row.tokens, length):
                # No drafts from now on. The compute thread, which works on the old session, never sees the new tokens.
                self._store.forget(session)
                return self._put(namespace, [*session.core.tokens, *row.tokens], NonePlanner())
        if session is None or not self.faults.contain(session, self._follow, session, row):
            self.counts.unknown += 1
            return None
        self.counts.outlooks += row.outlook is not None
        return session

    def _follow(self, session: DraftSession, row: StepRow) -> bool:
        """Let a draft take in a row's verdict; False if it was forgotten meanwhile."""
        outlook = _outlook(row.outlook)
        if self._recorder is None or session.is_undraftable:
            return self._store.follow(session, row.tokens, row.num_submitted, outlook)
        core = session.core
        with session.lock:
            distributions = core.tree.distributions(row.tokens)
        prompt = list(core.tokens) if len(core.tokens) == core.prompt_len else []
        is_known = self._store.follow(session, row.tokens, row.num_submitted, outlook)
        at_s, is_hit = self._clock() - self._start_s, core.round.is_hit
        self._recorder.note(Note(session.number, at_s, prompt, row.tokens, distributions, row.num_submitted, is_hit))
        return is_known

    def _propose(self, session: DraftSession) -> list[int] | None:
        """What there is to submit; None if the target should wait for it."""
        with session.lock:
            core = session.core
            proposal = core.propose()
            if proposal is None and session.binding.num_unread(core.tree) > _FAR_BEHIND:
                session.is_behind = True
                core.stand_aside()
                proposal = core.propose()
            return proposal

    def _is_ready(self, pending: _Pending) -> bool:
        for index in list(pending.waiting):
            session = pending.sessions[index]
            assert session is not None, "only drafts wait"
            proposal = None if session.is_forgotten else self.faults.contain(session, self._propose, session)
            if session.is_forgotten:
                self._give_up(pending, index)
            elif proposal is not None:
                pending.proposals[index] = proposal
                pending.waiting.discard(index)
                session.is_awaited = False
        return not pending.waiting

    def _is_overdue(self, pending: _Pending) -> bool:
        if self._clock() < pending.deadline_s:
            return False
        self.counts.overdue += 1
        for index in list(pending.waiting):
            self._give_up(pending, index)
        return True

    def _give_up(self, pending: _Pending, index: int) -> None:
        session = pending.sessions[index]
        assert session is not None, "only drafts wait"
        pending.proposals[index] = self.faults.contain(session, self._propose_now, session)
        session.is_awaited = False
        pending.waiting.discard(index)
        self._compute.tell(session)

    def _propose_now(self, session: DraftSession) -> list[int] | None:
        with session.lock:
            session.core.stand_aside()
            return session.core.propose()

    def _answers(self, is_done: Callable[[_Pending], bool]) -> list[Answer]:
        answers: list[Answer] = []
        for pending in list(self._pending.values()):
            try:
                if is_done(pending):
                    answers.append(self._answer(pending))
            except Exception as error:
                answers.append(self._refuse(pending.client, error))
        return answers

    def _answer(self, pending: _Pending) -> Answer:
        now_s = self._clock()
        self._pending.pop(pending.client, None)
        self.counts.wait_s += now_s - pending.since_s
        self._tenant(pending.step.namespace).answered_s = now_s
        self._note_answer(pending, now_s)
        return (pending.client, Proposals(pending.step.round, pending.proposals))

    def _note_answer(self, pending: _Pending, at_s: float) -> None:
        if self._timeline is not None:
            lane = (pending.client, pending.step.namespace)
            self._timeline.answer(lane, pending.since_s, at_s, pending.num_held)

    def _observe_target(self, namespace: bytes, now_s: float) -> None:
        tenant = self._tenant(namespace)
        if tenant.answered_s is not None and now_s - tenant.answered_s < _LONGEST_STEP_S:
            tenant.costs.target.observe(1, now_s - tenant.answered_s)

    def _step_counter(self, client: Client) -> StepCounter:
        return _kept(self._step_counters, client, StepCounter)

    def _tenant(self, namespace: bytes) -> _Tenant:
        return _kept(self._tenants, namespace, lambda: _Tenant(Costs(draft=self._compute.cost)))


def _kept(store: OrderedDict[bytes, T], key: bytes, make: Callable[[], T]) -> T:
    """What a bounded store holds for a key, made if need be; the least recently asked for makes way."""
    found = store.get(key)
    if found is None:
        found = store[key] = make()
        if len(store) > _MAX_NAMESPACES:
            store.popitem(last=False)
    store.move_to_end(key)
    return found


def _outlook(told: WireOutlook | None) -> Outlook | None:
    return None if told is None else Outlook(Signal(told.signal))


def _row_verdict(row: StepRow, session: DraftSession | None) -> RowVerdict:
    is_hit = None if session is None or session.is_undraftable else session.core.round.is_hit
    return RowVerdict(row.num_submitted, len(row.tokens), session is not None, is_hit)
