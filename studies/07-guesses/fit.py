#!/usr/bin/env python
"""Fit how often n-gram guesses are right before any was observed, to the flagship's traces.

studies/07-guesses/fit.py [--out studies/07-guesses/prior.json]

The log odds of a guess are a constant of its source, a factor of its source times the logarithm of its match's length,
and a number for the class of its share of the votes. `core/calibration.py` has the result. Each answer is replayed with
text drafts alone. The file also says how well a fit to every other answer predicts the remaining ones.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specbranch.core.calibration import LENGTHS, MEMORY, SHARES, TEXT, Calibration, Grounds
from specbranch.core.costs import PairModel
from specbranch.core.node import GreedyPicker
from specbranch.core.planners.budget import BudgetPlanner, BudgetSettings
from specbranch.core.planners.predictors import CONSTANTS
from specbranch.core.session import Session
from specbranch.machine import provenance
from specbranch.trace import Trace

TASKS = ("humaneval", "gsm8k", "summarization", "chat")
PLAIN_S, FIRST_S, MORE_S = 0.150, 0.012, 0.005  # a step of an int8 target on two cores, and with draft tokens
RIDGE = 1e-3
Counts = dict[Grounds, tuple[int, int]]  # how many guesses were observed, and how many were right


class Tally(Calibration):
    """Counts the guesses by their grounds, beside what it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[Grounds] = Counter()
        self.right: Counter[Grounds] = Counter()

    def observe_guess(self, grounds: Grounds, is_right: bool) -> None:
        super().observe_guess(grounds, is_right)
        self.made[grounds] += 1
        self.right[grounds] += is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("traces"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "prior.json")
    args = parser.parse_args()
    traces = [Trace.read(args.traces / f"qwen-coder-{task}.jsonl.gz") for task in TASKS]
    # Of each task the first answer, then of each the second, and so on.
    rounds = [
        [(answer.prompt, answer.tokens) for answer in one]
        for one in zip(*(trace.answers for trace in traces), strict=True)
    ]
    whole, odd, even = (
        observed([answer for one in part for answer in one]) for part in (rounds, rounds[1::2], rounds[::2])
    )
    fitted = fit(whole)
    document = {
        "provenance": provenance(),
        "lines": {TEXT: fitted[:2], MEMORY: fitted[2:4]},
        "shares": [0.0, *fitted[4:]],
        "guesses": sum(made for made, _ in whole.values()),
        "nats_per_guess": {
            "nothing known": nats(even, [0.0] * len(fitted)),
            "fitted to the other half": nats(even, fit(odd)),
            "fitted to the same half": nats(even, fit(even)),
        },
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


def observed(answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Counts:
    """Replay answers with text drafts alone, and return how many guesses there were by their grounds."""
    tally = Tally()
    costs = PairModel(calibration=tally)
    for prompt, answer in answers:
        planner = BudgetPlanner(BudgetSettings(), CONSTANTS["confidence"])
        session = Session([*prompt, answer[0]], planner, GreedyPicker(), costs)
        num_done = 1
        while num_done < len(answer):
            session.round.ngrams.index_new_tokens()
            draft = session.propose() or []
            rest = answer[num_done:]
            num_accepted = 0
            while (
                num_accepted < len(draft)
                and draft[num_accepted : num_accepted + 1] == rest[num_accepted : num_accepted + 1]
            ):
                num_accepted += 1
            new = rest[: num_accepted + 1]
            session.commit(new)
            session.count_rollback()
            costs.observe_step(1, len(draft), len(new), PLAIN_S + FIRST_S * bool(draft) + MORE_S * len(draft))
            num_done += len(new)
    return {grounds: (made, tally.right[grounds]) for grounds, made in tally.made.items()}


def features(grounds: Grounds) -> list[float]:
    """Return by what the coefficients of a fit are multiplied, in their order."""
    length = np.log(LENGTHS[grounds.length])
    lines = [1.0, length, 0.0, 0.0] if grounds.source == TEXT else [0.0, 0.0, 1.0, length]
    return lines + [float(grounds.share == share) for share in range(1, len(SHARES))]


def fit(counts: Counts) -> list[float]:
    """Return the coefficients of a logistic regression, by Newton's method."""
    rows = np.array([features(grounds) for grounds in counts])
    made, right = np.array(list(counts.values()), dtype=float).T
    found = np.zeros(rows.shape[1])
    for _ in range(50):
        prob = 1 / (1 + np.exp(-rows @ found))
        slope = rows.T @ (right - made * prob) - RIDGE * found
        bend = (rows.T * (made * prob * (1 - prob))) @ rows + RIDGE * np.eye(len(found))
        found = found + np.linalg.solve(bend, slope)
    return [round(float(one), 2) for one in found]


def nats(counts: Counts, found: Sequence[float]) -> float:
    """Return the mean logarithmic loss of a fit for these guesses."""
    loss = total = 0.0
    for grounds, (made, right) in counts.items():
        prob = 1 / (1 + np.exp(-np.dot(features(grounds), found)))
        loss -= right * np.log(prob) + (made - right) * np.log(1 - prob)
        total += made
    return round(float(loss / total), 4)


if __name__ == "__main__":
    main()
