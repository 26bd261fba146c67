"""The session store: quotas, the index of prefixes, the fault barrier, and sequences that get no drafts.

A tenant is a namespace, or where clients have keys, a key; it forgets what it used least recently. A key is a namespace
and the digest of the committed sequence. One lock guards the order of the store; each session has
a lock of its own, which the lookup thread and the draft thread hold for microseconds at a time, never during a step.

Sequences are marked at every sixteenth token by the digest of all tokens up to there. What another session's cache
already holds need not be prefilled again.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import CodeType
from typing import Generic, ParamSpec, TypeVar

from specbranch.core.distribution import RequestSampling
from specbranch.core.round import AcceptanceHint, Stats
from specbranch.service.server.draft_session import DraftSession, Key, State
from specbranch.service.wire.messages import REASONS, Reason
from specbranch.service.wire.payloads import Digest, as_bytes

log = logging.getLogger(__name__)
_MAX_NAMESPACES = 1024  # whose forgotten sessions are counted apart
_MAX_EVICTED = 1024  # sequences whose eviction is remembered until their target asks for them
MARK_LEN = 16
T = TypeVar("T")
P = ParamSpec("P")
_MESSAGES: dict[Reason, str] = {
    "too_long": "a text of %d tokens is not drafted for: the draft's KV cache has room for texts of %d; start the "
    "draft with a larger --cache-tokens",
    "foreign_token": "a text with token %d is not drafted for: the draft knows %d tokens; use a draft with the "
    "target's vocabulary",
    "no_room": "a text of %d tokens is not drafted for until it has been read again: others needed its room in the "
    "draft's KV cache of %d tokens; start the draft with larger --cache-tokens, --max-handles or --max-sessions",
}


class TenantUsage:
    """What one tenant has in the store: its sessions, least recently used first, and their tokens."""

    def __init__(self) -> None:
        self.sessions: OrderedDict[DraftSession, None] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self.sessions)

    @property
    def oldest(self) -> DraftSession:
        """The least recently used session."""
        return next(iter(self.sessions))


class SessionStore:
    """Sessions by key, most recently used last; at most `max_sessions` with at most `max_tokens` tokens in all."""

    def __init__(self, max_sessions: int, max_tokens: int) -> None:
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._sessions: OrderedDict[Key, DraftSession] = OrderedDict()
        self._holdings: OrderedDict[bytes, TenantUsage] = OrderedDict()  # by tenant, least recently used first
        self._prefixes: PrefixIndex[DraftSession] = PrefixIndex()
        self._lock = threading.Lock()
        self._num_tokens = 0
        self._forgotten: list[DraftSession] = []
        self._retired: OrderedDict[bytes, Stats] = OrderedDict()  # by namespace, the last to lose a session last
        self._retired_total = Stats()
        self._evicted: OrderedDict[Key, int] = OrderedDict()  # lengths
        self.num_evictions = 0
        self.is_draining = False  # nobody may add new sequences; written by the lookup thread
        self.undrafted = UndraftableSequences()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self._num_tokens

    def find(self, key: Key) -> DraftSession | None:
        """The session of a sequence, which is thereby the most recently used."""
        with self._lock:
            session = self._sessions.get(key)
            if session is not None:
                self._sessions.move_to_end(key)
                self._holdings.move_to_end(session.tenant)
                self._holdings[session.tenant].sessions.move_to_end(session)
            return session

    def put(self, session: DraftSession) -> None:
        """Add a session; one with the same key makes way, and so do others where the budget asks for it."""
        with self._lock:
            self._remove(self._sessions.get(session.key))
            self._sessions[session.key] = session
            self._holdings.setdefault(session.tenant, TenantUsage()).sessions[session] = None
            self._holdings.move_to_end(session.tenant)
            self._grow(session, len(session.core.tokens))
            if session.is_draftable:
                session.prefix_donor = self._prefixes.add(session, session.namespace, session.core.tokens)
            self._shrink()

    def commit(
        self,
        session: DraftSession,
        tokens: Sequence[int],
        num_submitted: int,
        hint: AcceptanceHint | None = None,
        sampling: RequestSampling | None = None,
        has_recurring_noise: bool = False,
    ) -> bool:
        """Let a session take in a verdict and move it to its new key; False if it was forgotten meanwhile."""
        with self._lock:
            if session.is_dropped:
                return False
            del self._sessions[session.key]
            held = len(session.core.tokens)
            try:
                with session.lock:
                    session.commit(tokens, num_submitted, hint, sampling, has_recurring_noise)
            except Exception:
                self._grow(session, len(session.core.tokens) - held)
                self._remove(session)  # it is half-way between two sequences
                raise
            self._grow(session, len(session.core.tokens) - held)
            self._remove(self._sessions.get(session.key))
            self._sessions[session.key] = session
            if session.is_draftable:
                self._prefixes.add(session, session.namespace, session.core.tokens)
            self._shrink()
            return not session.is_dropped

    def evict_for(self, wanting: Sequence[DraftSession], weight: Callable[[DraftSession], float]) -> None:
        """Forget one session, so that others find room in the engine; `weight` is the part of it that a session takes.

        The tenant that takes most loses: its least recently used session, but one that wants room only if it has no
        other there, and then the heaviest.
        """
        with self._lock:
            held = [session for session in self._sessions.values() if session.tree_cache.num_handles]
            weights: dict[bytes, float] = {}
            for session in dict.fromkeys((*held, *wanting)):
                weights[session.tenant] = weights.get(session.tenant, 0.0) + weight(session)
            largest = max(weights, key=lambda tenant: weights[tenant])
            idle = (session for session in held if session.tenant == largest and session not in wanting)
            own = (session for session in wanting if session.tenant == largest)
            self._evict(next(idle, None) or max(own, key=weight))

    def pop_evicted_length(self, key: Key) -> int | None:
        """How long a sequence was that was forgotten for want of room, if it was; told once."""
        with self._lock:
            return self._evicted.pop(key, None)

    def drop(self, session: DraftSession) -> None:
        """Forget one session."""
        with self._lock:
            self._remove(session)

    def pop_dropped(self) -> list[DraftSession]:
        """Sessions forgotten since the last call. Whoever owns the engine closes their handles."""
        with self._lock:
            forgotten, self._forgotten = self._forgotten, []
            return forgotten

    def snapshot(self) -> list[DraftSession]:
        """All sessions, least recently used first."""
        with self._lock:
            return list(self._sessions.values())

    def num_active(self, now_s: float) -> int:
        """How many sessions have a target that goes on with them."""
        return sum(session.is_active(now_s) for session in self.snapshot())

    def stats(self) -> Stats:
        """The counters of all sessions, the forgotten ones included. The lock is not held while they are summed."""
        with self._lock:
            retired, sessions = replace(self._retired_total), list(self._sessions.values())
        return Stats.total([retired, *(session.core.stats for session in sessions)])

    def stats_of(self, namespace: bytes) -> tuple[int, Stats]:
        """How many sessions a namespace has, and its counters, its forgotten sessions included."""
        with self._lock:
            retired = replace(self._retired.get(namespace, Stats()))
            sessions = [session for session in self._sessions.values() if session.namespace == namespace]
        return len(sessions), Stats.total([retired, *(session.core.stats for session in sessions)])

    def _shrink(self) -> None:
        while len(self._sessions) > 1 and (
            len(self._sessions) > self._max_sessions or self._num_tokens > self._max_tokens
        ):
            is_crowded = len(self._sessions) > self._max_sessions
            # Of equal ones the first: the least recently used.
            self._evict(max(self._holdings.values(), key=len if is_crowded else _tokens_of).oldest)

    def _grow(self, session: DraftSession, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        self._holdings[session.tenant].num_tokens += num_tokens

    def _evict(self, session: DraftSession) -> None:
        if session.is_draftable:
            self._evicted[session.key] = len(session.core.tokens)
        if len(self._evicted) > _MAX_EVICTED:
            self._evicted.popitem(last=False)
        self._remove(session)
        self.num_evictions += 1

    def _remove(self, session: DraftSession | None) -> None:
        if session is not None and session.set_state(State.DROPPED):
            self._sessions.pop(session.key, None)
            self._prefixes.remove(session)
            session.prefix_donor = None  # else sessions that never borrow would keep all their forerunners alive
            self._grow(session, -len(session.core.tokens))
            del self._holdings[session.tenant].sessions[session]
            if not self._holdings[session.tenant].sessions:
                del self._holdings[session.tenant]
            if session.is_draftable:  # the engine has nothing of the others
                self._forgotten.append(session)
            self._retire(session)

    def _retire(self, session: DraftSession) -> None:
        self._retired_total.add(session.core.stats)
        self._retired.setdefault(session.namespace, Stats()).add(session.core.stats)
        self._retired.move_to_end(session.namespace)
        if len(self._retired) > _MAX_NAMESPACES:
            self._retired.popitem(last=False)


def _tokens_of(holding: TenantUsage) -> int:
    return holding.num_tokens


class PrefixHashes:
    """The marks of one growing sequence."""

    def __init__(self) -> None:
        self._digest = Digest()
        self._length = 0

    def extend(self, tokens: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Length and digest of every mark passed since the last call; `tokens` is the whole sequence."""
        num_marks = (len(tokens) - self._length) // MARK_LEN
        packed = as_bytes(tokens[self._length : self._length + num_marks * MARK_LEN])
        mark_size = len(packed) // max(num_marks, 1)
        for start in range(0, len(packed), mark_size or 1):
            self._digest.update(packed[start : start + mark_size])
            self._length += MARK_LEN
            yield self._length, self._digest.name


