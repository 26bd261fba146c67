"""SSD (Saguaro): prepare for every number of accepted tokens, with fewer guesses for a number that is less likely.

With an acceptance probability a per token and a miss rate F^-r after F guesses, the best split of all guesses is F_k
proportional to P(k tokens are accepted)^(1/(1+r)). P is (1-a) a^k, but a^k if k is the length of the submission.
On a miss the draft starts at once while the target waits (`jit`), or the round goes without a draft (`fast`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from specbranch.core.node import Node
from specbranch.core.planner import Bounds, Planner, Rows, SettingError, Settings, Window
from specbranch.core.round import Round

Fallback = Literal["jit", "fast"]
MAX_NODES = 1536  # drafted tokens of all guesses of a round; planning takes time for each


@dataclass(frozen=True, slots=True)
class SsdSettings(Settings):
    """Settings of `SsdPlanner`. `gamma`: tokens per submission. `num_guesses`: candidates for the target's own token.

    `acceptance`: assumed acceptance probability of a token. `fallback`: if no candidate was right, the target
    waits for a draft (`jit`) or goes on without (`fast`). `decay`: the exponent r of the miss rate F^-r after F
    guesses. Its default was measured with Qwen2.5-Coder 1.5B and 0.5B on chat: of the tokens that are not the draft's
    first choice, 0.606 are its second or third, and 1 - 0.606 = 2^-1.34.
    """

    gamma: Window = 7
    num_guesses: Rows = 24
    acceptance: Annotated[float, Bounds(0, 1, is_open=True)] = 0.8
    decay: Annotated[float, Bounds(0, 100)] = 1.34
    fallback: Fallback = "jit"

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        num_nodes = self.gamma * self.num_guesses
        if num_nodes > MAX_NODES:
            raise SettingError(
                f"SsdSettings.gamma times num_guesses is {num_nodes}, as each guess is drafted so far; "
                f"give {MAX_NODES} at most"
            )


@lru_cache(maxsize=256)
def fan_out(num_guesses: int, submitted_len: int, acceptance: float, decay: float) -> tuple[int, ...]:
    """Divide `num_guesses` among the numbers of accepted tokens from 0 to `submitted_len`; return a count for each.

    A guess is a candidate for the target's own token after the accepted ones. `acceptance` is the acceptance
    probability of a token; after F guesses the miss rate is F^-`decay`.
    """
    stops = [(1 - acceptance) * acceptance**k for k in range(submitted_len)] + [acceptance**submitted_len]
    weights = [chance ** (1 / (1 + decay)) for chance in stops]
    shares = [num_guesses * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (counts[k] - shares[k], k))
    for k in by_remainder[: num_guesses - sum(counts)]:
        counts[k] += 1
    return tuple(counts)


class SsdPlanner(Planner[SsdSettings]):
    """The SSD method: submits drafts of a fixed length, and prepares branches for every number of accepted tokens."""

    settings_type = SsdSettings

    def submit(self, round: Round) -> Sequence[Node] | None:
        if not round.is_hit and self.settings.fallback == "fast":
            return ()
        root, gamma = round.tree.root, self.settings.gamma
        return None if round.tree.next_unrun(root, gamma) else round.tree.chain(root, gamma)

    def rows_to_run(self, round: Round) -> Sequence[Node]:
        tree, gamma = round.tree, self.settings.gamma
        if round.is_waiting:
            tip = tree.next_unrun(tree.root, gamma)
            return (tip,) if tip else ()
        tips = (tree.next_unrun(root, gamma) for root in self._roots(round))
        rows = [tip for tip in tips if tip]
        return [tree.end, *rows] if tree.end.distribution is None else rows

    def _roots(self, round: Round) -> list[Node]:
        """Return the candidates for the next root after every number of accepted tokens; draw those not drawn yet.

        The candidates for the case that all submitted tokens are accepted come first.
        """
        tree, settings = round.tree, self.settings
        stops = [tree.root, *(tree.submitted or ())]
        counts = fan_out(settings.num_guesses, len(stops) - 1, settings.acceptance, settings.decay)
        roots = list(tree.children(stops[-1], counts[-1]))
        for node, count in zip(stops[:-1], counts[:-1], strict=True):
            # The first child is the submitted token itself; these guesses are for the case that it is refused.
            roots += tree.children(node, count + 1)[1:]
        return roots
