"""Sample with bare vLLM and with draft tokens that are drawn by chance; print one JSON document.

The draft is the target itself, packed. So its tokens are drawn at another temperature than the target's, which is as
good as any other distribution as long as it is the one that is told. The last sample has probabilities that are wrong
on purpose: the tokens were drawn from others. It must be noticed.

A program of its own: vLLM keeps global state, and its environment must be set before it is imported.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np

from specbranch.core.sampling import Sampling
from specbranch.plugins.vllm.compat import engine, probs
from specbranch.plugins.vllm.compat.probs import DraftProbs, sampling_of
from specbranch.plugins.vllm.exactness.prompts import COIN
from specbranch.plugins.vllm.exactness.statistics import compare_counts, count_pairs
from tests.vllm.levels import FALSE_ALARM, MOST_TESTS
from tests.vllm.runs import draft_service, drafting, proposer_of, squared

PROMPT = COIN
SAMPLINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top-k 5, penalties": {"temperature": 1.0, "top_k": 5, "presence_penalty": 0.5, "repetition_penalty": 1.1},
}
# The first is not drafted, and often not the second: requests with one prompt begin with one session.
NUM_TOKENS = 6
PARTS = (slice(1, 2), slice(3, 4), slice(5, 6), slice(0, 2))
PLANNER = {
    "planner": "budget",
    "rule": "auto",
    "deadline_ms": 30000,  # a step without drafts tests nothing
    "settings": {"gamma": 2, "max_rows": 2, "waits": True, "prices": False},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--first", action="store_true", help="only the first way to sample, and its wrong form")
    args = parser.parse_args()
    samplings = dict(list(SAMPLINGS.items())[:1]) if args.first else SAMPLINGS

    from vllm import LLM

    common: dict[str, Any] = {
        "model": args.target,
        "dtype": "float32",
        "max_model_len": 64,
        "enforce_eager": True,
        "max_num_seqs": 4,
        "disable_log_stats": False,
        "seed": 1,
    }
    with draft_service(args.draft) as address:
        bare = LLM(**common)
        expected = {name: _sample(bare, one, args.samples) for name, one in samplings.items()}
        del bare
        gc.collect()
        common["seed"] = 2
        llm = LLM(**common, **drafting(address, **PLANNER))
        probs.sampling_of = _flatter
        _until_drafted(llm)
        found = {name: _compared(llm, one, expected[name]) for name, one in samplings.items()}
        hand_over = DraftProbs.hand_over

        def wrong(self: DraftProbs, runner: Any, drafts: Any, drawn_from: Any) -> None:
            """As if they had been drawn at an eighth of the temperature; at half of it they are nearly the target's."""
            sharp = {row: [squared(squared(squared(q))) for q in qs] for row, qs in drawn_from.items()}
            hand_over(self, runner, drafts, sharp)

        DraftProbs.hand_over = wrong  # type: ignore[method-assign]
        wrong_found = _compared(llm, SAMPLINGS["temperature 1"], expected["temperature 1"])
    print(json.dumps({"found": found, "wrong": wrong_found}))


def _flatter(parameters: Any) -> Sampling | None:
    sampling = sampling_of(parameters)
    return sampling and replace(sampling, temperature=1.8 * sampling.temperature, top_p=1.0)


def _sample(llm: Any, sampling: dict[str, Any], count: int) -> list[list[int]]:
    from vllm import SamplingParams

    parameters = SamplingParams(**sampling, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate([PROMPT] * count, parameters, use_tqdm=False)]


def _until_drafted(llm: Any) -> None:
    """Until the service knows the prompt."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s and not engine.draft_tokens(llm)[1]:
        _sample(llm, SAMPLINGS["temperature 1"], 8)


def _compared(llm: Any, sampling: dict[str, Any], expected: list[list[int]]) -> dict[str, Any]:
    """Each token behind the first by a permutation test against bare vLLM, and what was kept."""
    before, drawn = engine.draft_tokens(llm), proposer_of(llm).counts()["drawn"]
    texts = _sample(llm, sampling, len(expected))
    rng = np.random.default_rng(0)
    p_values = []
    for part in PARTS:
        one, other = ([tuple(text[part]) for text in some] for some in (texts, expected))
        p_values.append(compare_counts(*count_pairs(one, other), FALSE_ALARM / MOST_TESTS, rng).p_value)
    submitted, accepted = (after - count for after, count in zip(engine.draft_tokens(llm), before, strict=True))
    return {
        "p_values": p_values,
        "submitted": submitted,
        "accepted": accepted,
        "drawn": proposer_of(llm).counts()["drawn"] - drawn,
    }


if __name__ == "__main__":
    main()
