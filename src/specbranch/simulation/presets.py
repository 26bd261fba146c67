"""Model pairs with published figures, synthetic traces for them, and speeds computed by formulas.

A synthetic trace assumes a calibrated draft: where its confidence is u, the target agrees with its top-1 token with
probability u. Confidences follow a Beta distribution around the pair's acceptance. Each is independent of the one
before it, unless the pair has a `correlation`: then a confidence is that of the position before it with this
probability, so that hard and easy stretches of text arise, as in recorded traces. Tokens get new random ids at every
position, so earlier tokens say nothing about the next one.

The formulas turn published speeds into acceptance rates, and tests check the simulator against them. `gamma` is the
draft length, and c the target's step time divided by the draft's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

from specbranch.core.distribution import Distribution
from specbranch.core.round import MAX_WINDOW
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
    """A draft and a target: their speed ratio c, draft length gamma, acceptance rate, and the source of the figures.

    `c` is the time of a target step divided by that of a draft step, and `acceptance` the probability that the target
    accepts a draft token. `row_cost` is the time of each further row of a draft step, as a share of a step with one
    row. `correlation` is that of the draft's confidences at neighbouring positions of a synthetic trace, below 1.
    """

    name: str
    c: float
    gamma: int
    acceptance: float
    source: str
    _: KW_ONLY
    row_cost: float = ROW_COST
    correlation: float = 0.0


def pearl_emitted(acceptance: float, gamma: int) -> float:
    """Return how many tokens the method PEARL emits per round, computed from its two-state Markov chain.

    `acceptance` is the probability that the target accepts a draft token, `gamma` the number of draft tokens per round.
    A round in the state pre-verify yields one token, and post-verify follows if the draft had predicted that token. A
    round in post-verify yields the accepted tokens and a correction, at most gamma tokens, and post-verify follows only
    if all gamma tokens were right.
    """
    stay = acceptance**gamma
    post_share = acceptance / (acceptance + 1 - stay)
    post = sum(acceptance**k for k in range(gamma))
    return (1 - post_share) + post_share * post


def pearl_speed(acceptance: float, gamma: int, c: float) -> float:
    """Return how many times as fast as plain decoding the method PEARL is.

    `acceptance` is the probability that the target accepts a draft token, `gamma` the number of draft tokens per round,
    and `c` the time of a target step divided by that of a draft step. In a round the draft generates gamma tokens while
    the target runs one step, and the next round begins when both have ended.
    """
    return pearl_emitted(acceptance, gamma) * c / max(gamma, c)


def solve_acceptance(speed: Callable[[float], float], published: float) -> float:
    """Return the acceptance rate at which `speed`, a rising function of it, has the value `published`.

    Raise `ValueError` if there is no such rate.
    """
    low, high = 0.0, 1.0 - 1e-9
    if not speed(low) <= published <= speed(high):
        raise ValueError(f"no acceptance gives a speed of {published}")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if speed(middle) < published else (low, middle)
    return (low + high) / 2


def window_for(c: float) -> int:
    """Return gamma as the papers on PEARL and SpecBranch choose it: `c`, rounded and clamped to the valid range.

    `c` is the target's step time divided by the draft's. The range is from 1 to `MAX_WINDOW`.
    """
    return min(max(1, round(c)), MAX_WINDOW)


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
    """Return a synthetic trace with the pair's acceptance rate: `num_answers` answers of `answer_len` tokens each.

    The draft is calibrated: where its confidence is u, the target agrees with its top-1 token with probability u. Each
    distribution has `top_k` tokens.
    """
    answers = tuple(_answer(pair, answer_len, top_k, rng) for _ in range(num_answers))
    return Trace(Header(target=pair.name, draft=pair.name, task="made"), answers)


def _answer(pair: ModelPair, length: int, top_k: int, rng: random.Random) -> Answer:
    tokens, distributions, confidence = [], [], 0.0
    for position in range(length):
        *ids, tail = rng.sample(range(_VOCAB_LEN), top_k + 1)  # `tail` stands for a token outside the top-k
        if position == 0 or not pair.correlation or rng.random() >= pair.correlation:
            confidence = _confidence(pair.acceptance, rng)
        distribution = _distribution(confidence, ids)
        tokens.append(_draw(distribution, tail, rng))
        distributions.append(distribution)
    return Answer(tuple(tokens), tuple(distributions))


@dataclass(frozen=True, slots=True)
class Shape:
    """Statistics of a draft's distributions: the mean of its confidence, and how little that varies (`concentration`).

    `second_share` is the second token's share of the probability that the first token leaves; `neighbour_correlation`
    is the correlation of the confidences at neighbouring positions.
    """

    mean: float
    concentration: float
    second_share: float
    neighbour_correlation: float


def fit_shape(trace: Trace) -> Shape:
    """Return the statistics of a recorded draft, estimated from mean, variance and covariance of its confidences."""
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
    """Return a distribution over `ids` whose first token has the probability `confidence`.

    The probabilities of the other tokens fall geometrically and never exceed it.
    """
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
