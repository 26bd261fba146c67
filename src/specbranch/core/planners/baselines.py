"""Baselines: plain decoding, SpS and AdaEDL, in which the target waits for the draft, and PEARL.

Plain decoding: nothing is drafted, nothing is submitted.

SpS, plain speculative decoding: draft gamma tokens while the target waits, then verify while the draft waits.
Leviathan et al. 2023, Chen et al. 2023.

AdaEDL: plain speculative decoding that stops drafting when the entropy predicts that the next token is refused.

The entropy H of the draft distribution bounds its acceptance from below by about 1 - sqrt(eta * H). The threshold
follows the measured acceptance. The first token whose bound is below the threshold is already drafted, so this token is
submitted too.

PEARL: one chain, drafted without pause while the target verifies the tokens drafted before.

A window is gamma tokens: the root that a hit commits, and gamma - 1 tokens to submit after it. After a miss there is
nothing to submit; the target's pass over the newest token then serves as the pre-verify of the window being drafted.
Liu et al. 2025. The original moves in lock step; in this form the target never waits, which is the same while gamma is
at most c, the target's step time divided by the draft's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.distribution import Distribution
from specbranch.core.node import Node
from specbranch.core.planner import Planner, Predictor, Settings, Share, Window
from specbranch.core.round import Round, Verdict


class NonePlanner(Planner[Settings]):
    """Plain decoding by the target alone: the reference that every speed is measured against."""

    @property
    def may_block_target(self) -> bool:
        return False

    def submit(self, round: Round) -> Sequence[Node]:
        return ()

    def rows_to_run(self, round: Round) -> Sequence[Node]:
        return ()


@dataclass(frozen=True, slots=True)
class SpsSettings(Settings):
    """Settings of `SpsPlanner`. `gamma`: draft tokens per submission."""

    gamma: Window = 5


class SpsPlanner(Planner[SpsSettings]):
    """Plain speculative decoding (SpS): submits drafts of a fixed length. Draft and target take turns."""

    settings_type = SpsSettings

    def submit(self, round: Round) -> Sequence[Node] | None:
        root = round.tree.root
        return None if round.tree.next_unrun(root, self.settings.gamma) else round.tree.chain(root, self.settings.gamma)

    def rows_to_run(self, round: Round) -> Sequence[Node]:
        if not round.is_waiting:
            return ()
        tip = round.tree.next_unrun(round.tree.root, self.settings.gamma)
        return (tip,) if tip else ()


@dataclass(frozen=True, slots=True)
class AdaedlSettings(Settings):
    """Settings of `AdaedlPlanner`. `gamma`: the longest submission. `eta`: the factor of the entropy in the bound.

    `threshold`: the initial threshold; a draft ends where the acceptance bound is below the threshold.
    `acceptance_goal`: after each submission the threshold rises if the average acceptance is below this, and falls
    otherwise. `acceptance_memory`: the weight of the old value in the average acceptance. `threshold_memory`: the
    weight of the old threshold in the new one. `threshold_step`: how much higher or lower the threshold is that the old
    one is averaged with.
    """

    gamma: Window = 10
    eta: Share = 0.2
    threshold: Share = 0.5
    acceptance_goal: Share = 0.9
    acceptance_memory: Share = 0.5
    threshold_memory: Share = 0.9
    threshold_step: Share = 0.01


class AdaedlPlanner(Planner[AdaedlSettings]):
    """The AdaEDL baseline: ends a draft where its entropy predicts low acceptance. Draft and target take turns."""

    settings_type = AdaedlSettings

    def __init__(self, settings: AdaedlSettings, predictor: Predictor) -> None:
        super().__init__(settings, predictor)
        self._threshold = settings.threshold
        self._acceptance = settings.acceptance_goal

    @property
    def threshold(self) -> float:
        """The current threshold: drafting ends after a token whose predicted acceptance bound is below it."""
        return self._threshold

    def submit(self, round: Round) -> Sequence[Node] | None:
        chain, tip = self._chain(round)
        return chain if tip is None else None

    def rows_to_run(self, round: Round) -> Sequence[Node]:
        if not round.is_waiting:
            return ()
        _, tip = self._chain(round)
        return (tip,) if tip else ()

    def learn(self, round: Round, verdict: Verdict) -> None:
        if not round.tree.submitted:
            return
        settings = self.settings
        seen = verdict.accepted / len(round.tree.submitted)
        self._acceptance = _blend(self._acceptance, seen, settings.acceptance_memory)
        direction = 1 if self._acceptance < settings.acceptance_goal else -1
        aim = min(max(self._threshold + direction * settings.threshold_step, 0.0), 1.0)
        self._threshold = _blend(self._threshold, aim, settings.threshold_memory)

    def _chain(self, round: Round) -> tuple[list[Node], Node | None]:
        """Return the chain drafted so far, and the node whose distribution it needs to grow, None for a complete chain.

        A complete chain ends with the first token whose acceptance bound is below the threshold, or has `gamma` tokens.
        """
        chain: list[Node] = []
        node = round.tree.root
        while len(chain) < self.settings.gamma:
            if node.distribution is None:
                return chain, node
            children = round.tree.children(node, 1)
            chain += children
            if not children or self._bound(node.distribution) < self._threshold:
                break
            node = children[0]
        return chain, None

    def _bound(self, distribution: Distribution) -> float:
        return 1 - math.sqrt(self.settings.eta * distribution.entropy)


def _blend(old: float, new: float, memory: float) -> float:
    return memory * old + (1 - memory) * new


@dataclass(frozen=True, slots=True)
class PearlSettings(Settings):
    """Settings of `PearlPlanner`. `gamma`: tokens per window, the root included."""

    gamma: Window = 5


class PearlPlanner(Planner[PearlSettings]):
    """The PEARL baseline: submits drafted tokens at once, and drafts further ones while the target verifies these."""

    settings_type = PearlSettings

    def submit(self, round: Round) -> Sequence[Node]:
        return round.tree.chain(round.tree.root, self.settings.gamma - 1)

    def rows_to_run(self, round: Round) -> Sequence[Node]:
        if round.is_waiting:
            return ()
        tip = round.tree.next_unrun(round.tree.end, self.settings.gamma)
        return (tip,) if tip else ()
