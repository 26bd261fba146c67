"""One sequence that the service drafts for: its state, its draft tree, and the engine handles that hold it.

The lookup thread, which serves the clients, and the draft thread share it; each holds its lock for microseconds at a
time, never during a step.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from enum import Enum

from specbranch.core.distribution import RequestSampling
from specbranch.core.round import AcceptanceHint, Draft, Signal
from specbranch.core.session import Session
from specbranch.engines.tree_cache import TreeCache
from specbranch.service.server.tenants import ClientActivity
from specbranch.service.wire.messages import MAX_OUTCOMES, StepRow, VerdictDraft
from specbranch.service.wire.payloads import Digest, pack_probs

Key = tuple[bytes, bytes]  # namespace, digest
_MAX_MISSED_STEPS = 4  # a target of four pipeline stages sends a verdict of each sequence in every fourth step
_IDLE_STEPS = 32
_ACTIVE_S = 10.0  # a target that has sent nothing for longer has most likely ended its requests
_MAX_UNPREFILLED = 32  # with more tokens to prefill no draft comes soon, so no target waits for one
_MAX_SAMPLED_OUTCOMES = 4  # verdicts per push for rejection sampling, where a token has 257 bytes of probabilities
_numbers = itertools.count(1)


class State(Enum):
    """The state of a session: preparing, awaited by a target, in a long prefill, without drafts, or dropped."""

    PREPARING = "preparing"  # the draft works ahead; no target waits
    TARGET_WAITING = "target waiting"  # a target waits for its draft
    PREFILLING = "prefilling"  # a target asked for a draft and got none: a long prefill comes first
    UNDRAFTABLE = "undraftable"  # kept only so that clients do not open the sequence again
    DROPPED = "dropped"  # removed from the store; the draft thread closes its handles


class DraftSession:
    """One sequence of the service: its draft tree, and the engine handles that hold it.

    Two threads use it. Who writes what:

    | attribute | written by | guarded by |
    |---|---|---|
    | `state`: TARGET_WAITING, PREPARING, PREFILLING | lookup thread | `set_state` |
    | `state`: DROPPED, which is final | either thread, through the store | `set_state` |
    | `core`: `commit`, `propose` | lookup thread | `lock` |
    | `core`: `rows`, `add_distribution` | draft thread | `lock` |
    | `tree_cache` | draft thread | `lock` |
    | `prefix_donor` | set by the store, cleared by the draft thread | assignment |
    | `client`, digest, `key`, `pushed` | lookup thread | |
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
        """Create a session; `digest` is that of the whole sequence; without a `tenant` the namespace is the tenant."""
        self.number = next(_numbers)  # tells sessions apart in a timeline
        self.namespace = namespace
        self.tenant = tenant or namespace
        self.core = core
        self.tree_cache = tree_cache
        self.lock = threading.Lock()
        self.state = State.PREPARING if is_draftable else State.UNDRAFTABLE
        self.is_draftable = is_draftable
        self.prefix_donor: tuple[DraftSession, int] | None = None  # a session with the same prefix, and its length
        self._state_lock = threading.Lock()
        self.client = ClientActivity()
        self._last_step = 0  # of the client, in which it sent a verdict for this session
        self.pushed: list[VerdictDraft] = []  # the drafts last pushed for the pending verdict
        self.digest = digest
        self.key: Key = (namespace, digest.name)  # the store finds the session by it

    @property
    def is_dropped(self) -> bool:
        """Whether the store has removed the session."""
        return self.state is State.DROPPED

    @property
    def is_target_waiting(self) -> bool:
        """Whether a target waits for a draft of this session."""
        return self.state is State.TARGET_WAITING

    @property
    def has_verdict(self) -> bool:
        """Whether a target has begun to decode the sequence: a verdict was committed to it."""
        return len(self.core.tokens) > self.core.prompt_len

    @property
    def is_paused(self) -> bool:
        """Whether drafting pauses: the target left out the sequence that it decodes in more than 4 steps, or rests."""
        is_left_out = self.has_verdict and self.client.steps - self._last_step > _MAX_MISSED_STEPS
        return self.client.is_resting or is_left_out

    @property
    def is_idle(self) -> bool:
        """Whether the request has likely ended, because the target has left the sequence out of more than 32 steps."""
        return self.client.steps - self._last_step > _IDLE_STEPS

    def is_active(self, now_s: float) -> bool:
        """Return whether a target still decodes the sequence.

        The session is then neither paused nor idle, and its client has sent a message in the last 10 s.
        """
        return not (self.is_paused or self.is_idle) and now_s - self.client.last_message_s < _ACTIVE_S

    @property
    def num_unprefilled(self) -> int:
        """The number of committed tokens that the draft model has yet to prefill."""
        return self.tree_cache.num_unprefilled(self.core.tree)

    @property
    def is_far_behind(self) -> bool:
        """Whether no target should wait for a draft, because more than 32 tokens are left to prefill.

        This is the case after a loss of the cache, for example, and never if the planner waits for prefill.
        """
        with self.lock:
            return self._needs_long_prefill()

    def set_state(self, state: State) -> bool:
        """Change the state and return True; return False if that is not allowed.

        A dropped session stays dropped, and an undraftable session can only be dropped.
        """
        with self._state_lock:
            if self.state is State.DROPPED or not (self.is_draftable or state is State.DROPPED):
                return False
            self.state = state
            return True

    def touch(self, client: ClientActivity) -> None:
        """Record that `client` has just opened the sequence or sent a verdict on it; it will get prefetched drafts."""
        self.client, self._last_step = client, client.steps

    def close_handles(self) -> None:
        """Close all engine handles of the session. Called by the draft thread."""
        with self.lock:
            self.tree_cache.close()

    def commit(self, row: StepRow) -> None:
        """Commit the verdict in `row`, which changes the session's key, and discard the record of prefetched drafts.

        The caller holds the lock and moves the session in the store.
        """
        hint, sampling = row.hint, row.sampling
        self.core.max_draft_tokens = row.max_draft_tokens
        if row.has_recurring_noise:
            self.core.seclude()
        self.core.commit(row.tokens, row.num_submitted, None if hint is None else AcceptanceHint(Signal(hint.signal)))
        self.core.set_sampling(
            None
            if sampling is None
            else RequestSampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)
        )
        self.digest = self.digest.extend(row.tokens)
        self.key = (self.namespace, self.digest.name)
        self.pushed = []

    def mark_submitted(self, tokens: Sequence[int]) -> None:
        """Mark tokens of a prefetched draft, which the target verifies already, as submitted in the draft tree."""
        with self.lock:
            self.core.mark_submitted(tokens)

    def prefetch(self) -> list[VerdictDraft]:
        """Return the drafts for the likeliest next verdicts, and record them as sent; [] if they are unchanged."""
        with self.lock:
            outcomes = [
                VerdictDraft(tokens, [node.token for node in nodes], pack_probs([node.sampled_from for node in nodes]))
                for tokens, nodes in self.core.drafts_by_verdict(
                    _MAX_SAMPLED_OUTCOMES if self.core.is_sampled else MAX_OUTCOMES
                )
            ]
        if outcomes == self.pushed:
            return []
        self.pushed = outcomes
        return outcomes

    def propose(self) -> Draft | None:
        """Submit a draft and return it; or set the state TARGET_WAITING and return None if the target should wait.

        If a long prefill comes first, no target waits, and the draft is that of `propose_without_waiting`. The state
        changes under the lock, so that the end of a draft step is reported to the lookup thread only after the change.
        """
        with self.lock:
            draft = self._submit()
            if draft is not None:
                return draft
            if self._needs_long_prefill():
                return self._submit_ready()
            self.set_state(State.TARGET_WAITING)
            return None

    def propose_without_waiting(self) -> Draft | None:
        """End the target's wait, and return the draft of this round at once; the return value is never None.

        If no draft was submitted in this round, submit one: for rejection sampling all tokens drafted so far, for exact
        match an empty draft (`Session.submit_ready`).
        """
        with self.lock:
            return self._submit_ready()

    def _needs_long_prefill(self) -> bool:
        return self.num_unprefilled > _MAX_UNPREFILLED and not self.core.waits_for_prefill

    def _submit_ready(self) -> Draft | None:
        self.core.submit_ready()
        self.set_state(State.PREFILLING if self.num_unprefilled > 1 else State.PREPARING)
        return self._submit()

    def _submit(self) -> Draft | None:
        donor = self.prefix_donor  # read once: the draft thread may clear it meanwhile
        num_shared = donor[1] if donor is not None and donor[0].tree_cache.num_handles else 0
        self.core.round.num_unprefilled = max(self.num_unprefilled - 1 - num_shared, 0)
        tokens = self.core.propose()
        if tokens is None:
            return None
        return Draft(tokens, self.core.sampled_from if self.core.is_sampled else ())
