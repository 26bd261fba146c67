"""Decode the same prompts with tensor parallelism 2, bare and through the proposer; print one JSON document.

A program of its own, with one vLLM after the other: vLLM keeps global state, and its environment must be set before it
is imported.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions
from specbranch.plugins.vllm.settings import ProposerSettings, proposer_arguments

PROMPTS = (
    "def is_prime(n):\n",
    "# Count the words of a text\n",
    "The capital of France is",
    "class Stack:\n",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()

    bare, _ = _decode(args.target, args.tokens)
    with DraftProcess(DraftServiceOptions(args.draft, cores=[1], threads=1)) as draft:
        settings = ProposerSettings(address=draft.address, planner="sps", deadline_ms=60000, is_gated=False)
        ours, accepted = _decode(args.target, args.tokens, **proposer_arguments(settings, 4))
    equal = sum(one == other for one, other in zip(bare, ours, strict=True))
    print(json.dumps({"prompts": len(bare), "equal": equal, "accepted": accepted}))


def _decode(target: str, num_tokens: int, **arguments: Any) -> tuple[list[list[int]], float]:
    """The tokens of each answer, and how many of them were drafted."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=target,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        disable_log_stats=False,
        **arguments,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    outputs = llm.generate(list(PROMPTS), greedy, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    counters = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    accepted = float(counters.get("vllm:spec_decode_num_accepted_tokens", 0))
    llm.llm_engine.engine_core.shutdown()
    return tokens, accepted


if __name__ == "__main__":  # the workers import this module again
    main()
