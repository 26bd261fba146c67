"""Which session a row belongs to: found by content, opened when it is new, brought up to the row's verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specbranch.core.distribution import RequestSampling
from specbranch.core.node import GreedyPicker
from specbranch.core.planner import Planner, Predictor
from specbranch.core.planners import SettingError, make_planner
from specbranch.core.planners.predictors import CONSTANTS, HintPredictor
from specbranch.core.round import AcceptanceHint, Signal
from specbranch.core.session import Session
from specbranch.engines.base import DraftEngine
from specbranch.engines.tree_cache import TreeCache
from specbranch.service.server.draft_runner import DraftRunner
from specbranch.service.server.draft_session import DraftSession
from specbranch.service.server.recorder import EventSink
from specbranch.service.server.store import FaultGuard, SessionStore
from specbranch.service.server.tenants import Tenants
from specbranch.service.wire.messages import OpenSequences, Reason, StepRow, WireHint, WireSampling, unpack_tokens
from specbranch.service.wire.payloads import Digest

_PREDICTORS: dict[str, Predictor] = {**CONSTANTS, "hrad": HintPredictor()}
Obstacle = tuple[Reason, int, int]  # why a text is not drafted for, with what is beyond which limit
_ROOM = 64  # tokens that the cache must have left for drafting


@dataclass(slots=True, kw_only=True)
class LookupCounts:
    """What the lookup thread did."""

    steps: int = 0
    lookups: int = 0
    unknown: int = 0
    opened: int = 0
    refused: int = 0
    dropped: int = 0  # messages of clients that send faster than they can be served
    overdue: int = 0
    hints: int = 0  # verdicts that came with one
    wait_s: float = 0.0


class SessionLookup:
    """Finds, opens and follows sessions. Called by the lookup thread only."""

    def __init__(
        self,
        engine: DraftEngine,
        store: SessionStore,
        runner: DraftRunner,
        *,
        faults: FaultGuard,
        observer: EventSink,
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

    def open(self, client: bytes, request: OpenSequences, user: bytes = b"") -> bool:
        """Begin to draft for whole sequences; False if one is new and no new ones are taken.

        `user` names the client's key, if it has one.
        """
        if request.predictor not in _PREDICTORS:
            raise SettingError(f"no predictor is called {request.predictor!r}; choose from {', '.join(_PREDICTORS)}")
        is_taken = True
        counter = self.tenants.step_counter(client)
        counter.heard_s = self._clock()
        for tokens in map(unpack_tokens, request.sequences):
            planner = make_planner(request.planner, request.settings, _PREDICTORS[request.predictor])
            # Rows with equal sequences ask for it once each; what is drafted already stays.
            digest = Digest(tokens)
            if self._store.find((request.namespace, digest.name)) is not None:
                continue
            is_taken = is_taken and not self._store.is_draining
            if is_taken:
                obstacle = self._undraftable_reason(int(tokens.max()), len(tokens))
                if obstacle is None:
                    session = self._put(request.namespace, user, digest, tokens.tolist(), planner)
                else:
                    session = self._put_stub(request.namespace, user, digest, int(tokens[-1]), obstacle)
                session.touch(counter)
                self.counts.opened += 1
        self._observer.opened(client, request, self._clock())
        return is_taken

    def commit_row(self, namespace: bytes, row: StepRow) -> DraftSession | None:
        """The session of a row, after the row's verdict; None if nobody knows the sequence."""
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
        if session is None or not self._faults.guard(session, self._commit, session, row):
            self.counts.unknown += 1
            self._note_eviction(namespace, row)
            return None
        self.counts.hints += row.hint is not None
        return session

    def _note_eviction(self, namespace: bytes, row: StepRow) -> None:
        """A sequence that is asked for and not known may have been forgotten for want of room."""
        length = self._store.pop_evicted_length((namespace, row.before))
        if length is not None:
            self._store.undrafted.record(namespace, "no_room", length, self._info.max_tokens)

    def _commit(self, session: DraftSession, row: StepRow) -> bool:
        """Let a session take in a row's verdict; False if it was forgotten meanwhile."""
        before = self._observer.before_commit(session, row)
        hint, sampling = _hint(row.hint), _sampling(row.sampling)
        session.core.max_draft_tokens = row.max_draft_tokens
        is_known = self._store.commit(session, row.tokens, row.num_submitted, hint, sampling, row.has_recurring_noise)
        self._observer.after_commit(session, row, before, self._clock() - self._start_s)
        return is_known

    def _put(
        self, namespace: bytes, tenant: bytes, digest: Digest, tokens: Sequence[int], planner: Planner[Any]
    ) -> DraftSession:
        core = Session(tokens, planner, GreedyPicker(), self.tenants.costs(namespace))
        session = DraftSession(namespace, core, TreeCache(self._engine), digest=digest, tenant=tenant)
        self._store.put(session)
        # The target goes on without a draft; prefill and preparing for its verdict begin at once.
        core.skip_round()
        self._runner.notify(session)
        return session

    def _put_stub(self, namespace: bytes, tenant: bytes, digest: Digest, last: int, obstacle: Obstacle) -> DraftSession:
        """Remember a sequence that cannot be drafted for by its name and its last token, so that nobody asks for it."""
        self._store.undrafted.record(namespace, *obstacle)
        planner = make_planner("none", {}, _PREDICTORS["none"])
        core = Session([last], planner, GreedyPicker(), self.tenants.costs(namespace))
        core.skip_round()
        tree_cache = TreeCache(self._engine)
        session = DraftSession(namespace, core, tree_cache, digest=digest, tenant=tenant, is_draftable=False)
        self._store.put(session)
        return session

    def _undraftable_reason(self, greatest: int, length: int) -> Obstacle | None:
        """Why a sequence with this greatest token and this length cannot be drafted for; None if it can be.

        The draft model must know its tokens, and the cache must hold it with some room to draft.
        """
        if greatest >= self._info.vocab_len:
            return "foreign_token", greatest, self._info.vocab_len
        if length + _ROOM > self._info.max_tokens:
            return "too_long", length, max(self._info.max_tokens - _ROOM, 0)
        return None


def _hint(told: WireHint | None) -> AcceptanceHint | None:
    return None if told is None else AcceptanceHint(Signal(told.signal))


def _sampling(told: WireSampling | None) -> RequestSampling | None:
    return None if told is None else RequestSampling(told.temperature, told.top_p, told.top_k, told.seed)