class PrefixIndex(Generic[T]):
    """The latest holder of each beginning. Grows by one entry for sixteen tokens of a holder's sequence."""

    def __init__(self) -> None:
        self._holders: dict[Key, T] = {}
        self._marks: dict[T, tuple[PrefixHashes, list[Key]]] = {}

    def add(self, holder: T, namespace: bytes, tokens: Sequence[int]) -> tuple[T, int] | None:
        """Let a holder be found by its sequence, or by what its sequence has become.

        Returns who held most of the beginning of what is new in it, as `find` would.
        """
        marks, keys = self._marks.setdefault(holder, (PrefixHashes(), []))
        found = None
        for length, name in marks.extend(tokens):
            before = self._holders.get((namespace, name))
            if before is not None and length < len(tokens):
                found = (before, length)
            self._holders[namespace, name] = holder
            keys.append((namespace, name))
        return found

    def remove(self, holder: T) -> None:
        """Forget a holder."""
        _, keys = self._marks.pop(holder, (None, []))
        for key in keys:
            if self._holders.get(key) is holder:
                del self._holders[key]

    def find(self, namespace: bytes, tokens: Sequence[int]) -> tuple[T, int] | None:
        """Who holds most of the beginning of a sequence, and how many of its tokens; never all of them."""
        found = None
        for length, name in PrefixHashes().extend(tokens[:-1]):
            holder = self._holders.get((namespace, name))
            if holder is not None:
                found = (holder, length)
        return found


