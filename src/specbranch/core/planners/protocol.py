"""The planner protocol. A method of speculative decoding is three answers over the same draft tree.

A planner decides what is drafted and what is submitted, never what is accepted; no planner can change the output
distribution. One planner object serves one sequence. It is asked on every verdict, so its answers must cost
microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specbranch.core.round import Round, Signal
from specbranch.core.tree import Node
from specbranch.core.verify import Verdict


class Planner(Protocol):
    """What to submit and when, what to prepare, and what to learn from a verdict."""

    def submit(self, round: Round) -> Sequence[Node] | None:
        """The chain below the root to verify now (it may be empty), or None to let the target wait for more.

        Asked after every verdict, and again after every draft step while the target waits.
        """
        ...

    def prepare(self, round: Round) -> Sequence[Node]:
        """The nodes worth running in the next draft step, most valuable first. Asked between draft steps."""
        ...

    def learn(self, round: Round, verdict: Verdict) -> None:
        """Take in the verdict on this round's submission, before the tree is re-rooted."""
        ...


class Predictor(Protocol):
    """H-RAD, or a stand-in for it. It sees the round that has just begun."""

    def predict(self, round: Round) -> Signal:
        """What will become of the next window of draft tokens."""
        ...
