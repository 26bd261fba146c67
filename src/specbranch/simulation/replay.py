"""Scripts that replay a trace: a target that says what it said, and a draft with the distributions that it had.

The first token of a sequence names the answer, and the prompt follows, if it was recorded: see `prompt_of`. A sequence
that leaves the recorded answer can never come back to it; there, and where no distribution was recorded, the draft goes
on with a recorded distribution from another place, picked by the sequence's hash, so that planners see distributions of
the usual kind also on branches that are bound to lose.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from specbranch.core.distribution import Distribution
from specbranch.trace import Answer, Trace

_Place = tuple[int, int]  # answer, number of its tokens read; negative within the prompt
_START = -1
_MODULUS = (1 << 61) - 1  # a Mersenne prime


def prompt_of(trace: Trace, index: int) -> tuple[int, ...]:
    """What a session for an answer of a trace begins with."""
    return (index, *trace.answers[index].prompt)


class _ReplayScript:
    """States: `_START`, a place on a recorded answer, or the hash of a sequence that has left it."""

    def __init__(self, trace: Trace) -> None:
        self._answers = trace.answers
        self._distributions = [
            distribution for answer in trace.answers for distribution in answer.distributions if distribution.ids
        ]
        said = (token for answer in trace.answers for token in answer.tokens)
        self.vocab_len = 1 + max(*said, *(max(distribution.ids) for distribution in self._distributions))

    def start(self) -> int:
        return _START

    def advance(self, state: Any, token: int) -> _Place | int:
        if state == _START:
            return (token, -len(self._answers[token].prompt))
        if not isinstance(state, tuple):
            return _mix(state, token)
        index, length = state
        answer = self._answers[index]
        if length < 0 or (length < len(answer.tokens) and answer.tokens[length] == token):
            return (index, length + 1)
        return _mix(index * 1_000_003 + length, token)

    def _answer_at(self, state: Any) -> tuple[Answer, int] | None:
        if not isinstance(state, tuple):
            return None
        index, length = state
        answer = self._answers[index]
        return (answer, length) if 0 <= length < len(answer.tokens) else None


class ReplayDraft(_ReplayScript):
    """The draft of a trace."""

    def distribution(self, state: Any) -> Distribution:
        on_path = self._answer_at(state)
        if on_path:
            answer, length = on_path
            if answer.distributions[length].ids:
                return answer.distributions[length]
        return self._distributions[hash(state) % len(self._distributions)]


class ReplayTarget(_ReplayScript):
    """The target of a trace: certain of what it said."""

    def distribution(self, state: Any) -> Distribution:
        on_path = self._answer_at(state)
        if on_path:
            answer, length = on_path
            return _certain(answer.tokens[length])
        return _certain(0)


@lru_cache(maxsize=4096)
def _certain(token: int) -> Distribution:
    return Distribution((token,), (1.0,), 0.0)


def _mix(value: int, token: int) -> int:
    return (value * 6_364_136_223_846_793_005 + token + 1_442_695_040_888_963_407) % _MODULUS
