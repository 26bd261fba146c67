"""Model pairs with published figures, synthetic traces for them, and closed-form speeds.

A synthetic trace assumes a calibrated draft: where its confidence is u, the target agrees with its top-1 token with
probability u. Confidences follow a Beta distribution around the pair's acceptance, independently at each position.
Tokens get new random ids at every position, so earlier tokens say nothing about the next one.

The closed forms turn published speeds into acceptances, and tests check the simulator against them. `gamma` is the
window, c the speed ratio.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

from specbranch.core.distribution import Distribution
from specbranch.trace import Answer, Header, Trace

# Measured on traces/qwen-coder-chat.jsonl.gz, the main pair on chat, by `fit_shape`; a test checks them.
CONCENTRATION = 1.4
SECOND_SHARE = 0.44

# The cost of one more draft row as a share of a one-row step: nearly flat, as on a GPU below its ridge. An assumption.
ROW_COST = 0.03

_VOCAB_LEN = 32_000
_OFFICIAL = "gamma: the SpecBranch authors' scripts; c = gamma, as both papers choose it."
_PEARL = "gamma: the PEARL authors' scripts{}; c = gamma, as both papers choose it."


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A draft and a target: their speed ratio, their acceptance, and the source of the figures."""

    name: str
    c: float
    gamma: int
    acceptance: float
    source: str
    _: KW_ONLY
    row_cost: float = ROW_COST


def pearl_emitted(acceptance: float, gamma: int) -> float:
    """Return how many tokens PEARL emits per round, computed from its two-state Markov chain.

    Pre-verify yields one token and switches to post-verify if that token was drafted. Post-verify yields the accepted
    tokens plus a correction, at most gamma tokens, and stays only if all gamma were right.
    """
    stay = acceptance**gamma
    post_share = acceptance / (acceptance + 1 - stay)
    post = sum(acceptance**k for k in range(gamma))
    return (1 - post_share) + post_share * post


def pearl_speed(acceptance: float, gamma: int, c: float) -> float:
    """Return the speed of PEARL divided by that of plain decoding, if both models run in lock step."""
    return pearl_emitted(acceptance, gamma) * c / max(gamma, c)


def solve_acceptance(speed: Callable[[float], float], published: float) -> float:
    """Return the acceptance at which `speed`, which rises with it, gives `published`; `ValueError` if none does."""
    low, high = 0.0, 1.0 - 1e-9
    if not speed(low) <= published <= speed(high):
        raise ValueError(f"no acceptance gives a speed of {published}")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if speed(middle) < published else (low, middle)
    return (low + high) / 2


def _from_paper(name: str, gamma: int, pearl: float, source: str) -> ModelPair:
    c = float(gamma)
    acceptance = solve_acceptance(lambda a: pearl_speed(a, gamma, c), pearl)
    return ModelPair(
        name, c, gamma, acceptance, f"{source} Acceptance: PEARL's published {pearl}x, solved by its chain."
    )


PAIRS = {
    pair.name: pair
    for pair in (
        _from_paper("llama-68m-7b", 7, 1.74, _OFFICIAL),
        _from_paper("vicuna-68m-13b", 8, 1.77, _OFFICIAL),
        _from_paper("deepseek-1.3b-33b", 4, 2.93, _PEARL.format("")),
        _from_paper("llama3-8b-70b", 5, 3.38, _PEARL.format(" for Llama-2 7B and 70B, of the same size ratio")),
    )
}


def make_trace(pair: ModelPair, num_answers: int, answer_len: int, rng: random.Random, top_k: int = 32) -> Trace:
    """Return a synthetic trace with the acceptance of the pair, of `num_answers` answers with `answer_len` tokens each.

    The draft is calibrated: where its confidence is u, the target agrees with its top-1 token with probability u.
    """
    answers = tuple(_answer(pair.acceptance, answer_len, top_k, rng) for _ in range(num_answers))
    return Trace(Header(target=pair.name, draft=pair.name, task="made"), answers)


def _answer(acceptance: float, length: int, top_k: int, rng: random.Random) -> Answer:
    tokens, distributions = [], []
    for _ in range(length):
        *ids, tail = rng.sample(range(_VOCAB_LEN), top_k + 1)  # `tail` stands for a token outside the top-k
        distribution = _distribution(_confidence(acceptance, rng), ids)
        tokens.append(_draw(distribution, tail, rng))
        distributions.append(distribution)
    return Answer(tuple(tokens), tuple(distributions))


@dataclass(frozen=True, slots=True)
class Shape:
    """Statistics of a draft's distributions: the mean confidence, and how little it varies (`concentration`).

    `second_share` is the second token's share of the probability that the first one leaves; `neighbour_correlation` is
    that of the confidences at neighbouring positions.
    """

    mean: float
    concentration: float
    second_share: float
    neighbour_correlation: float


def fit_shape(trace: Trace) -> Shape:
    """Return the shape of a recorded draft, estimated from the mean, variance and covariance of its confidences."""
    runs = [[float(distribution.confidence) for distribution in answer.distributions] for answer in trace.answers]
    values = [value for run in runs for value in run]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    # A distribution that is nearly certain shows little of how the rest is spread.
    doubtful = [one for answer in trace.answers for one in answer.distributions if one.confidence < 0.95]
    second = sum(float(one.probs[1]) / (1 - float(one.probs[0])) for one in doubtful) / len(doubtful)
    products = [(a - mean) * (b - mean) for run in runs for a, b in pairwise(run)]
    return Shape(mean, mean * (1 - mean) / variance - 1, second, sum(products) / len(products) / variance)


def _confidence(acceptance: float, rng: random.Random) -> float:
    drawn = rng.betavariate(acceptance * CONCENTRATION, (1 - acceptance) * CONCENTRATION)
    return min(max(drawn, 0.01), 1 - 1e-6)


def _distribution(confidence: float, ids: Sequence[int]) -> Distribution:
    """Return a distribution over `ids` with this confidence; the others fall geometrically and never exceed it."""
    rest = 1 - confidence
    share = min(SECOND_SHARE, confidence / rest)
    probs = [confidence] + [rest * share * (1 - share) ** rank for rank in range(len(ids) - 1)]
    spread = -(share * math.log(share) + (1 - share) * math.log(1 - share)) / share
    entropy = -confidence * math.log(confidence) - rest * math.log(rest) + rest * spread
    return Distribution(tuple(ids), tuple(probs), entropy)


def _draw(distribution: Distribution, tail: int, rng: random.Random) -> int:
    left = rng.random()
    for token, prob in zip(distribution.ids, distribution.probs, strict=True):
        left -= float(prob)
        if left < 0:
            return token
    return tail
