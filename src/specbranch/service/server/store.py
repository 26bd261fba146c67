"""The session store: quotas, the index of prefixes, the fault barrier, and sequences that get no drafts.

A tenant is a namespace or, where clients have CURVE keys, a client's key. Of its sessions, the least recently used one
is evicted first. A session's key is its namespace and the digest of its committed tokens. One lock guards the order of
the store; each session has its own lock, which both threads hold for microseconds, never during a step.

The index of prefixes knows each sequence by the digests of its first 16, 32, 48, ... tokens, so that a session can
start from another session's cache instead of a prefill.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from types import CodeType
from typing import Generic, TypeVar

from specbranch.core.round import Stats
from specbranch.service.server.draft_session import DraftSession, Key, State
from specbranch.service.wire.messages import REASONS, Reason, StepRow
from specbranch.service.wire.payloads import Digest, as_bytes

log = logging.getLogger(__name__)
_MAX_NAMESPACES = 1024  # whose dropped sessions are counted separately
_MAX_EVICTED = 1024  # sequences whose eviction is remembered until their target asks for them
MARK_LEN = 16
T = TypeVar("T")
_MESSAGES: dict[Reason, str] = {
    "too_long": "a text of %d tokens is not drafted for: the draft's KV cache has room for texts of %d; start the "
    "draft with a larger --cache-tokens",
    "foreign_token": "a text with token %d is not drafted for: the draft knows %d tokens; use a draft with the "
    "target's vocabulary",
    "no_room": "a text of %d tokens is not drafted for until it has been read again: others needed its room in the "
    "draft's KV cache of %d tokens; start the draft with larger --cache-tokens, --max-handles or --max-sessions",
}


class TenantUsage:
    """The sessions of one tenant, least recently used first, and the number of their tokens."""

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
        self._usage: OrderedDict[bytes, TenantUsage] = OrderedDict()  # by tenant, least recently used first
        self._prefixes: PrefixIndex[DraftSession] = PrefixIndex()
        self._lock = threading.Lock()
        self._num_tokens = 0
        self._dropped: list[DraftSession] = []
        self._retired: OrderedDict[bytes, Stats] = (
            OrderedDict()
        )  # of dropped sessions, by namespace; the one that lost a session last is at the end
        self._retired_total = Stats()
        self._evicted: OrderedDict[Key, int] = OrderedDict()  # key and length of evicted sequences
        self.num_evictions = 0
        self.is_draining = False  # no new sequences are accepted; the lookup thread writes it
        self.undrafted = UndraftableSequences()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all sequences together."""
        return self._num_tokens

    def find(self, key: Key) -> DraftSession | None:
        """Return the session of a sequence and make it the most recently used; None if there is none."""
        with self._lock:
            session = self._sessions.get(key)
            if session is not None:
                self._sessions.move_to_end(key)
                self._usage.move_to_end(session.tenant)
                self._usage[session.tenant].sessions.move_to_end(session)
            return session

    def put(self, session: DraftSession) -> None:
        """Add a session, in place of one with the same key, and evict others if the limits require it.

        Also set the session's `prefix_donor`, if an earlier session has a prefix in common with it.
        """
        with self._lock:
            self._remove(self._sessions.get(session.key))
            self._sessions[session.key] = session
            self._usage.setdefault(session.tenant, TenantUsage()).sessions[session] = None
            self._usage.move_to_end(session.tenant)
            self._count_tokens(session, len(session.core.tokens))
            if session.is_draftable:
                session.prefix_donor = self._prefixes.add(session, session.namespace, session.core.tokens)
            self._shrink()

    def commit(self, session: DraftSession, row: StepRow) -> bool:
        """Commit the verdict of a row to a session and move the session to its new key, evicting others if needed.

        Return False if the session was dropped meanwhile.
        """
        with self._lock:
            if session.is_dropped:
                return False
            del self._sessions[session.key]
            held = len(session.core.tokens)
            try:
                with session.lock:
                    session.commit(row)
            except Exception:
                self._count_tokens(session, len(session.core.tokens) - held)
                self._remove(session)  # it is half-way between two sequences
                raise
            self._count_tokens(session, len(session.core.tokens) - held)
            if session.key in self._sessions:
                self._remove(self._sessions[session.key])
            self._sessions[session.key] = session
            if session.is_draftable:
                self._prefixes.add(session, session.namespace, session.core.tokens)
            self._shrink()
            return session.state is not State.DROPPED

    def evict_for(self, wanting: Sequence[DraftSession], weight: Callable[[DraftSession], float]) -> None:
        """Evict one session to free tokens and handles of the engine for the sessions in `wanting`.

        `weight` is the share of the engine that a session takes. The tenant with the largest share loses its least
        recently used session that is not in `wanting`; if it has none, its heaviest session in `wanting`.
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
        """Delete the record of a sequence's eviction, and return the sequence's length; None if there is no record."""
        with self._lock:
            return self._evicted.pop(key, None)

    def drop(self, session: DraftSession) -> None:
        """Remove a session; the draft thread closes its handles later (`pop_dropped`)."""
        with self._lock:
            self._remove(session)

    def pop_dropped(self) -> list[DraftSession]:
        """Return the draftable sessions dropped since the last call.

        The draft thread, which owns the engine, calls this and closes their handles.
        """
        if not self._dropped:  # as nearly always before a draft step
            return []
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def snapshot(self) -> list[DraftSession]:
        """Return all sessions, least recently used first."""
        with self._lock:
            return list(self._sessions.values())

    def num_active(self, now_s: float) -> int:
        """Return how many sessions are being decoded at time `now_s`."""
        return sum(session.is_active(now_s) for session in self.snapshot())

    def stats(self) -> Stats:
        """Return the sum of the counters of all sessions, dropped ones included. The lock is free during the sum."""
        with self._lock:
            retired, sessions = replace(self._retired_total), list(self._sessions.values())
        return Stats.total([retired, *(session.core.stats for session in sessions)])

    def stats_of(self, namespace: bytes) -> tuple[int, Stats]:
        """Return the number of sessions of a namespace, and the sum of their counters and those of dropped sessions."""
        with self._lock:
            retired = replace(self._retired.get(namespace, Stats()))
            sessions = [session for session in self._sessions.values() if session.namespace == namespace]
        return len(sessions), Stats.total([retired, *(session.core.stats for session in sessions)])

    def _shrink(self) -> None:
        while len(self._sessions) > 1 and (
            len(self._sessions) > self._max_sessions or self._num_tokens > self._max_tokens
        ):
            is_crowded = len(self._sessions) > self._max_sessions
            # Among equal tenants `max` finds the first, which is the least recently used.
            key = len if is_crowded else attrgetter("num_tokens")
            self._evict(max(self._usage.values(), key=key).oldest)

    def _count_tokens(self, session: DraftSession, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        self._usage[session.tenant].num_tokens += num_tokens

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
            session.prefix_donor = None  # a chain of donors would keep all earlier sessions alive
            self._count_tokens(session, -len(session.core.tokens))
            del self._usage[session.tenant].sessions[session]
            if not self._usage[session.tenant].sessions:
                del self._usage[session.tenant]
            if session.is_draftable:  # an undraftable session has no handles to close
                self._dropped.append(session)
            self._retire(session)

    def _retire(self, session: DraftSession) -> None:
        self._retired_total.add(session.core.stats)
        self._retired.setdefault(session.namespace, Stats()).add(session.core.stats)
        self._retired.move_to_end(session.namespace)
        if len(self._retired) > _MAX_NAMESPACES:
            self._retired.popitem(last=False)


class PrefixHashes:
    """The digests of one growing sequence, one for every `MARK_LEN` tokens."""

    def __init__(self) -> None:
        self._digest = Digest()
        self.num_hashed = 0

    def extend(self, tokens: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield length and digest of each prefix that is longer than those of earlier calls; `tokens` is the sequence.

        The lengths are multiples of `MARK_LEN`.
        """
        num_marks = (len(tokens) - self.num_hashed) // MARK_LEN
        packed = as_bytes(tokens[self.num_hashed : self.num_hashed + num_marks * MARK_LEN])  # at once, for long ones
        mark_size = len(packed) // max(num_marks, 1)
        for start in range(0, len(packed), mark_size or 1):
            self._digest.update(packed[start : start + mark_size])
            self.num_hashed += MARK_LEN
            yield self.num_hashed, self._digest.name


