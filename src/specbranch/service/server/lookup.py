"""Find the session of a row by its digest, open sessions for new sequences, and commit verdicts to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from specbranch.core.node import GreedyPicker
from specbranch.core.planner import Planner, Predictor
from specbranch.core.planners import make_planner
from specbranch.core.planners.predictors import CONSTANTS, TRAINED, HintPredictor, make_predictor
from specbranch.core.session import Session
from specbranch.engines.base import DraftEngine
from specbranch.engines.tree_cache import TreeCache
from specbranch.service.server.draft_runner import DraftRunner
from specbranch.service.server.draft_session import DraftSession
from specbranch.service.server.prometheus import LookupCounts
from specbranch.service.server.recorder import EventSink
from specbranch.service.server.store import FaultGuard, SessionStore
from specbranch.service.server.tenants import ClientActivity, Tenants
from specbranch.service.wire.messages import OpenSequences, Reason, StepRow, unpack_tokens
from specbranch.service.wire.payloads import Digest

Obstacle = tuple[Reason, int, int]  # why a sequence gets no drafts, the value at fault, and the limit
_MIN_FREE_TOKENS = 64  # that the cache must have left for drafting


class SessionLookup:
    """Finds and opens sessions, and commits verdicts to them. Called only by the thread that serves the clients."""

    def __init__(
        self,
        engine: DraftEngine,
        store: SessionStore,
        runner: DraftRunner,
        *,
        faults: FaultGuard,
        observer: EventSink | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._info = engine.info
        self._store = store
        self._runner = runner
        self._faults = faults
        self._observer = observer
        self._clock = clock
        self._start_s = clock()
        self.tenants = Tenants(runner.cost)
        self.counts = LookupCounts()

    def open(self, client: ClientActivity, request: OpenSequences, user: bytes = b"") -> bool:
        """Open sessions for the sequences of a request; return False if one of them is new and the service is draining.

        `user` is the short name of the client's key, empty if it has none.
        """
        is_accepted = True
        client.last_message_s = self._clock()
        for tokens in map(unpack_tokens, request.sequences):
            planner = make_planner(request.planner, request.settings, _predictor(request.predictor))
            # Rows with equal sequences open the sequence once each; the first draft tree stays.
            digest = Digest(tokens)
            if self._store.find((request.namespace, digest.name)) is not None:
                continue
            is_accepted = is_accepted and not self._store.is_draining
            if is_accepted:
                obstacle = self._undraftable_reason(int(tokens.max()), len(tokens))
                if obstacle is None:
                    session = self._put(request.namespace, user, digest, tokens.tolist(), planner)
                else:
                    session = self._put_stub(request.namespace, user, digest, int(tokens[-1]), obstacle)
                session.touch(client)
                self.counts.opened += 1
        if self._observer is not None:
            self._observer.opened(client.client, request, self._clock())
        return is_accepted

    def commit_row(self, namespace: bytes, row: StepRow) -> DraftSession | None:
        """Commit the verdict of a row to its session, and return the session; None if the sequence is unknown."""
        self.counts.lookups += 1
        # An equal sequence may have come this far already: two requests then share one session.
        session = self._store.find((namespace, row.after))
        if session is not None:
            return session
        session = self._store.find((namespace, row.before))
        if session is not None and session.is_draftable:
            obstacle = self._undraftable_reason(max(row.tokens), len(session.core.tokens) + len(row.tokens))
            if obstacle is not None:
                # The draft thread, which works on the old session, never sees the new tokens.
                self._store.drop(session)
                digest = session.digest.extend(row.tokens)
                return self._put_stub(namespace, session.tenant, digest, row.tokens[-1], obstacle)
        is_committed = False
        if session is not None:
            with self._faults.guard(session):
                is_committed = self._commit(session, row)
        if not is_committed:
            self.counts.unknown += 1
            self._count_eviction(namespace, row)
            return None
        self.counts.hints += row.hint is not None
        return session

    def _count_eviction(self, namespace: bytes, row: StepRow) -> None:
        """Count an unknown sequence as undrafted if the store evicted it for lack of room."""
        length = self._store.pop_evicted_length((namespace, row.before))
        if length is not None:
            self._store.undrafted.record(namespace, "no_room", length, self._info.max_tokens)

    def _commit(self, session: DraftSession, row: StepRow) -> bool:
        """Commit the verdict of a row to a session and trace it; return False if the session was dropped meanwhile."""
        if self._observer is None:
            return self._store.commit(session, row)
        before = self._observer.before_commit(session, row)
        is_committed = self._store.commit(session, row)
        self._observer.after_commit(session, row, before, self._clock() - self._start_s)
        return is_committed

    def _put(
        self, namespace: bytes, tenant: bytes, digest: Digest, tokens: Sequence[int], planner: Planner[Any]
    ) -> DraftSession:
        core = Session(tokens, planner, GreedyPicker(), self.tenants.costs(namespace))
        session = DraftSession(namespace, core, TreeCache(self._engine), digest=digest, tenant=tenant)
        self._store.put(session)
        # The target goes on without a draft; prefill and drafting for its verdict begin at once.
        core.skip_round()
        self._runner.notify(session)
        return session

    def _put_stub(self, namespace: bytes, tenant: bytes, digest: Digest, last: int, obstacle: Obstacle) -> DraftSession:
        """Store a session for a sequence that gets no drafts, so that no client opens it again; return the session.

        It has only the digest and the `last` token of the sequence. `obstacle` is why the sequence gets no drafts.
        """
        self._store.undrafted.record(namespace, *obstacle)
        planner = make_planner("none", {}, CONSTANTS["none"])
        core = Session([last], planner, GreedyPicker(), self.tenants.costs(namespace))
        core.skip_round()
        tree_cache = TreeCache(self._engine)
        session = DraftSession(namespace, core, tree_cache, digest=digest, tenant=tenant, is_draftable=False)
        self._store.put(session)
        return session

    def _undraftable_reason(self, greatest: int, length: int) -> Obstacle | None:
        """Return why a sequence with this greatest token and this length gets no drafts; None if it can get drafts.

        The draft model must know all tokens of the sequence, and the cache must hold 64 tokens more than the sequence.
        """
        if greatest >= self._info.vocab_len:
            return "foreign_token", greatest, self._info.vocab_len
        if length + _MIN_FREE_TOKENS > self._info.max_tokens:
            return "too_long", length, max(self._info.max_tokens - _MIN_FREE_TOKENS, 0)
        return None


def _predictor(name: str) -> Predictor:
    """Return the predictor of a new sequence; raise `SettingError` for an unknown name."""
    return HintPredictor() if name == TRAINED else make_predictor(name)
