"""One sequence that the service drafts for: its state, its draft tree, and the engine handles that hold it.

The lookup thread and the draft thread share it; each holds its lock for microseconds at a time, never during a step.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from enum import Enum

from specbranch.core.distribution import RequestSampling
from specbranch.core.round import AcceptanceHint
from specbranch.core.session import Session
from specbranch.engines.tree_cache import TreeCache
from specbranch.service.server.tenants import ClientActivity
from specbranch.service.wire.messages import MAX_OUTCOMES, VerdictDraft
from specbranch.service.wire.payloads import Digest, pack_probs

Key = tuple[bytes, bytes]  # namespace, digest
_PAUSE_STEPS = 4  # a target of four pipeline stages tells of a sequence in every fourth step
_REST_STEPS = 32
_ACTIVE_S = 10.0  # a target that says nothing for longer has most likely ended its requests
_FAR_BEHIND = 32  # tokens yet to prefill: no draft will come soon, so no target waits for one
_DRAWN_OUTCOMES = 4  # verdicts that are answered ahead where tokens come with their distributions, 257 bytes each
_numbers = itertools.count(1)


class State(Enum):
    """What a session is doing."""

    PREPARING = "preparing"  # the draft works ahead; no target waits
    TARGET_WAITING = "awaited"  # a target waits for its draft
    PREFILLING = "behind"  # a target asked for a draft, and did not wait: there is a long prefill to do first
    UNDRAFTABLE = "undraftable"  # kept only so that its sequence is not asked for again
    DROPPED = "forgotten"  # left the store; its handles are to be closed


class DraftSession:
    """One session of the service: what is drafted, and the engine handles that hold it.

    Two threads use it. Who writes what:

    | attribute | written by | guarded by |
    |---|---|---|
    | `state`: TARGET_WAITING, PREPARING, PREFILLING | lookup thread | `set_state` |
    | `state`: DROPPED, which is final | either thread, through the store | `set_state` |
    | `core`: `commit`, `propose` | lookup thread | `lock` |
    | `core`: `rows`, `add_distribution` | draft thread | `lock` |
    | `tree_cache` | draft thread | `lock` |
    | `prefix_donor` | set by the store, taken by the draft thread | assignment |
    | step counter, digest, `pushed` | lookup thread | |
    """

    def __init__(
        self,
        namespace: bytes,
        core: Session,
        tree_cache: TreeCache,
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
        self.tree_cache = tree_cache
        self.lock = threading.Lock()
        self.state = State.PREPARING if is_draftable else State.UNDRAFTABLE
        self.is_draftable = is_draftable
        self.prefix_donor: tuple[DraftSession, int] | None = None  # who holds the same prefix, and how much of it
        self._state_lock = threading.Lock()
        self.step_counter = ClientActivity()
        self.pushed: list[VerdictDraft] = []  # ahead, of the verdict that is awaited
        self._heard = 0
        self.digest = digest

    @property
    def key(self) -> Key:
        """What the session is found by."""
        return (self.namespace, self.digest.name)

    @property
    def is_dropped(self) -> bool:
        """Whether it has left the store."""
        return self.state is State.DROPPED

    @property
    def is_target_waiting(self) -> bool:
        """Whether a target waits for its draft."""
        return self.state is State.TARGET_WAITING

    @property
    def has_verdict(self) -> bool:
        """Whether its target has begun to decode it."""
        return len(self.core.tokens) > self.core.prompt_len

    @property
    def is_paused(self) -> bool:
        """Whether its target, which has begun to decode it, went on without it: nothing is drafted until it is back."""
        return self.has_verdict and self.step_counter.steps - self._heard > _PAUSE_STEPS

    @property
    def is_idle(self) -> bool:
        """Whether its target has gone on for long without it: the request has most likely ended."""
        return self.step_counter.steps - self._heard > _REST_STEPS

    def is_active(self, now_s: float) -> bool:
        """Whether its target goes on with it: neither has left it out for some steps, nor is silent."""
        return not (self.is_paused or self.is_idle) and now_s - self.step_counter.heard_s < _ACTIVE_S

    @property
    def num_unprefilled(self) -> int:
        """Committed tokens that the draft has yet to prefill."""
        return self.tree_cache.num_unprefilled(self.core.tree)

    @property
    def is_far_behind(self) -> bool:
        """Whether so much has yet to be prefilled that no target should wait for it: others needed its cache."""
        with self.lock:
            return self.num_unprefilled > _FAR_BEHIND

    def set_state(self, state: State) -> bool:
        """Change the state; False if it cannot: a forgotten or undraftable session can only be forgotten."""
        with self._state_lock:
            if self.state is State.DROPPED or not (self.is_draftable or state is State.DROPPED):
                return False
            self.state = state
            return True

    def touch(self, step_counter: ClientActivity) -> None:
        """The target with this step counter has just sent a verdict for the session."""
        self.step_counter, self._heard = step_counter, step_counter.steps

    def commit(
        self,
        tokens: Sequence[int],
        num_submitted: int,
        hint: AcceptanceHint | None,
        sampling: RequestSampling | None = None,
        has_recurring_noise: bool = False,
    ) -> None:
        """Take in a verdict; the caller holds the lock and moves the session in the store."""
        if has_recurring_noise:
            self.core.seclude()
        self.core.commit(tokens, num_submitted, hint)
        self.core.set_sampling(sampling)
        self.digest = self.digest.extend(tokens)
        self.pushed = []

    def mark_prefetched_used(self, tokens: Sequence[int]) -> list[int]:
        """The target verifies what it was told ahead."""
        with self.lock:
            self.core.mark_submitted(tokens)
        return []

    def prefetch(self) -> list[VerdictDraft]:
        """What to submit after the verdict that is awaited, where that has changed since it was told."""
        with self.lock:
            outcomes = [
                VerdictDraft(tokens, [node.token for node in nodes], pack_probs([node.sampled_from for node in nodes]))
                for tokens, nodes in self.core.drafts_by_verdict(
                    _DRAWN_OUTCOMES if self.core.is_sampled else MAX_OUTCOMES
                )
            ]
        if outcomes == self.pushed:
            return []
        self.pushed = outcomes
        return outcomes

    def probs(self) -> bytes:
        """What the tokens under verification were drawn from."""
        with self.lock:
            return pack_probs(self.core.sampled_from) if self.core.is_sampled else b""

    def propose(self) -> list[int] | None:
        """What there is to submit; None if the target should wait for it, and then it is awaited.

        The state changes under the lock: a draft step that ends meanwhile sees it before it looks whom to notify.
        """
        with self.lock:
            proposal = self.core.propose()
            if proposal is not None:
                return proposal
            if self.num_unprefilled > _FAR_BEHIND:
                return self._propose_without_waiting()
            self.set_state(State.TARGET_WAITING)
            return None

    def propose_without_waiting(self) -> list[int] | None:
        """What there is to submit: the target waits no longer."""
        with self.lock:
            return self._propose_without_waiting()

    def _propose_without_waiting(self) -> list[int] | None:
        self.core.submit_ready()
        self.set_state(State.PREFILLING if self.num_unprefilled > 1 else State.PREPARING)
        return self.core.propose()
