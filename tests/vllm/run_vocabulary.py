"""Decode prompts with bare vLLM and with a draft of another family; print one JSON document.

A program of its own: vLLM keeps global state, and its environment must be set before it is imported.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from specbranch.plugins.vllm.metrics import Collector
from specbranch.plugins.vllm.stats_file import RUN
from tests.vllm.runs import draft_service, drafting, metric, num_equal, tokens_of

PROMPTS = ("Here is a story about the sea.", "The most important fact about bread is", "def count_words(text):")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    args = parser.parse_args()

    from vllm import LLM, SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    common: dict[str, Any] = {
        "model": str(args.target),
        "dtype": "float32",
        "max_model_len": 128,
        "enforce_eager": True,
        "max_num_seqs": 4,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
    }
    bare = LLM(**common)
    texts = tokens_of(bare.generate(PROMPTS, greedy, use_tqdm=False))
    del bare
    with draft_service(str(args.draft)) as address:
        llm = LLM(**common, **drafting(address))
        drafted = tokens_of(llm.generate(PROMPTS, greedy, use_tqdm=False))
        shown = _metrics()
    result = {
        "prompts": len(PROMPTS),
        "equal": num_equal(texts, drafted),
        "tokens": sum(map(len, texts)),
        "draft_tokens": metric(llm, "vllm:spec_decode_num_draft_tokens"),
        "metrics": shown,
    }
    print(json.dumps(result))


def _metrics() -> dict[str, float]:
    """Our metrics that are not zero, as a scrape would find them; a state by its name."""
    collector = Collector(os.environ[RUN], timeout_s=10.0)
    try:
        samples = [sample for family in collector.collect() for sample in family.samples]
    finally:
        collector.close()
    return {sample.labels.get("state", sample.name): sample.value for sample in samples if sample.value}


if __name__ == "__main__":
    main()