class PrefixIndex(Generic[T]):
    """Finds the latest holder, such as a session, of a sequence's prefix.

    It has one entry for every sixteen tokens of a holder's sequence.
    """

    def __init__(self) -> None:
        self._holders: dict[Key, T] = {}
        self._marks: dict[T, tuple[PrefixHashes, list[Key]]] = {}

    def add(self, holder: T, namespace: bytes, tokens: Sequence[int]) -> tuple[T, int] | None:
        """Index `holder` for those prefixes of `tokens`, its whole sequence, for which it is not indexed yet.

        For these prefixes `holder` replaces earlier holders. Return the earlier holder of the longest of the prefixes,
        the whole sequence excepted, and the prefix's length; None if there was no earlier holder.
        """
        if holder not in self._marks:
            self._marks[holder] = (PrefixHashes(), [])
        hashes, keys = self._marks[holder]
        if len(tokens) - hashes.num_hashed < MARK_LEN:
            return None
        found = None
        for length, name in hashes.extend(tokens):
            before = self._holders.get((namespace, name))
            if before is not None and length < len(tokens):
                found = (before, length)
            self._holders[namespace, name] = holder
            keys.append((namespace, name))
        return found

    def remove(self, holder: T) -> None:
        """Remove a holder and its prefixes."""
        _, keys = self._marks.pop(holder, (None, []))
        for key in keys:
            if self._holders.get(key) is holder:
                del self._holders[key]

    def find(self, namespace: bytes, tokens: Sequence[int]) -> tuple[T, int] | None:
        """Return the holder of a sequence's longest known prefix and that prefix's length; None if none is known.

        The whole sequence does not count as a prefix.
        """
        found = None
        for length, name in PrefixHashes().extend(tokens[:-1]):
            holder = self._holders.get((namespace, name))
            if holder is not None:
                found = (holder, length)
        return found


