"""Decode the same prompts with bare vLLM and through the proposer with every planner; print one JSON document.

At last a few of them with a service that proposes a token which the target does not have: vLLM fails at such a one.
With `--text` there is no service, and the proposer drafts from the text alone.

A program of its own: vLLM keeps global state, and its environment must be set before it is imported.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from specbranch.core.planners import PLANNERS
from specbranch.launch.vllm_engine import describe_engine
from specbranch.plugins.vllm.settings import ProposerSettings, proposer_arguments, read_settings
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from tests.service.rogue import rogue
from tests.vllm.runs import draft_service, drafting, num_equal, proposer_of, tokens_of

SUBJECTS = ("water", "the moon", "a fox", "bread", "winter", "music", "the sea", "numbers")
FEW = 4
BEGINNINGS = ("Here is a story about", "The most important fact about", "def count_words(text):  #", "A poem about")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--text", action="store_true", help="no draft: compare with drafts from the text alone")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()

    from vllm import LLM, SamplingParams

    prompts = [f"{start} {subject}" for subject in SUBJECTS for start in BEGINNINGS][: args.prompts]
    greedy = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    common: dict[str, Any] = {
        "model": str(args.target),
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
        "max_num_seqs": 32,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
    }
    if args.text:
        print(json.dumps(_from_the_text(common, prompts, greedy)))
        return
    with draft_service(str(args.draft)) as address:
        bare = LLM(**common)
        texts = {"bare": tokens_of(bare.generate(prompts, greedy, use_tqdm=False))}
        del bare
        llm = LLM(
            **common,
            speculative_config={
                "method": "custom_class",
                "model": "specbranch.plugins.vllm.SpecBranchProposer",
                "num_speculative_tokens": 4,
            },
            additional_config={"specbranch": {"address": address, "planner": "pearl", "is_gated": False}},
        )
        proposer = proposer_of(llm)
        counts = {}
        for planner in PLANNERS:
            settings = {} if planner == "none" else {"gamma": 4}
            client = DraftClient(ClientOptions(address, planner, settings, deadline_s=60.0))
            client.hello(90.0)
            proposer.core._client = client
            texts[planner] = tokens_of(llm.generate(prompts, greedy, use_tqdm=False))
            counts[planner] = {
                "calls": client.counts.calls,
                "answered": client.counts.answered,
                "faults": client.counts.faults,
            }
    accepted = _accepted(llm)
    with tempfile.TemporaryDirectory() as directory, rogue(Path(directory), "foreign") as service:
        proposer.configure(read_settings(drafting(service.address)["additional_config"]["specbranch"]))
        few = tokens_of(llm.generate(prompts[:FEW], greedy, use_tqdm=False))
    wrong = {"equal": num_equal(texts["bare"][:FEW], few), "foreign": proposer.counts()["unknown_token"]}
    equal = {name: num_equal(texts["bare"], text) for name, text in texts.items()}
    result = {"prompts": len(prompts), "equal": equal, "counts": counts, "accepted": accepted, "wrong": wrong}
    print(json.dumps({**result, "versions": describe_engine(llm).versions}))


def _from_the_text(common: dict[str, Any], prompts: list[str], greedy: Any) -> dict[str, Any]:
    """Decode with bare vLLM, and then twice with drafts from the text: the second time all was said before."""
    from vllm import LLM

    bare = LLM(**common)
    texts = tokens_of(bare.generate(prompts, greedy, use_tqdm=False))
    del bare
    settings = ProposerSettings(address=None, settings={"cost_aware": False})
    llm = LLM(**common, **proposer_arguments(settings, 4))
    equal, accepted = [], []
    for _ in range(2):
        equal.append(num_equal(texts, tokens_of(llm.generate(prompts, greedy, use_tqdm=False))))
        accepted.append(_accepted(llm))
    proposer = proposer_of(llm)
    counts, is_alone = proposer.counts(), proposer.core._client is None
    return {"prompts": len(prompts), "equal": equal, "accepted": accepted, "counts": counts, "is_alone": is_alone}


def _accepted(llm: Any) -> float:
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_accepted_tokens":
            return float(metric.value)
    return -1.0


if __name__ == "__main__":
    main()
