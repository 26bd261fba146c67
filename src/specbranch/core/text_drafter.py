"""Text drafts: n-gram drafts for the sequences of one target, made in the target's own process, without a draft model.

They follow the rules of planner `budget`. As the draft service does, a drafter keeps a session for each sequence and
past answers, and learns how often guesses are right and what it costs the target to verify them. The target's tokens
show whether a guess was right even if it was not verified. So a sequence may be left out of any number of steps; the
next call catches up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from specbranch.core.costs import PairModel
from specbranch.core.node import GreedyPicker
from specbranch.core.planner import Planner
from specbranch.core.planners import make_planner
from specbranch.core.planners.budget import BudgetPlanner, BudgetSettings
from specbranch.core.planners.predictors import CONSTANTS
from specbranch.core.session import Session

Tokens = Sequence[int] | np.ndarray[Any, np.dtype[Any]]

_MAX_SEQUENCES = 4096
_TAIL = 8  # tokens that must still be the same, in case an engine uses a name twice


@dataclass(slots=True)
class TextCounts:
    """Counters of text drafts: how many were made, their tokens, how many of these were right, and internal errors."""

    text_drafts: int = 0
    text_tokens: int = 0
    text_accepted: int = 0
    text_faults: int = 0

    def as_dict(self) -> dict[str, float]:
        """Return the counters by name."""
        return asdict(self)


class TextDrafter:
    """Drafts by n-gram lookup for the sequences of one target, which are identified by names. No call raises.

    `on_fault` is called in the handler of the first exception. Of more than `max_sequences` sequences the least
    recently used is evicted.
    """

    def __init__(
        self, settings: BudgetSettings, on_fault: Callable[[], object], max_sequences: int = _MAX_SEQUENCES
    ) -> None:
        self.counts = TextCounts()
        self._settings = replace(settings, wait_for_draft=False, takes_turns=False)  # there is no draft to wait for
        self._on_fault = on_fault
        self._max_sequences = max_sequences
        self._costs = PairModel()
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def draft(
        self, name: str, tokens: Tokens, num_new: int, max_len: int, has_recurring_noise: bool = False
    ) -> list[int]:
        """Commit the tokens since the last call for this name, and return a draft of at most `max_len` tokens.

        `tokens` is the whole sequence. If it does not continue the one known by the name, it is a new sequence, of
        which the last `num_new` tokens are the target's answer. `has_recurring_noise`: the target may draw the same
        random numbers again, for example from a seed, so the answer must not help to draft another sequence.
        """
        try:
            return self._draft(name, tokens, num_new, max_len, has_recurring_noise)
        except Exception:
            self._sessions.pop(name, None)
            self._count_fault()
            return []

    def observe_step(self, num_rows: int, num_submitted: int, num_committed: int, step_s: float) -> None:
        """Learn from the time of a target step what verifying draft tokens costs.

        The step had `num_rows` sequences and took `step_s` seconds. It verified `num_submitted` draft tokens, those of
        a draft service included, and committed `num_committed` tokens; both numbers are sums over all sequences.
        """
        try:
            self._costs.observe_step(num_rows, num_submitted, num_committed, step_s)
        except Exception:
            self._count_fault()

    def forget(self, names: Iterable[str]) -> None:
        """Discard the sessions of these sequences; their answers stay in the history, as a source of later drafts."""
        for name in names:
            self._sessions.pop(name, None)

    def _draft(self, name: str, tokens: Tokens, num_new: int, max_len: int, has_recurring_noise: bool) -> list[int]:
        session = self._synced_session(name, tokens, num_new)
        if has_recurring_noise:
            session.seclude()
        session.count_rollback()  # this adds the answer to the history
        session.round.ngrams.index_new_tokens()
        session.max_draft_tokens = max_len
        draft = (session.propose() or [])[:max_len]
        self.counts.text_drafts += bool(draft)
        self.counts.text_tokens += len(draft)
        return draft

    def _synced_session(self, name: str, tokens: Tokens, num_new: int) -> Session:
        """Commit a sequence's new tokens to its session, and return it; first create one if none fits the sequence."""
        session = self._sessions.get(name)
        num_known = len(session.tokens) if session is not None else 0
        if session is None or not _continues(tokens, session.tokens):
            num_known = max(len(tokens) - num_new, 1)
            planner = BudgetPlanner(self._settings, CONSTANTS["confidence"])
            session = Session(_as_list(tokens[:num_known]), planner, GreedyPicker(), self._costs)
            self._sessions[name] = session
        self._sessions.move_to_end(name)
        if len(self._sessions) > self._max_sequences:
            self._sessions.popitem(last=False)
        new = _as_list(tokens[num_known:])
        if new:
            num_accepted = session.stats.accepted
            session.commit(new)
            self.counts.text_accepted += session.stats.accepted - num_accepted
        return session

    def _count_fault(self) -> None:
        self.counts.text_faults += 1
        if self.counts.text_faults == 1:
            self._on_fault()


def make_text_drafter(planner: str, settings: Mapping[str, Any], on_fault: Callable[[], object]) -> TextDrafter | None:
    """Return a text drafter with the settings of a planner; None if the planner makes no n-gram drafts.

    Raise `SettingError` for an unknown planner or an invalid value.
    """
    made = make_planner(planner, settings, CONSTANTS["confidence"])
    return TextDrafter(made.settings, on_fault) if drafts_from_text(made) else None


def drafts_from_text(planner: Planner[Any]) -> bool:
    """Return whether a planner makes n-gram drafts: only `budget` does, unless its settings switch them off."""
    return type(planner) is BudgetPlanner and (planner.settings.uses_text or planner.settings.uses_memory)


def _continues(tokens: Tokens, known: Sequence[int]) -> bool:
    """Return whether `tokens` seems to continue `known`: it is no shorter, and has the last 8 tokens of `known`."""
    num_known = len(known)
    return len(tokens) >= num_known and _as_list(tokens[max(num_known - _TAIL, 0) : num_known]) == known[-_TAIL:]


def _as_list(tokens: Tokens) -> list[int]:
    return tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