class FaultGuard:
    """The fault barrier of one thread: logs the first exception of each kind, counts all, drops sessions at fault."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._known: set[tuple[type[Exception], CodeType | None, int]] = set()
        self.count = 0

    @contextlib.contextmanager
    def guard(self, session: DraftSession) -> Iterator[None]:
        """Suppress an `Exception` that the block raises while it works on a session; record it, drop the session."""
        try:
            yield
        except Exception as error:
            self.drop(session, error)

    def drop(self, session: DraftSession, error: Exception) -> None:
        """Record an exception, and drop the session that caused it; its client can open the sequence again."""
        self.record(error, f"session {session.number} is dropped")
        self._store.drop(session)

    def record(self, error: Exception, loss: str) -> None:
        """Count an exception, and log it if it is the first of its kind; `loss` names the consequence in the log."""
        self.count += 1
        kind = _kind(error)
        if kind not in self._known:
            self._known.add(kind)
            # An error's text may hold a client's words: `repr` keeps it on one line, and it is cut.
            trace = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s: %s; more of its kind are only counted\n%s", loss, repr(error)[:200], trace)


def _kind(error: Exception) -> tuple[type[Exception], CodeType | None, int]:
    """Return the type of an exception, and the code and the line number that raised it."""
    code, line = None, 0
    for frame, number in traceback.walk_tb(error.__traceback__):
        code, line = frame.f_code, number
    return type(error), code, line


class UndraftableSequences:
    """Counts sequences that get no drafts, by namespace and reason. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: OrderedDict[bytes, Counter[Reason]] = OrderedDict()  # least recently counted first
        self._total: Counter[Reason] = Counter()

    def record(self, namespace: bytes, reason: Reason, value: int, limit: int) -> None:
        """Count a sequence without drafts; log the first for each `reason`, with the `value` beyond the `limit`."""
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
        """Return how many sequences got no drafts, by reason, in one namespace or (None) in all."""
        with self._lock:
            counter = self._total if namespace is None else self._counts.get(namespace, Counter())
            return {reason: counter[reason] for reason in REASONS}
