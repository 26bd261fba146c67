"""Read texts with bare vLLM and continue one greedily; print one JSON document. Texts are JSON on standard input.

The document has the log-probability of every token of the texts but the first, whether it was the likeliest one, the
continuation, and how the output layer is multiplied.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from specbranch.launch.vllm_engine import LocalEngine, LocalEngineOptions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    args = parser.parse_args()
    arguments = {"max_model_len": 512, "enforce_eager": True, "enable_prefix_caching": False}
    target = LocalEngine(
        LocalEngineOptions(args.target, arguments={**arguments, "distributed_executor_backend": "uni"})
    )
    from vllm import SamplingParams

    texts = json.load(sys.stdin)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    read = [_read(output) for output in target.llm.generate(texts, params)]
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    (answer,) = target.llm.generate([texts[0]], greedy)
    (method,) = target.llm.apply_model(lambda model: type(model.lm_head.quant_method).__name__)
    print(json.dumps({"texts": read, "answer": answer.outputs[0].text, "output_layer": method}))


def _read(output: Any) -> list[tuple[float, bool]]:
    """Of every token but the first: its log-probability, and whether it was the likeliest."""
    told = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [(found[token].logprob, found[token].rank == 1) for token, found in told]


if __name__ == "__main__":
    main()
