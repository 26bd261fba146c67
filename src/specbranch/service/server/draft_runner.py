"""The draft thread, which repeats: take in changed sessions, plan a batch, run it, store its results in the trees.

No other thread touches the engine. Rows of all sessions compete for a step: first those that a target waits for, then
by how likely it is, by the draft's distributions, that their tokens will be verified. Prefill goes in chunks, and a
step prefills no more than one chunk, so that sessions which already draft go on meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence

from specbranch.core.costs import StepTimeModel
from specbranch.core.distribution import Distribution
from specbranch.core.node import Node
from specbranch.core.scheduler import MIN_PREFILL_CHUNK
from specbranch.engines.base import DraftEngine, Row
from specbranch.errors import EngineError, EngineFull, first_line
from specbranch.service.server.batch import BatchPlanner, SessionRow
from specbranch.service.server.draft_session import DraftSession
from specbranch.service.server.prometheus import DraftRunnerCounts
from specbranch.service.server.recorder import EventSink
from specbranch.service.server.store import FaultGuard, SessionStore

log = logging.getLogger(__name__)

_MEASURED_PREFILL, _MEASURED_ROWS = 256, (1, 4, 8, 1)  # tokens, and the rows of draft steps
_MAX_FAILURES = 8  # steps in a row in which the engine ran nothing: it counts as lost then


class DraftRunner:
    """Runs draft steps on its own thread from `start` to `stop`. Calls `notify` after every step."""

    def __init__(
        self,
        engine: DraftEngine,
        store: SessionStore,
        notify: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        observer: EventSink | None = None,
        prefill_chunk: int = 128,
    ) -> None:
        self._engine = engine
        self._store = store
        self._notify = notify
        self._clock = clock
        self._observer = observer
        self._news: queue.SimpleQueue[DraftSession | None] = queue.SimpleQueue()  # None wakes the thread
        self._grown: queue.SimpleQueue[DraftSession] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="draft", daemon=True)
        self._num_failures = 0  # steps since the engine last worked
        self.faults = FaultGuard(store)
        self.cost = StepTimeModel()
        self.counts = DraftRunnerCounts()
        self.planner = BatchPlanner(engine.info, self.faults, self.cost, self.counts, clock, prefill_chunk)

    def measure(self) -> None:
        """Time prefills and draft steps before `start`, so that the first sessions are planned with known times.

        If the engine fails here, log a warning.
        """

        def timed(row: Row) -> float:
            start_s = self._clock()
            self._engine.run([row])
            return self._clock() - start_s

        try:
            handle = self._engine.open()
            try:
                length = min(_MEASURED_PREFILL, self._engine.info.max_tokens // 2)
                for is_first in (True, False):  # the first run of everything may compile or allocate
                    self._engine.truncate(handle, 0)
                    prefill_s = timed(Row(handle, tuple(range(length))))
                    for count in _MEASURED_ROWS if is_first else _MEASURED_ROWS * 3:
                        step_s = timed(Row(handle, tuple(range(count)), count))
                        self._engine.truncate(handle, length)
                        if not is_first:
                            self.cost.observe(count, step_s)
                if length > MIN_PREFILL_CHUNK:
                    self.cost.observe_prefill(length - 1, 1, prefill_s)
            finally:
                self._engine.close(handle)
        except Exception as error:
            log.warning("the draft steps could not be timed: %s", first_line(error))

    def start(self) -> None:
        """Start the draft thread."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Stop the draft thread after its present step; return False if that takes longer than `timeout_s`."""
        self._is_stopping = True
        self._news.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the draft thread is running; it ends when `stop` is called, the engine has failed, or it crashes."""
        return self._thread.is_alive()

    @property
    def engine_failed(self) -> bool:
        """Whether the engine has run nothing in eight steps in a row, so that it counts as lost."""
        return self._num_failures >= _MAX_FAILURES

    def notify(self, session: DraftSession) -> None:
        """Queue a changed session for the draft thread and wake it. Called by the thread that serves the clients."""
        self._news.put(session)

    def pop_updated(self) -> list[DraftSession]:
        """Return the sessions that have got new distributions since the last call, each once.

        Called by the lookup thread, which serves the clients.
        """
        grown: dict[DraftSession, None] = {}
        while not self._grown.empty():
            grown[self._grown.get()] = None
        return list(grown)

    def run_once(self) -> bool:
        """Run one iteration of the draft thread; return False if there were no rows to run.

        After an exception that no single session caused, record it, drop all sessions and return True.
        """
        try:
            return self.run_step()
        except Exception as error:
            self.faults.record(error, "all sessions are dropped")
            for session in self._store.snapshot():
                self._store.drop(session)
            return True

    def run_step(self) -> bool:
        """Take in changed sessions, close dropped ones, plan and run one step; return False if there were no rows.

        If the engine is too full for any row, evict one session.
        """
        self._take_news()
        for session in self._store.pop_dropped():
            self._close(session)
        self._evict_idle_kv()
        start_s, engine_s = self._clock(), self.counts.step_s
        batch = self.planner.plan()
        if not batch.rows:
            if batch.without_room:
                self._make_room(batch.without_room)
            return False
        self._num_failures += 1  # unless it works
        if self._run_rows(batch.rows):
            engine_s = self.counts.step_s - engine_s
            self.planner.observe_planning(batch, self._clock() - start_s - engine_s)
        return True

    def _run(self) -> None:
        while not self._is_stopping and not self.engine_failed:
            if not self.run_once():
                self._wait_for_news()

    def _wait_for_news(self) -> None:
        # Look again: the last step may have taken the None with which `stop` wakes this thread.
        if self._is_stopping:
            return
        pause_s = self.planner.pause_s()
        if pause_s > 0:
            with contextlib.suppress(queue.Empty):
                session = self._news.get(timeout=None if pause_s == math.inf else pause_s)
                if session is not None:
                    self.planner.record_activity(session)

    def _take_news(self) -> None:
        while not self._news.empty():
            session = self._news.get()
            if session is not None:
                self.planner.record_activity(session)

    def _close(self, session: DraftSession) -> None:
        """Close the handles of a dropped session, and wake the thread that serves clients: a target may wait for it."""
        self.planner.runnable.discard(session)
        with self.faults.guard(session):
            session.close_handles()
        self._notify()

    def _evict_idle_kv(self) -> None:
        """Close the handles of idle sessions, least recently used first, until idle sessions hold few enough tokens.

        The limit is the engine's `idle_cache_tokens`: more idle tokens in its cache would slow down other sessions. The
        sessions stay in the store: a session whose target does continue is prefilled again.
        """
        limit = self._engine.info.idle_cache_tokens
        if limit >= self._engine.info.max_tokens or self._engine.num_tokens <= limit:
            return
        idle = [session for session in self._store.snapshot() if session.is_idle and session.tree_cache.num_handles]
        num_tokens = sum([len(session.core.tokens) for session in idle])
        for session in idle:
            if num_tokens <= limit:
                return
            num_tokens -= len(session.core.tokens)
            with self.faults.guard(session):
                session.close_handles()
            self.counts.cleared += 1

    def _run_rows(self, rows: Sequence[SessionRow]) -> bool:
        """Run one step and store its distributions in the trees; return False if the engine could not run it.

        If the engine was full, close the handles of the sessions and evict one session; after another error, run each
        session's rows alone.
        """
        start_s = self._clock()
        try:
            distributions = self._engine.run([row.row for _, row in rows])
            num_outputs = sum([len(row.nodes) for _, row in rows])
            if len(distributions) != num_outputs:
                raise EngineError(f"the engine gave {len(distributions)} distributions for {num_outputs} outputs")
        except EngineFull:
            self.counts.failed_steps += 1
            self._num_failures = 0
            self._recover(list(dict.fromkeys(session for session, _ in rows)))
            return False
        except Exception as error:
            self.counts.failed_steps += 1
            self._isolate_failure(rows, error)
            return False
        self._num_failures = 0
        step_s = self._clock() - start_s
        if self._observer is not None:
            self._observer.drafted(rows, start_s, start_s + step_s)
        self._place(rows, distributions)
        self.counts.steps += 1
        self.counts.rows += num_outputs
        self.counts.step_s += step_s
        self.planner.observe_step(rows, num_outputs, step_s)
        self._notify()
        return True

    def _place(self, rows: Sequence[SessionRow], distributions: Sequence[Distribution]) -> None:
        """Store each distribution in its node, and keep the sessions that got distributions for `pop_updated`."""
        outputs = [(session, node) for session, row in rows for node in row.nodes]
        grown: dict[DraftSession, list[tuple[Node, Distribution]]] = {}
        for (session, node), distribution in zip(outputs, distributions, strict=True):
            if node is not None:
                grown.setdefault(session, []).append((node, distribution))
        for session, added in grown.items():
            with self.faults.guard(session), session.lock:
                for node, distribution in added:
                    session.core.add_distribution(node, distribution)
            self._grown.put(session)

    def _isolate_failure(self, rows: Sequence[SessionRow], error: Exception) -> None:
        """Run each session's rows alone after a step that failed, and drop the session whose rows fail alone."""
        by_session: dict[DraftSession, list[SessionRow]] = {}
        for session, row in rows:
            by_session.setdefault(session, []).append((session, row))
        if len(by_session) == 1:
            self.faults.drop(rows[0][0], error)
            return
        for session, own in by_session.items():
            with self.faults.guard(session):
                for _, row in own:  # the failed step may have fed some of its tokens
                    self._engine.truncate(row.row.handle, row.held)
                self._run_rows(own)

    def _recover(self, sessions: list[DraftSession]) -> None:
        """Close the handles of these sessions after a step for which the engine was full, and evict one session.

        The remaining sessions prefill again.
        """
        for session in sessions:
            with self.faults.guard(session):
                session.close_handles()
        self._make_room(sessions)

    def _make_room(self, wanting: list[DraftSession]) -> None:
        """Evict one session, so that those in `wanting` find free tokens and handles in the engine."""
        info = self._engine.info
        self._store.evict_for(
            wanting,
            lambda session: max(
                len(session.core.tokens) / info.max_tokens, session.tree_cache.num_handles / info.max_handles
            ),
        )
