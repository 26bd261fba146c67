"""The client's record of its sequences: how much of each one was sent, and the service's session of it.

A sequence of an engine only grows. `SyncedSequences` knows it by the engine's name for it, so that only new tokens are
hashed and sent, and the service gets them all even after steps in which the engine asked for no draft.

A service identifies a sequence by its id, the digest of its tokens, which every step changes. `SessionTable` follows
the id. The two cannot be one record: equal sequences have two names and one id, and the first that gets further tokens
keeps the session.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specbranch.service.wire.messages import MAX_NEW, MAX_ROWS, PrefetchPush, VerdictDraft
from specbranch.service.wire.payloads import Digest, Tokens

_MAX_SYNCED = 4096  # sequences; an engine runs fewer at once, and never says that one has ended
_MAX_SESSIONS = MAX_ROWS  # enough for all rows of a step; beyond it the least recently used are dropped
_TAIL = 8  # tokens that must still be the same, in case an engine uses a name twice


class SequenceDelta(NamedTuple):
    """How a sequence has grown since it was last sent: its id before the new tokens, these tokens, its id with them.

    An id is the digest of all tokens of the sequence. `seed` is for sampling its draft tokens; 0 if the engine has
    given no name for the sequence (`SequenceUpdate.name`).
    """

    before: bytes
    new: list[int]
    after: bytes
    seed: int = 0


@dataclass(slots=True)
class _Synced:
    """The number of tokens of one sequence that were sent, with its id and its seed."""

    length: int
    tail: bytes  # its last tokens
    digest: Digest
    id: bytes
    seed: int


class SyncedSequences:
    """Records how much of each sequence was sent, by the engine's name for it. Clients of one target may share it."""

    def __init__(self) -> None:
        self._synced: OrderedDict[str, _Synced] = OrderedDict()

    def advance(self, name: str | None, all_tokens: Tokens, num_new: int) -> SequenceDelta:
        """Return how a sequence has grown since it was last sent, and mark all of it as sent.

        The `num_new` last tokens count as new if the name is None or new, if the sequence does not continue the one
        sent under the name, or if it has gained more tokens than a message may have. A name gets a random seed, and
        keeps it while its sequence does not get shorter; without a name the seed is 0.
        """
        tokens = np.asarray(all_tokens, dtype="<i4")
        length = len(tokens)
        known = self._synced.get(name) if name is not None else None
        if (
            known is not None
            and 0 < length - known.length <= MAX_NEW
            and tokens[: known.length][-_TAIL:].tobytes() == known.tail
        ):
            border, digest, before = known.length, known.digest, known.id
        else:
            border = length - num_new
            digest = Digest(tokens[:border])
            before = digest.name
        new = tokens[border:]
        digest.update(new.tobytes())
        after = digest.name
        if name is None:
            return SequenceDelta(before, new.tolist(), after)
        is_same = known is not None and known.length <= length
        seed = known.seed if known is not None and is_same else int.from_bytes(os.urandom(8), "little") >> 2
        self._synced[name] = _Synced(length, tokens[-_TAIL:].tobytes(), digest, after, seed)
        self._synced.move_to_end(name)
        if len(self._synced) > _MAX_SYNCED:
            self._synced.popitem(last=False)
        return SequenceDelta(before, new.tolist(), after, seed)


@dataclass(slots=True)
class SessionState:
    """A client's record of a session of a service: when it was opened, its last step, and its prefetched drafts."""

    step: int = 0  # the last step of the client that the sequence was in
    num_proposed: int = 0  # draft tokens that the client returned in that step
    opened_s: float | None = None  # when the client last sent the whole sequence
    pushed: dict[tuple[int, ...], VerdictDraft] = field(default_factory=dict)  # by the tokens of the verdict


class AdvancedSession(NamedTuple):
    """A session after a verdict: its state, and how many draft tokens the client returned for it in the step before.

    `pushed` is the draft that the service prefetched for this verdict; None if it has sent none.
    """

    session: SessionState
    num_proposed: int
    pushed: VerdictDraft | None


class SessionTable:
    """The sessions of one service by the ids of their sequences. The least recently used are evicted."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, SessionState] = OrderedDict()
        self._step = 0

    def store(self, pushes: Iterable[PrefetchPush]) -> None:
        """Store the prefetched drafts that the service has sent, in place of earlier ones for the same sequences."""
        for push in pushes:
            for row in push.rows:
                session = self._sessions.setdefault(row.before, SessionState())
                session.pushed = {tuple(outcome.committed): outcome for outcome in row.outcomes}
                self._sessions.move_to_end(row.before)
                if len(self._sessions) > _MAX_SESSIONS:
                    self._sessions.popitem(last=False)

    def advance(self, deltas: Sequence[SequenceDelta]) -> list[AdvancedSession]:
        """Begin a step: move the session of each sequence to its new id, or create one, and return them in order.

        An id changes as its sequence grows. Of equal sequences the first keeps the session; the others get new ones.
        """
        last_step, self._step = self._step, self._step + 1
        known = [self._sessions.get(delta.before) for delta in deltas]
        num_proposed = [one.num_proposed if one is not None and one.step == last_step else 0 for one in known]
        moved = [self._sessions.pop(delta.before, SessionState()) for delta in deltas]
        found = []
        for delta, num, one in zip(deltas, num_proposed, moved, strict=True):
            pushed, one.pushed = one.pushed, {}
            session = self._sessions.setdefault(delta.after, one)
            session.step, session.num_proposed = self._step, 0
            found.append(AdvancedSession(session, num, pushed.get(tuple(delta.new))))
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return found

    def clear(self) -> None:
        """Remove all sessions: another service may answer from now on."""
        self._sessions.clear()
