"""Decode under a cache that is too small, and with prompts longer than a step: bare vLLM and with the proposer.

Prints one JSON document. A program of its own: vLLM keeps global state, and its environment must be set first.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

from tests.vllm.runs import draft_service, drafting, metric, num_equal, tokens_of

SUBJECTS = ("water", "the moon", "a fox", "bread", "winter", "music", "the sea", "numbers")
SHORT = [f"Here is a long story about {subject}." for subject in SUBJECTS]
LONG = [f"{' '.join(SHORT * 12)} The most important fact about {subject} is" for subject in SUBJECTS[:3]]
# Eight sequences of 200 tokens and more need 56 blocks; half of them do not fit.
TIGHT = {"block_size": 32, "num_gpu_blocks_override": 26, "max_model_len": 512}
SCENARIOS: dict[str, tuple[list[str], int, dict[str, Any]]] = {
    "preempted": (SHORT, 200, {**TIGHT, "enable_prefix_caching": False}),
    "preempted, prefix cache": (SHORT, 200, {**TIGHT, "enable_prefix_caching": True}),
    "chunked prefill": (
        [*SHORT[:3], *LONG],
        60,
        {"max_model_len": 2048, "max_num_batched_tokens": 64, "enable_prefix_caching": False},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    args = parser.parse_args()
    with draft_service(args.draft) as address:
        results = {name: _compare(args.target, address, *scenario) for name, scenario in SCENARIOS.items()}
    print(json.dumps(results))


def _compare(target: str, address: str, prompts: list[str], num_tokens: int, settings: dict[str, Any]) -> Any:
    from vllm import LLM, SamplingParams

    common = {
        "model": target,
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": 8,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
        **settings,
    }
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    found: dict[str, Any] = {"prompts": len(prompts)}
    texts = {}
    for name, ours in {"bare": {}, "drafted": drafting(address)}.items():
        llm = LLM(**common, **ours)
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        texts[name] = tokens_of(outputs)
        found[f"{name}_preemptions"] = metric(llm, "vllm:num_preemptions")
        found["longest_prompt"] = max(len(output.prompt_token_ids) for output in outputs)
        found["accepted"] = metric(llm, "vllm:spec_decode_num_accepted_tokens")
        del llm
        gc.collect()
    return {**found, "equal": num_equal(texts["bare"], texts["drafted"])}


if __name__ == "__main__":
    main()