class FaultGuard:
    """The exceptions that one thread has caught. The first of each kind is logged, the others are counted only."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._known: set[tuple[type[Exception], CodeType | None, int]] = set()
        self.count = 0

    def guard(self, session: DraftSession, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Do something for a draft. If it fails, the draft is forgotten, and None comes of it."""
        try:
            return act(*args, **kwargs)
        except Exception as error:
            self.drop(session, error)
            return None

    def drop(self, session: DraftSession, error: Exception) -> None:
        """Forget the draft that a fault came from. Its sequence is opened anew if it goes on."""
        self.record(error, f"session {session.number} is forgotten")
        self._store.drop(session)

    def record(self, error: Exception, loss: str) -> None:
        """Count a fault; `loss` says what it costs."""
        self.count += 1
        kind = _kind(error)
        if kind not in self._known:
            self._known.add(kind)
            # An error's words may come from outside: they are cut, and cannot break the line.
            trace = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s: %s; more of its kind are only counted\n%s", loss, repr(error)[:200], trace)


def _kind(error: Exception) -> tuple[type[Exception], CodeType | None, int]:
    """What was raised, and where."""
    code, line = None, 0
    for frame, number in traceback.walk_tb(error.__traceback__):
        code, line = frame.f_code, number
    return type(error), code, line


class UndraftableSequences:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: OrderedDict[bytes, Counter[Reason]] = OrderedDict()  # the last to be noted last
        self._total: Counter[Reason] = Counter()

    def record(self, namespace: bytes, reason: Reason, value: int, limit: int) -> None:
        """Count a text; `value` is what is beyond the `limit`, for the log."""
        with self._lock:
            is_first = not self._total[reason]
            self._total[reason] += 1
            self._counts.setdefault(namespace, Counter())[reason] += 1
            self._counts.move_to_end(namespace)
            if len(self._counts) > _MAX_NAMESPACES:
                self._counts.popitem(last=False)
        if is_first:
            log.warning(_MESSAGES[reason] + "; further ones are only counted", value, limit)

    def counts(self, namespace: bytes | None = None) -> dict[Reason, int]:
        """How many there were, by reason: of one namespace, or of all."""
        with self._lock:
            counter = self._total if namespace is None else self._counts.get(namespace, Counter())
            return {reason: counter[reason] for reason in REASONS}
