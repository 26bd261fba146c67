"""The sessions of a service, found by content. Where room is needed, the tenant that takes most of it forgets first.

A tenant is a namespace, or where clients have keys, a key; it forgets what it used least recently. A key is a namespace
and the digest of the committed sequence. One lock guards the order of the store; each session has
a lock of its own, which the lookup thread and the compute thread hold for microseconds at a time, never during a step.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from specbranch.core.distribution import Sampling
from specbranch.core.round import Outlook, Stats
from specbranch.core.session import Session
from specbranch.engines.tree_cache import Binding
from specbranch.service.digest import Digest
from specbranch.service.draft_probs import pack_probs
from specbranch.service.prefixes import Prefixes
from specbranch.service.undrafted import Undrafted
from specbranch.service.wire import MAX_OUTCOMES, Outcome

Key = tuple[bytes, bytes]  # namespace, digest
_MAX_NAMESPACES = 1024  # whose forgotten sessions are counted apart
_MAX_EVICTED = 1024  # sequences whose eviction is remembered until their target asks for them
_PAUSE_STEPS = 4  # a target of four pipeline stages tells of a sequence in every fourth step
_REST_STEPS = 32
_ACTIVE_S = 10.0  # a target that says nothing for longer has most likely ended its requests
_FAR_BEHIND = 32  # tokens yet to prefill: no draft will come soon, so no target waits for one
_DRAWN_OUTCOMES = 4  # verdicts that are answered ahead where tokens come with their distributions, 257 bytes each
_numbers = itertools.count(1)


class StepCounter:
    """What one target has told: how many steps, when the last, in which namespaces; and how often it was told ahead."""

    def __init__(self, client: bytes = b"") -> None:
        self.client = client
        self.steps = 0
        self.heard_s = 0.0
        self.num_ahead = 0
        self.namespaces: set[bytes] = set()


class State(Enum):
    """What a session is doing."""

    PREPARING = "preparing"  # the draft works ahead; no target waits
    AWAITED = "awaited"  # a target waits for its draft
    BEHIND = "behind"  # a target asked for a draft, and did not wait: there is a long prefill to do first
    UNDRAFTABLE = "undraftable"  # kept only so that its sequence is not asked for again
    FORGOTTEN = "forgotten"  # left the store; its handles are to be closed


class DraftSession:
    """One session of the service: what is drafted, and the engine handles that hold it.

    Two threads use it. Who writes what:

    | attribute | written by | guarded by |
    |---|---|---|
    | `state`: AWAITED, PREPARING, BEHIND | lookup thread | `turn` |
    | `state`: FORGOTTEN, which is final | either thread, through the store | `turn` |
    | `core`: `commit`, `propose` | lookup thread | `lock` |
    | `core`: `rows`, `grow` | compute thread | `lock` |
    | `binding` | compute thread | `lock` |
    | `donor` | set by the store, taken by the compute thread | assignment |
    | step counter, digest, `told` | lookup thread | |
    """

    def __init__(
        self,
        namespace: bytes,
        core: Session,
        binding: Binding,
        *,
        digest: Digest,
        tenant: bytes = b"",
        is_draftable: bool = True,
    ) -> None:
        """`digest` is of the whole sequence; without a `tenant` the namespace is one."""
        self.number = next(_numbers)  # tells sessions apart in a timeline
        self.namespace = namespace
        self.tenant = tenant or namespace
        self.core = core
        self.binding = binding
        self.lock = threading.Lock()
        self.state = State.PREPARING if is_draftable else State.UNDRAFTABLE
        self.is_draftable = is_draftable
        self.donor: tuple[DraftSession, int] | None = None  # who holds the same prefix, and how much of it
        self._state_lock = threading.Lock()
        self.step_counter = StepCounter()
        self.told: list[Outcome] = []  # ahead, of the verdict that is awaited
        self._heard = 0
        self.digest = digest

    @property
    def key(self) -> Key:
        """What the session is found by."""
        return (self.namespace, self.digest.name)

    @property
    def is_forgotten(self) -> bool:
        """Whether it has left the store."""
        return self.state is State.FORGOTTEN

    @property
    def is_awaited(self) -> bool:
        """Whether a target waits for its draft."""
        return self.state is State.AWAITED

    @property
    def has_verdict(self) -> bool:
        """Whether its target has begun to decode it."""
        return len(self.core.tokens) > self.core.prompt_len

    @property
    def is_paused(self) -> bool:
        """Whether its target, which has begun to decode it, went on without it: nothing is drafted until it is back."""
        return self.has_verdict and self.step_counter.steps - self._heard > _PAUSE_STEPS

    @property
    def is_at_rest(self) -> bool:
        """Whether its target has gone on for long without it: the request has most likely ended."""
        return self.step_counter.steps - self._heard > _REST_STEPS

    def is_active(self, now_s: float) -> bool:
        """Whether its target goes on with it: neither has left it out for some steps, nor is silent."""
        return not (self.is_paused or self.is_at_rest) and now_s - self.step_counter.heard_s < _ACTIVE_S

    @property
    def num_unread(self) -> int:
        """Committed tokens that the draft has yet to prefill."""
        return self.binding.num_unread(self.core.tree)

    @property
    def is_far_behind(self) -> bool:
        """Whether so much has yet to be prefilled that no target should wait for it: others needed its cache."""
        with self.lock:
            return self.num_unread > _FAR_BEHIND

    def turn(self, state: State) -> bool:
        """Change the state; False if it cannot: a forgotten or undraftable session can only be forgotten."""
        with self._state_lock:
            if self.state is State.FORGOTTEN or not (self.is_draftable or state is State.FORGOTTEN):
                return False
            self.state = state
            return True

    def hear(self, step_counter: StepCounter) -> None:
        """The target with this step counter has just sent a verdict for the session."""
        self.step_counter, self._heard = step_counter, step_counter.steps

    def commit(
        self,
        tokens: Sequence[int],
        num_submitted: int,
        outlook: Outlook | None,
        sampling: Sampling | None = None,
        has_recurring_noise: bool = False,
    ) -> None:
        """Take in a verdict; the caller holds the lock and moves the session in the store."""
        if has_recurring_noise:
            self.core.seclude()
        self.core.commit(tokens, num_submitted, outlook)
        self.core.sample(sampling)
        self.digest = self.digest.extend(tokens)
        self.told = []

    def adopt(self, tokens: Sequence[int]) -> list[int]:
        """The target verifies what it was told ahead."""
        with self.lock:
            self.core.adopt(tokens)
        return []

    def foresee(self) -> list[Outcome]:
        """What to submit after the verdict that is awaited, where that has changed since it was told."""
        with self.lock:
            outcomes = [
                Outcome(tokens, [node.token for node in nodes], pack_probs([node.drawn_from for node in nodes]))
                for tokens, nodes in self.core.foresee(_DRAWN_OUTCOMES if self.core.is_sampled else MAX_OUTCOMES)
            ]
        if outcomes == self.told:
            return []
        self.told = outcomes
        return outcomes

    def probs(self) -> bytes:
        """What the tokens under verification were drawn from."""
        with self.lock:
            return pack_probs(self.core.drawn_from) if self.core.is_sampled else b""

    def propose(self) -> list[int] | None:
        """What there is to submit; None if the target should wait for it, and then it is awaited.

        The state changes under the lock: a draft step that ends meanwhile sees it before it looks whom to notify.
        """
        with self.lock:
            proposal = self.core.propose()
            if proposal is not None:
                return proposal
            if self.num_unread > _FAR_BEHIND:
                return self._propose_now()
            self.turn(State.AWAITED)
            return None

    def propose_now(self) -> list[int] | None:
        """What there is to submit: the target waits no longer."""
        with self.lock:
            return self._propose_now()

    def _propose_now(self) -> list[int] | None:
        self.core.give_up()
        self.turn(State.BEHIND if self.num_unread > 1 else State.PREPARING)
        return self.core.propose()


class Holding:
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
        self._holdings: OrderedDict[bytes, Holding] = OrderedDict()  # by tenant, least recently used first
        self._prefixes: Prefixes[DraftSession] = Prefixes()
        self._lock = threading.Lock()
        self._num_tokens = 0
        self._forgotten: list[DraftSession] = []
        self._retired: OrderedDict[bytes, Stats] = OrderedDict()  # by namespace, the last to lose a session last
        self._retired_total = Stats()
        self._evicted: OrderedDict[Key, int] = OrderedDict()  # lengths
        self.num_evictions = 0
        self.is_draining = False  # nobody may add new sequences; written by the lookup thread
        self.undrafted = Undrafted()

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
            self._holdings.setdefault(session.tenant, Holding()).sessions[session] = None
            self._holdings.move_to_end(session.tenant)
            self._grow(session, len(session.core.tokens))
            if session.is_draftable:
                session.donor = self._prefixes.add(session, session.namespace, session.core.tokens)
            self._shrink()

    def commit(
        self,
        session: DraftSession,
        tokens: Sequence[int],
        num_submitted: int,
        outlook: Outlook | None = None,
        sampling: Sampling | None = None,
        has_recurring_noise: bool = False,
    ) -> bool:
        """Let a session take in a verdict and move it to its new key; False if it was forgotten meanwhile."""
        with self._lock:
            if session.is_forgotten:
                return False
            del self._sessions[session.key]
            held = len(session.core.tokens)
            try:
                with session.lock:
                    session.commit(tokens, num_submitted, outlook, sampling, has_recurring_noise)
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
            return not session.is_forgotten

    def make_room(self, wanting: Sequence[DraftSession], weight: Callable[[DraftSession], float]) -> None:
        """Forget one session, so that others find room in the engine; `weight` is the part of it that a session takes.

        The tenant that takes most loses: its least recently used session, but one that wants room only if it has no
        other there, and then the heaviest.
        """
        with self._lock:
            held = [session for session in self._sessions.values() if session.binding.num_handles]
            weights: dict[bytes, float] = {}
            for session in dict.fromkeys((*held, *wanting)):
                weights[session.tenant] = weights.get(session.tenant, 0.0) + weight(session)
            largest = max(weights, key=lambda tenant: weights[tenant])
            idle = (session for session in held if session.tenant == largest and session not in wanting)
            own = (session for session in wanting if session.tenant == largest)
            self._evict(next(idle, None) or max(own, key=weight))

    def take_evicted_len(self, key: Key) -> int | None:
        """How long a sequence was that was forgotten for want of room, if it was; told once."""
        with self._lock:
            return self._evicted.pop(key, None)

    def forget(self, session: DraftSession) -> None:
        """Forget one session."""
        with self._lock:
            self._remove(session)

    def take_forgotten(self) -> list[DraftSession]:
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
        if session is not None and session.turn(State.FORGOTTEN):
            self._sessions.pop(session.key, None)
            self._prefixes.remove(session)
            session.donor = None  # else sessions that never borrow would keep all their forerunners alive
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


def _tokens_of(holding: Holding) -> int:
    return holding.num_tokens
