"""Send sampled requests twice with the same seed, with the memory of past answers on; print one JSON document.

Every token is a toss of a fair coin, so how often each answer must come is known. The second answer is drafted, if at
all, when the first one is in the memory. One token is drafted at a time: if it is accepted, vLLM says another one, by
the very numbers that made the proposal. Behind them the same requests without a seed show that there are drafts.

A program of its own: vLLM keeps global state, and its environment must be set before it is imported.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from specbranch.launch import vllm_engine
from specbranch.plugins.vllm.settings import proposer_arguments, read_settings
from specbranch.service.client import interface
from tests.vllm.made_models import NUM_COINS, write_coins
from tests.vllm.runs import draft_service

NUM_TOKENS = 5  # the memory looks at three before it guesses; in long answers it would find others than the first three
AT_ONCE = 64
SETTINGS: dict[str, Any] = {
    "planner": "budget",
    "is_gated": False,
    "deadline_ms": 30000,
    "rule": "match",
    # With prices this target, which takes no time, would be sent next to nothing.
    "settings": {"cost_aware": False, "uses_text": False},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=2000)
    args = parser.parse_args()
    assert args.pairs <= NUM_COINS, "each pair has a coin of its own, of which nothing is remembered before"

    from vllm import LLM

    interface._STEP_SHARE = None  # type: ignore[assignment]  # a step whose answer is late tests nothing
    with tempfile.TemporaryDirectory() as directory:
        target, draft = write_coins(Path(directory))
        with draft_service(str(draft)) as address:
            llm = LLM(
                model=str(target),
                dtype="float32",
                max_model_len=64,
                enforce_eager=True,
                max_num_seqs=AT_ONCE,
                skip_tokenizer_init=True,
                disable_log_stats=False,
                **proposer_arguments(read_settings({"address": address, **SETTINGS}), num_speculative_tokens=1),
            )
            answers: list[list[list[int]]] = [[], []]
            for start in range(0, args.pairs, AT_ONCE):
                coins = range(start, min(start + AT_ONCE, args.pairs))
                for turn in answers:
                    turn += _tosses(llm, coins, is_seeded=True)
            seeded = vllm_engine.draft_tokens(llm)
            unseeded = [toss for _ in range(4) for toss in _tosses(llm, range(AT_ONCE), is_seeded=False)]
            drafted, accepted = (now - then for now, then in zip(vllm_engine.draft_tokens(llm), seeded, strict=True))
    print(
        json.dumps(
            {
                "pairs": args.pairs,
                "first": _judged(answers[0]),
                "second": _judged(answers[1]),
                "unseeded": _judged(unseeded),
                "equal": sum(one == other for one, other in zip(*answers, strict=True)),
                "seeded_drafts": seeded[0],
                "unseeded_drafts": drafted,
                "unseeded_accepted": accepted,
            }
        )
    )


def _tosses(llm: Any, coins: Sequence[int], is_seeded: bool) -> list[list[int]]:
    """One answer of each coin, as zeros and ones; its seed is its number."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [2 * coin] * 4} for coin in coins]
    parameters = [
        SamplingParams(
            temperature=1.0,
            seed=coin if is_seeded else None,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            detokenize=False,
        )
        for coin in coins
    ]
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return [[token % 2 for token in output.outputs[0].token_ids] for output in outputs]


def _judged(answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """Chi-square over all answers that there can be, and how often the last toss is like the one before."""
    counts = Counter(map(tuple, answers))
    expected = len(answers) / 2**NUM_TOKENS
    chi_square = sum((counts[one] - expected) ** 2 for one in product((0, 1), repeat=NUM_TOKENS)) / expected
    return {"chi_square": chi_square, "alike": sum(one[-1] == one[-2] for one in answers) / len(answers)}


if __name__ == "__main__":
    main()
