"""Decode the same prompts with bare vLLM and with rows that are filled up with pads; print one JSON document.

The CPU gains nothing by pads, but its scheduler and runner are those of a GPU. Only greedy rows: vLLM's sampler of the
CPU is another one than the GPU's.

A program of its own: vLLM keeps global state, and its environment must be set before it is imported.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from typing import Any

from specbranch.launch import vllm_engine
from specbranch.plugins.vllm.settings import read_settings
from tests.vllm.runs import draft_service, drafting, num_equal, tokens_of

PROMPTS = ("Here is a story about water", "def count_words(text):", "Monday, Tuesday,", "A poem about bread")
SCHEMA = {"type": "object", "properties": {"won": {"type": "boolean"}}, "required": ["won"]}
FULL = 5  # tokens of a row: four of the draft and one more


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()

    from vllm import LLM

    common: dict[str, Any] = {
        "model": args.target,
        "dtype": "float32",
        "max_model_len": 128,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "disable_log_stats": False,
    }
    with draft_service(args.draft) as address:
        bare = LLM(**common)
        texts = {"bare": [*_decode(bare, args.tokens), *_decode_to_the_end(bare)]}
        del bare
        gc.collect()
        llm = LLM(**common, **drafting(address, pad="on"))
        lengths, drafts = {}, {}
        for planner in ("pearl", "none"):
            section = drafting(address, pad="on", planner=planner)["additional_config"]["specbranch"]
            vllm_engine.configure_proposers(llm, read_settings(section))
            lengths[planner] = _watch(llm)
            before = vllm_engine.draft_tokens(llm)
            texts[planner] = _decode(llm, args.tokens)
            drafts[planner] = [
                after - count for after, count in zip(vllm_engine.draft_tokens(llm), before, strict=True)
            ]
            texts[planner] += _decode_to_the_end(llm)
    equal = {name: num_equal(texts["bare"], text) for name, text in texts.items()}
    print(json.dumps({"prompts": len(texts["bare"]), "equal": equal, "lengths": lengths, "drafts": drafts}))


def _decode(llm: Any, num_tokens: int) -> list[list[int]]:
    """Plain greedy rows, then some with penalties, log-probabilities, a schema and a least length."""
    from vllm import SamplingParams

    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": num_tokens}
    special: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"logprobs": 2, "bad_words": [" the"]},
        {"structured_outputs": vllm_engine.structured_outputs(SCHEMA)},
        {"min_tokens": num_tokens},
    ]
    plain = llm.generate(list(PROMPTS), SamplingParams(**greedy), use_tqdm=False)
    mixed = llm.generate(list(PROMPTS), [SamplingParams(**greedy, **one) for one in special], use_tqdm=False)
    return tokens_of([*plain, *mixed])


def _decode_to_the_end(llm: Any) -> list[list[int]]:
    """Rows up to the longest length; near it vLLM itself puts tokens in the place of drafts."""
    from vllm import SamplingParams

    longest = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    return tokens_of(llm.generate(list(PROMPTS[:2]), longest, use_tqdm=False))


def _watch(llm: Any) -> Counter[int]:
    """How many tokens the rows of every later step have; filled while it decodes."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    found: Counter[int] = Counter()
    original = type(runner).execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        found.update(scheduler_output.num_scheduled_tokens.values())
        return original(runner, scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    return found


if __name__ == "__main__":
    main()
