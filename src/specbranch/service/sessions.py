"""The sessions of a service, found by content, forgotten when they are the least recently used.

A key is a namespace and the digest of the committed sequence. One lock guards the order of the store; each session has
a lock of its own, which the lookup thread and the compute thread hold for microseconds at a time, never during a step.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence

from specbranch.core.round import Outlook
from specbranch.core.session import Session
from specbranch.core.stats import Stats
from specbranch.engines.binding import Binding
from specbranch.service.digest import Digest
from specbranch.service.prefixes import Prefixes

Key = tuple[bytes, bytes]  # namespace, digest
_MAX_NAMESPACES = 1024  # whose forgotten sessions are counted apart
_REST_STEPS = 32
_numbers = itertools.count(1)


class StepCounter:
    """How many steps one target has told of."""

    def __init__(self) -> None:
        self.steps = 0


class DraftSession:
    """One session of the service: what is drafted, and the engine handles that hold it."""

    def __init__(self, namespace: bytes, core: Session, binding: Binding, is_undraftable: bool = False) -> None:
        self.number = next(_numbers)  # tells sessions apart in a trace
        self.namespace = namespace
        self.is_undraftable = is_undraftable  # remembered only so that its sequence is not asked for again
        self.core = core
        self.binding = binding
        self.lock = threading.Lock()
        self.is_forgotten = False
        self.is_awaited = False  # the target waits for this one
        self.is_behind = False  # it was asked for a draft while it had a long sequence yet to read
        self._step_counter = StepCounter()
        self._heard = 0
        self.donor: tuple[DraftSession, int] | None = (
            None  # who holds the beginning of this sequence, and how much of it
        )
        self._digest = Digest(core.tokens)

    @property
    def is_at_rest(self) -> bool:
        """Whether its target has gone on for long without it: the request has most likely ended."""
        return self._step_counter.steps - self._heard > _REST_STEPS

    def hear(self, step_counter: StepCounter) -> None:
        """The target with this step counter has just sent a verdict for the session."""
        self._step_counter, self._heard = step_counter, step_counter.steps

    @property
    def key(self) -> Key:
        """What the session is found by."""
        return (self.namespace, self._digest.name)

    def follow(self, tokens: Sequence[int], num_submitted: int, outlook: Outlook | None) -> None:
        """Take in a verdict; the caller holds the lock and moves the session in the store."""
        self.core.follow(tokens, num_submitted, outlook)
        self._digest = self._digest.extend(tokens)


class SessionStore:
    """Drafts by key, most recently used last; at most `max_sessions`, and at most `max_tokens` of sequence in all."""

    def __init__(self, max_sessions: int, max_tokens: int) -> None:
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._sessions: OrderedDict[Key, DraftSession] = OrderedDict()
        self._prefixes: Prefixes[DraftSession] = Prefixes()
        self._lock = threading.Lock()
        self._num_tokens = 0
        self._forgotten: list[DraftSession] = []
        self._retired: OrderedDict[bytes, Stats] = OrderedDict()  # by namespace, the last to lose a session last
        self._retired_others = Stats()
        self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self._num_tokens

    def find(self, key: Key) -> DraftSession | None:
        """The draft of a sequence, which is thereby the most recently used."""
        with self._lock:
            session = self._sessions.get(key)
            if session is not None:
                self._sessions.move_to_end(key)
            return session

    def put(self, session: DraftSession) -> None:
        """Add a draft; one with the same key makes way, and so do the oldest where the budget asks for it."""
        with self._lock:
            self._remove(self._sessions.get(session.key))
            self._sessions[session.key] = session
            self._num_tokens += len(session.core.tokens)
            session.donor = self._prefixes.find(session.namespace, session.core.tokens)
            self._prefixes.add(session, session.namespace, session.core.tokens)
            self._shrink()

    def follow(
        self, session: DraftSession, tokens: Sequence[int], num_submitted: int, outlook: Outlook | None = None
    ) -> bool:
        """Let a draft take in a verdict and move it to its new key; False if it was forgotten meanwhile."""
        with self._lock:
            if session.is_forgotten:
                return False
            del self._sessions[session.key]
            held = len(session.core.tokens)
            try:
                with session.lock:
                    session.follow(tokens, num_submitted, outlook)
            except Exception:
                self._remove(session)  # it is half-way between two sequences
                raise
            finally:
                self._num_tokens += len(session.core.tokens) - held
            self._remove(self._sessions.get(session.key))
            self._sessions[session.key] = session
            self._prefixes.add(session, session.namespace, session.core.tokens)
            self._shrink()
            return not session.is_forgotten

    def evict_oldest(self, spared: Sequence[DraftSession] = ()) -> bool:
        """Forget the least recently used draft that holds engine handles; False if there is none to forget."""
        with self._lock:
            for session in self._sessions.values():
                if session.binding.num_handles and session not in spared:
                    self._remove(session)
                    self.num_evictions += 1
                    return True
            return False

    def forget(self, session: DraftSession) -> None:
        """Forget one draft."""
        with self._lock:
            self._remove(session)

    def take_forgotten(self) -> list[DraftSession]:
        """Drafts forgotten since the last call. Whoever owns the engine closes their handles."""
        with self._lock:
            forgotten, self._forgotten = self._forgotten, []
            return forgotten

    def snapshot(self) -> list[DraftSession]:
        """All drafts, least recently used first."""
        with self._lock:
            return list(self._sessions.values())

    def stats(self) -> Stats:
        """The counters of all sessions, the forgotten ones included."""
        total = Stats()
        with self._lock:
            total.add(self._retired_others)
            for retired in self._retired.values():
                total.add(retired)
            for session in self._sessions.values():
                total.add(session.core.stats)
        return total

    def stats_of(self, namespace: bytes) -> tuple[int, Stats]:
        """How many sessions a namespace has, and its counters, its forgotten sessions included."""
        total = Stats()
        num_sessions = 0
        with self._lock:
            total.add(self._retired.get(namespace, Stats()))
            for session in self._sessions.values():
                if session.namespace == namespace:
                    num_sessions += 1
                    total.add(session.core.stats)
        return num_sessions, total

    def _shrink(self) -> None:
        while len(self._sessions) > 1 and (
            len(self._sessions) > self._max_sessions or self._num_tokens > self._max_tokens
        ):
            self._remove(next(iter(self._sessions.values())))
            self.num_evictions += 1

    def _remove(self, session: DraftSession | None) -> None:
        if session is not None and not session.is_forgotten:
            session.is_forgotten = True
            self._sessions.pop(session.key, None)
            self._prefixes.remove(session)
            session.donor = None  # else sessions that never borrow would keep all their forerunners alive
            self._num_tokens -= len(session.core.tokens)
            self._forgotten.append(session)
            self._retire(session)

    def _retire(self, session: DraftSession) -> None:
        self._retired.setdefault(session.namespace, Stats()).add(session.core.stats)
        self._retired.move_to_end(session.namespace)
        if len(self._retired) > _MAX_NAMESPACES:
            self._retired_others.add(self._retired.popitem(last=False)[1])
