"""Decode prompts with bare vLLM, one at a time; print one JSON document. Reads the prompts as JSON from standard input.

A program of its own: vLLM keeps global state, and its environment must be set before it is imported.
"""

from __future__ import annotations

import argparse
import json
import sys

from specbranch.launch.vllm_engine import LocalEngine, LocalEngineOptions, Request


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    args = parser.parse_args()
    arguments = {
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
    }
    target = LocalEngine(LocalEngineOptions(args.target, arguments=arguments))
    greedy = {"temperature": 0.0, "max_tokens": args.tokens}
    texts = []
    for prompt in json.load(sys.stdin):
        request = Request(target.encode(prompt), greedy)
        texts.append("".join(piece.text for piece in target.stream([request])))
    print(json.dumps(texts))


if __name__ == "__main__":
    main()
