"""The sessions of a service, found by content, forgotten when they are the least recently used.

A key is a namespace and the digest of the committed text. One lock guards the order of the shelf; each draft has a lock
of its own, which the lookup thread and the compute thread hold for microseconds at a time, never during a step.
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


class Pulse:
    """How many steps one target has told of."""

    def __init__(self) -> None:
        self.steps = 0


class Draft:
    """One session of the service: what is drafted, and the engine handles that hold it."""

    def __init__(self, namespace: bytes, session: Session, binding: Binding, is_mute: bool = False) -> None:
        self.number = next(_numbers)  # tells sessions apart in a trace
        self.namespace = namespace
        self.is_mute = is_mute  # remembered only so that its text is not asked for again
        self.session = session
        self.binding = binding
        self.lock = threading.Lock()
        self.is_forgotten = False
        self.is_awaited = False  # the target stands still for this one
        self.is_behind = False  # it was asked for a draft while it had a long text yet to read
        self._pulse = Pulse()
        self._heard = 0
        self.donor: tuple[Draft, int] | None = None  # who holds the beginning of this text, and how much of it
        self._digest = Digest(session.tokens)

    @property
    def is_at_rest(self) -> bool:
        """Whether its target has gone on for long without it: the request has most likely ended."""
        return self._pulse.steps - self._heard > _REST_STEPS

    def hear(self, pulse: Pulse) -> None:
        """The target with this pulse has just told of the session."""
        self._pulse, self._heard = pulse, pulse.steps

    @property
    def key(self) -> Key:
        """Where the draft stands on the shelf."""
        return (self.namespace, self._digest.name)

    def follow(self, tokens: Sequence[int], num_submitted: int, outlook: Outlook | None) -> None:
        """Take in a verdict; the caller holds the lock and moves the draft on the shelf."""
        self.session.follow(tokens, num_submitted, outlook)
        self._digest = self._digest.extend(tokens)


class Shelf:
    """Drafts by key, most recently used last; at most `max_drafts`, and at most `max_tokens` of text in all."""

    def __init__(self, max_drafts: int, max_tokens: int) -> None:
        self._max_drafts = max_drafts
        self._max_tokens = max_tokens
        self._drafts: OrderedDict[Key, Draft] = OrderedDict()
        self._prefixes: Prefixes[Draft] = Prefixes()
        self._lock = threading.Lock()
        self._num_tokens = 0
        self._forgotten: list[Draft] = []
        self._retired: OrderedDict[bytes, Stats] = OrderedDict()  # by namespace, the last to lose a session last
        self._retired_others = Stats()
        self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._drafts)

    @property
    def num_tokens(self) -> int:
        """Tokens of text on the shelf."""
        return self._num_tokens

    def find(self, key: Key) -> Draft | None:
        """The draft of a text, which is thereby the most recently used."""
        with self._lock:
            draft = self._drafts.get(key)
            if draft is not None:
                self._drafts.move_to_end(key)
            return draft

    def put(self, draft: Draft) -> None:
        """Add a draft; one with the same key makes way, and so do the oldest where the budget asks for it."""
        with self._lock:
            self._remove(self._drafts.get(draft.key))
            self._drafts[draft.key] = draft
            self._num_tokens += len(draft.session.tokens)
            draft.donor = self._prefixes.find(draft.namespace, draft.session.tokens)
            self._prefixes.add(draft, draft.namespace, draft.session.tokens)
            self._shrink()

    def follow(self, draft: Draft, tokens: Sequence[int], num_submitted: int, outlook: Outlook | None = None) -> bool:
        """Let a draft take in a verdict and move it to its new key; False if it was forgotten meanwhile."""
        with self._lock:
            if draft.is_forgotten:
                return False
            del self._drafts[draft.key]
            held = len(draft.session.tokens)
            try:
                with draft.lock:
                    draft.follow(tokens, num_submitted, outlook)
            except Exception:
                self._remove(draft)  # it stands half-way between two texts
                raise
            finally:
                self._num_tokens += len(draft.session.tokens) - held
            self._remove(self._drafts.get(draft.key))
            self._drafts[draft.key] = draft
            self._prefixes.add(draft, draft.namespace, draft.session.tokens)
            self._shrink()
            return not draft.is_forgotten

    def evict_oldest(self, spared: Sequence[Draft] = ()) -> bool:
        """Forget the least recently used draft that holds engine handles; False if there is none to forget."""
        with self._lock:
            for draft in self._drafts.values():
                if draft.binding.num_handles and draft not in spared:
                    self._remove(draft)
                    self.num_evictions += 1
                    return True
            return False

    def forget(self, draft: Draft) -> None:
        """Forget one draft."""
        with self._lock:
            self._remove(draft)

    def take_forgotten(self) -> list[Draft]:
        """Drafts forgotten since the last call. Whoever owns the engine closes their handles."""
        with self._lock:
            forgotten, self._forgotten = self._forgotten, []
            return forgotten

    def snapshot(self) -> list[Draft]:
        """All drafts, least recently used first."""
        with self._lock:
            return list(self._drafts.values())

    def stats(self) -> Stats:
        """The counters of all sessions, the forgotten ones included."""
        total = Stats()
        with self._lock:
            total.add(self._retired_others)
            for retired in self._retired.values():
                total.add(retired)
            for draft in self._drafts.values():
                total.add(draft.session.stats)
        return total

    def stats_of(self, namespace: bytes) -> tuple[int, Stats]:
        """How many sessions a namespace has, and its counters, its forgotten sessions included."""
        total = Stats()
        num_drafts = 0
        with self._lock:
            total.add(self._retired.get(namespace, Stats()))
            for draft in self._drafts.values():
                if draft.namespace == namespace:
                    num_drafts += 1
                    total.add(draft.session.stats)
        return num_drafts, total

    def _shrink(self) -> None:
        while len(self._drafts) > 1 and (len(self._drafts) > self._max_drafts or self._num_tokens > self._max_tokens):
            self._remove(next(iter(self._drafts.values())))
            self.num_evictions += 1

    def _remove(self, draft: Draft | None) -> None:
        if draft is not None and not draft.is_forgotten:
            draft.is_forgotten = True
            self._drafts.pop(draft.key, None)
            self._prefixes.remove(draft)
            draft.donor = None  # else sessions that never borrow would keep all their forerunners alive
            self._num_tokens -= len(draft.session.tokens)
            self._forgotten.append(draft)
            self._retire(draft)

    def _retire(self, draft: Draft) -> None:
        self._retired.setdefault(draft.namespace, Stats()).add(draft.session.stats)
        self._retired.move_to_end(draft.namespace)
        if len(self._retired) > _MAX_NAMESPACES:
            self._retired_others.add(self._retired.popitem(last=False)[1])
