"""The draft thread: plan, run one batched step, put the distributions into the trees, look for news, again.

It alone touches the engine. Rows of all sessions compete for a step: first those that a target waits for, then by how
likely the draft thinks it that their sequence comes true. Prefill goes a piece at a time, and no more than one piece's
worth of tokens in a step, so that sessions which already draft go on meanwhile.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specbranch.core.costs import StepCost, StepTimeModel
from specbranch.core.distribution import Distribution
from specbranch.core.node import Node
from specbranch.core.scheduler import MIN_PREFILL_CHUNK, RowRequest, request_rows, select_rows
from specbranch.engines.base import DraftEngine
from specbranch.engines.tree_cache import EngineRow
from specbranch.errors import EngineError, EngineFull
from specbranch.service.server.batch import RunnableSessions, TenantActivity
from specbranch.service.server.draft_session import DraftSession, State
from specbranch.service.server.fair_queue import DecayedUsage
from specbranch.service.server.recorder import EventSink
from specbranch.service.server.store import FaultGuard, SessionStore

_READ_HALF_LIFE_S = 10.0
_PACE = 0.1  # of following the times of prefill and of planning
_MIN_PLANNED = 4  # sessions, however long planning takes
_ANNOUNCED = 4  # beside sessions that are decoded, those that were only announced get one in so many places
_PLANNING_S = 0.004  # for such texts at a time
_PAUSE, _MAX_PAUSE_S = 16, 0.25  # after which none are planned for so many times as long
_MAX_FAILURES = 8  # turns in a row in which the engine ran nothing: it is lost then


@dataclass(slots=True)
class DraftRunnerCounts:
    """What the draft thread did."""

    steps: int = 0
    rows: int = 0
    waiting_rows: int = 0  # that the plan of the last step had no room for
    step_s: float = 0.0
    failed_steps: int = 0
    cleared: int = 0  # sessions at rest whose part of the cache was needed
    borrowed_tokens: int = 0  # that were not prefilled because another session's cache held them


class DraftRunner:
    """Runs on its own thread from `start` to `stop`. `notify` is called after every step."""

    def __init__(
        self,
        engine: DraftEngine,
        store: SessionStore,
        notify: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        observer: EventSink | None = None,
        prefill_chunk: int = 128,
    ) -> None:
        self._piece_len = prefill_chunk
        self._observer = observer or EventSink()
        self._engine = engine
        self._store = store
        self._notify = notify
        self._clock = clock
        self._news: queue.SimpleQueue[DraftSession | None] = queue.SimpleQueue()
        self._busy = RunnableSessions()
        self._grown: queue.SimpleQueue[DraftSession] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="draft", daemon=True)
        self._read = DecayedUsage(_READ_HALF_LIFE_S)  # tokens, by tenant
        self._read_s = 0.0  # of one token in prefill, smoothed
        self._plan_s = 0.0  # of all but the engine, for one session or one row in a step, smoothed
        self._heard: dict[bytes, TenantActivity] = {}  # by tenant
        self._is_shared = False  # by several tenants
        self._others_at_s = 0.0  # when there is time again for texts that nobody is known to decode
        self._may_pause = False  # nothing else is to be done until then
        self._num_failures = 0  # turns since the engine last worked
        self.faults = FaultGuard(store)
        self.cost = StepTimeModel()
        self.counts = DraftRunnerCounts()

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End after the step under way; False if that takes longer than it may."""
        self._is_stopping = True
        self._news.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; it ends by itself only if it dies, or if the engine is lost."""
        return self._thread.is_alive()

    def notify(self, session: DraftSession) -> None:
        """There may be work for this draft. Called by the lookup thread."""
        self._news.put(session)

    def pop_updated(self) -> list[DraftSession]:
        """Drafts that have grown since the last call. Called by the lookup thread."""
        grown: dict[DraftSession, None] = {}
        while not self._grown.empty():
            grown[self._grown.get()] = None
        return list(grown)

    def run_once(self) -> bool:
        """One turn of the loop, contained: a fault of no session that could be named costs all of them.

        False if there was nothing to do.
        """
        try:
            return self.run_step()
        except Exception as error:
            self.faults.record(error, "all sessions are forgotten")
            self._drop_all()
            return True

    def run_step(self) -> bool:
        """Look for news, plan, run one step; False if there was nothing to do."""
        self._take_news()
        self._close_dropped()
        self._evict_idle_kv()
        start_s, engine_s = self._clock(), self.counts.step_s
        sessions, others = self._select_sessions()
        feeds = self._plan(sessions, others)
        if not feeds:
            return False
        self._num_failures += 1  # unless it works
        if not self._step(feeds):
            return True
        overhead_s = self._clock() - start_s - (self.counts.step_s - engine_s)
        plan_s = overhead_s / (len(sessions) + len(others) + sum(len(feed.nodes) for _, feed in feeds))
        self._plan_s += _PACE * (plan_s - self._plan_s)
        return True

    @property
    def engine_failed(self) -> bool:
        """Whether nothing could be run for so many turns that no further one will succeed."""
        return self._num_failures >= _MAX_FAILURES

    def _run(self) -> None:
        while not self._is_stopping and not self.engine_failed:
            if not self.run_once():
                self._wait_for_news()

    def _wait_for_news(self) -> None:
        # The end is looked at again: the turn before may have taken the last news, with which `stop` wakes this thread.
        if self._is_stopping:
            return
        pause_s = self._others_at_s - self._clock()
        with contextlib.suppress(queue.Empty):
            if not self._busy:
                self._record_activity(self._news.get())
            elif self._may_pause and pause_s > 0:
                self._record_activity(self._news.get(timeout=pause_s))

    def _take_news(self) -> None:
        while not self._news.empty():
            self._record_activity(self._news.get())

    def _record_activity(self, session: DraftSession | None) -> None:
        if session is not None:
            self._busy.add(session)
            self._heard.setdefault(session.tenant, TenantActivity()).record(self._clock())

    def _present(self) -> set[bytes]:
        """The tenants that were heard of lately, whether there is something to draft for them now or not."""
        now_s = self._clock()
        gone = [tenant for tenant, heard in self._heard.items() if not heard.is_present(now_s)]
        for tenant in gone:
            del self._heard[tenant]
        return set(self._heard)

    def _close_dropped(self) -> None:
        for session in self._store.pop_dropped():
            self._busy.discard(session)
            self.faults.guard(session, self._close, session)
            self._notify()  # a target may wait for it

    def _close(self, session: DraftSession) -> None:
        with session.lock:
            session.tree_cache.close()

    def _evict_idle_kv(self) -> None:
        """Let go of what sessions at rest hold in the cache, the oldest first, where it slows down the others.

        Their sequences stay: one that goes on after all is prefilled again.
        """
        limit = self._engine.info.idle_cache_tokens
        if limit >= self._engine.info.max_tokens or self._engine.num_tokens <= limit:
            return
        resting = [session for session in self._store.snapshot() if session.is_idle and session.tree_cache.num_handles]
        num_tokens = sum(len(session.core.tokens) for session in resting)
        for session in resting:
            if num_tokens <= limit:
                return
            num_tokens -= len(session.core.tokens)
            self.faults.guard(session, self._close, session)
            self.counts.cleared += 1

    def _select_sessions(self) -> tuple[list[DraftSession], list[DraftSession]]:
        """The sessions to plan for. Where there are several tenants, as many as at most double the time of a step.

        Those that targets wait for go first, then those that they decode; a first session of every tenant before a
        second one of any. Beside them, the second list: texts that were only announced, and those of tenants that were
        not heard of lately. They have few places, and little time. Who is in neither list comes in a later step.
        """
        cost, present = self.cost.cost, self._present()
        self._is_shared = len(present | self._busy.tenants) > 1
        self._may_pause = False
        if not self._is_shared or cost is None or self._plan_s <= 0:
            return list(self._busy), []
        most = max(_MIN_PLANNED, int(cost.base_s / (self._plan_s + cost.per_row_s)))
        most_others = max(1, most // _ANNOUNCED)
        if len(self._busy) <= most:
            most = most_others = len(self._busy)
        taken = self._busy.select(most, most_others if self._clock() >= self._others_at_s else 0, present)
        self._may_pause = not any(taken)
        return taken

    def _plan(
        self, sessions: Sequence[DraftSession], others: Sequence[DraftSession]
    ) -> list[tuple[DraftSession, EngineRow]]:
        contain = self.faults.guard
        now_s = self._clock()  # once: of a tenant's sessions none has read less than another
        requests = [request for session in sessions if (request := contain(session, self._row_request, session, now_s))]
        start_s = end_s = self._clock()
        for session in others:
            if end_s - start_s < _PLANNING_S and (request := contain(session, self._row_request, session, now_s)):
                requests.append(request)
            end_s = self._clock()
        if others:
            self._others_at_s = end_s + min(_PAUSE * (end_s - start_s), _MAX_PAUSE_S)
        plan = select_rows(requests, self._engine.info.row_limit, self._piece_len, self._step_cost(), self._is_shared)
        self.counts.waiting_rows = sum(len(request.nodes) for request in requests) - sum(
            len(w.granted) for w in plan.requests
        )
        for request in plan.requests:  # before any feed: what is fed is not yet in the engine's cache
            self._adopt_prefix(request.session)
        fed = [
            (request.session, contain(request.session, self._engine_rows, request, plan.prefill_chunk) or ())
            for request in plan.requests
        ]
        feeds = [(session, feed) for session, own in fed for feed in own]
        without_room = [
            request.session for request in plan.requests if request.granted and not request.session.is_dropped
        ]
        if without_room and not feeds:
            self._make_room(without_room)
        return feeds

    def _row_request(self, session: DraftSession, now_s: float) -> RowRequest[DraftSession] | None:
        with session.lock:
            core, num_unread = session.core, session.num_unprefilled
            nodes = () if session.is_dropped else core.rows()
            if not nodes and session.state is State.PREFILLING and num_unread > 1:
                nodes = (core.tree.root,)  # its planner drafts only while a target waits, and none will until then
            is_left_out = session.is_idle or (session.is_paused and not session.is_target_waiting)
            if not nodes or session.is_dropped or is_left_out:
                self._busy.discard(session)
                return None
            self._busy.add(session)  # a target that has waited for it may have gone on
            if self._is_about_to_borrow(session):
                return None
            num_read = self._read.get(session.tenant, now_s)
            return request_rows(
                session, core.round, nodes, session.is_target_waiting, num_unread, session.tenant, num_read
            )

    def _step_cost(self) -> StepCost | None:
        cost = self.cost.cost
        return (
            None
            if cost is None
            else replace(cost, per_row_s=cost.per_row_s + self._plan_s, per_prefill_token_s=self._read_s)
        )

    def _engine_rows(self, request: RowRequest[DraftSession], prefill_chunk: int) -> list[EngineRow]:
        session = request.session
        with session.lock:
            core = session.core
            if session.is_dropped:
                return []
            if core.round.index != request.round_index:
                # A verdict came in between: the old nodes may be gone.
                request.granted = list(core.rows()[: len(request.granted)])
            return session.tree_cache.rows_for(core.tokens, core.tree, request.granted, prefill_chunk)

    def _is_about_to_borrow(self, session: DraftSession) -> bool:
        """Whether the session that this one will borrow from is itself still reading."""
        found = session.prefix_donor  # read once: the lookup thread may forget the draft meanwhile
        if found is None or session.tree_cache.num_handles:
            return False
        donor, _ = found
        if donor not in self._busy or donor.is_dropped or donor.is_idle:
            return False
        # One that is decoded does not wait for one that has few turns: only announced, or of a tenant that is gone.
        has_turns = donor.has_verdict and (not self._is_shared or donor.tenant in self._heard)
        return donor.num_unprefilled > 1 and (has_turns or not session.has_verdict)

    def _adopt_prefix(self, session: DraftSession) -> None:
        """Begin with what another session's cache holds of the same sequence."""
        found, session.prefix_donor = session.prefix_donor, None
        if found is None or not session.is_draftable:
            return
        donor, length = found
        if donor.is_dropped or session.tree_cache.num_handles:
            return
        lent = self.faults.guard(donor, self._fork_prefix, donor, session, length)
        if lent is not None:
            session.tree_cache.start_from(*lent)
            self.counts.borrowed_tokens += lent[1]

    def _fork_prefix(self, donor: DraftSession, session: DraftSession, known: int) -> tuple[int, int] | None:
        """A handle that holds what both sequences begin with, `known` tokens at least, and how many these are."""
        with donor.lock, contextlib.suppress(EngineFull):
            length = _common_len(donor.core.tokens, session.core.tokens, known)
            handle = donor.tree_cache.fork_prefix(donor.core.tokens, donor.core.tree, length)
            return None if handle is None else (handle, length)
        return None

    def _step(self, feeds: list[tuple[DraftSession, EngineRow]]) -> bool:
        """Run one step; False if the engine could not."""
        start_s = self._clock()
        try:
            distributions = self._engine.run([feed.row for _, feed in feeds])
            num_outputs = sum(len(feed.nodes) for _, feed in feeds)
            if len(distributions) != num_outputs:
                raise EngineError(f"the engine gave {len(distributions)} distributions for {num_outputs} outputs")
        except EngineFull:
            self.counts.failed_steps += 1
            self._num_failures = 0
            self._recover(list(dict.fromkeys(session for session, _ in feeds)))
            return False
        except Exception as error:
            self.counts.failed_steps += 1
            self._isolate_failure(feeds, error)
            return False
        self._num_failures = 0
        step_s = self._clock() - start_s
        self._observer.drafted(feeds, start_s, start_s + step_s)
        self._place(feeds, distributions)
        self._count(feeds, step_s)
        for session in dict.fromkeys(session for session, feed in feeds if any(feed.nodes)):
            self._grown.put(session)
        self._notify()
        return True

    def _place(self, feeds: list[tuple[DraftSession, EngineRow]], distributions: list[Distribution]) -> None:
        asked = [(session, node) for session, feed in feeds for node in feed.nodes]
        for (session, node), distribution in zip(asked, distributions, strict=True):
            if node is not None:
                self.faults.guard(session, self._grow, session, node, distribution)

    def _grow(self, session: DraftSession, node: Node, distribution: Distribution) -> None:
        with session.lock:
            session.core.add_distribution(node, distribution)

    def _isolate_failure(self, feeds: list[tuple[DraftSession, EngineRow]], error: Exception) -> None:
        """After a step that the engine could not run: each draft's rows run alone, and who fails alone is forgotten."""
        apart: dict[DraftSession, list[tuple[DraftSession, EngineRow]]] = {}
        for session, feed in feeds:
            apart.setdefault(session, []).append((session, feed))
        if len(apart) == 1:
            self.faults.drop(feeds[0][0], error)
            return
        for session, own in apart.items():
            self.faults.guard(session, self._step_again, own)

    def _step_again(self, feeds: list[tuple[DraftSession, EngineRow]]) -> None:
        for _, feed in feeds:  # a step that failed may have fed some of its tokens
            self._engine.truncate(feed.row.handle, feed.held)
        self._step(feeds)

    def _count(self, feeds: list[tuple[DraftSession, EngineRow]], step_s: float) -> None:
        self.counts.steps += 1
        num_rows = sum(feed.row.num_outputs for _, feed in feeds)
        self.counts.rows += num_rows
        self.counts.step_s += step_s
        num_read = sum(len(feed.row.tokens) for _, feed in feeds) - num_rows
        if not num_read:
            self.cost.observe(num_rows, step_s)
            return
        cost = self.cost.cost
        if cost is not None and num_read >= MIN_PREFILL_CHUNK:  # of fewer the time says little
            read_s = max(step_s - cost.at(num_rows), 0.0) / num_read
            self._read_s += _PACE * (read_s - self._read_s) if self._read_s else read_s
        now_s = self._clock()
        for session, feed in feeds:
            self._read.add(session.tenant, len(feed.row.tokens) - feed.row.num_outputs, now_s)

    def _recover(self, sessions: list[DraftSession]) -> None:
        """After a step without room the handles of its drafts are given back: they start from the sequence again."""
        for session in sessions:
            self.faults.guard(session, self._close, session)
        self._make_room(sessions)

    def _make_room(self, wanting: list[DraftSession]) -> None:
        info = self._engine.info
        self._store.evict_for(
            wanting,
            lambda session: max(
                len(session.core.tokens) / info.max_tokens, session.tree_cache.num_handles / info.max_handles
            ),
        )

    def _drop_all(self) -> None:
        for session in self._store.snapshot():
            self._store.drop(session)


def _common_len(one: Sequence[int], other: Sequence[int], known: int) -> int:
    """How many tokens both sequences begin with, `known` of them known; the last of the other does not count."""
    length = known
    while length < min(len(one), len(other) - 1) and one[length] == other[length]:
        length += 1
    return length
