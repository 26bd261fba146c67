"""One sequence that the service drafts for: its state, its draft tree, and the engine handles that hold it.

The lookup thread and the draft thread share it; each holds its lock for microseconds at a time, never during a step.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from enum import Enum

from specbranch.core.distribution import Sampling
from specbranch.core.round import Outlook
from specbranch.core.session import Session
from specbranch.engines.tree_cache import Binding
from specbranch.service.server.tenants import StepCounter
from specbranch.service.wire.messages import MAX_OUTCOMES, Outcome
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
