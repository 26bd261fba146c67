"""The planner. A method of speculative decoding is a few answers over the same draft tree.

A planner decides what is drafted and what is submitted, never what is accepted. So by rule A, the default, no planner
can change the output distribution. Where tokens are drawn by chance (`Node.drawn_from`, rule B) there is one condition:
whether one is submitted may depend on the distribution that it was drawn from, not on which token it is, nor on what
follows it.

One planner object serves one sequence. It is asked on every verdict, so its answers must cost microseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from specbranch.core.node import Node
from specbranch.core.planners.settings import Settings
from specbranch.core.round import Round, Signal
from specbranch.core.verdict import Verdict

S = TypeVar("S", bound=Settings)


class Predictor(Protocol):
    """H-RAD, or a stand-in for it. It sees the round that has just begun."""

    def predict(self, round: Round) -> Signal:
        """What will become of the next window of draft tokens."""
        ...


class Planner(ABC, Generic[S]):
    """What to submit and when, what to prepare, and what to learn from a verdict.

    Made by `planner(settings, predictor)`, where `settings` is of `settings_type`. A planner that is asked for by name
    is registered by `specbranch.register_planner`.
    """

    settings_type: ClassVar[type[Settings]] = Settings
    # Whether the planner asks its predictor. A trained one must then have been trained for windows of `gamma` tokens.
    asks_predictor: ClassVar[bool] = False

    def __init__(self, settings: S, predictor: Predictor) -> None:
        self.settings = settings
        self.predictor = predictor

    @property
    def lets_wait(self) -> bool:
        """Whether `submit` may let the target wait. Of one that never does, little time is given to the answer."""
        return True

    @abstractmethod
    def submit(self, round: Round) -> Sequence[Node] | None:
        """The chain below the root to verify now (it may be empty), or None to let the target wait for more.

        Asked after every verdict, and again after every draft step while the target waits.
        """

    @abstractmethod
    def prepare(self, round: Round) -> Sequence[Node]:
        """The nodes worth running in the next draft step, most valuable first. Asked between draft steps."""

    def foresee(self, round: Round, start: Node) -> Sequence[Node] | None:
        """What `submit` would answer if the verdict that is awaited took the sequence to `start`.

        None if that cannot be said before. A target that is told ahead need not ask.
        """
        return None

    def learn(self, round: Round, verdict: Verdict) -> None:  # most planners learn nothing
        """Take in the verdict on this round's submission, before the tree is re-rooted."""
