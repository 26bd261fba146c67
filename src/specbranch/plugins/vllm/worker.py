"""vLLM as a worker for measurements: orders on standard input, answers on standard output, one JSON document a line.

The first line says what to load: `model`, `section` (of our proposer), `speculative_config` (of vLLM's own methods),
bare if both are None, `num_speculative_tokens`, `arguments`, `cores`. Each further line is an order: `messages` to
answer together, `sampling`, and the `section` to `use` from now on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from specbranch.engines.options import found_model
from specbranch.plugins.vllm.target import Request, Target, TargetOptions


def main() -> None:
    """Serve until standard input closes."""
    # What vLLM prints must not come between our lines.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        options = json.loads(sys.stdin.readline())
        if options["cores"]:
            os.sched_setaffinity(0, options["cores"])
        target = _load(options)
        _say(answers, _info())
        for line in sys.stdin:
            order = json.loads(line)
            if order.get("use") is not None:
                target.use(order["use"])
            _say(answers, _generate(target, order))


def _load(options: dict[str, Any]) -> Target:
    arguments, own = options["arguments"], options["speculative_config"]
    if own is not None:
        own = {**own, "model": found_model(own["model"])} if "model" in own else own
        arguments = {**arguments, "speculative_config": own}
    section, length = options["section"], options["num_speculative_tokens"]
    return Target(TargetOptions(options["model"], section, length, arguments))


def _info() -> dict[str, Any]:
    import torch
    import transformers
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}


def _generate(target: Target, order: dict[str, Any]) -> dict[str, Any]:
    prompts = [target.encode_chat([{"role": "user", "content": text}]) for text in order["messages"]]
    requests: list[dict[str, Any]] = [{"prompt": prompt, "tokens": [], "steps": []} for prompt in prompts]
    before, verified_before = target.proposer_counts(), target.draft_tokens()
    start_s = time.monotonic()
    for piece in target.stream([Request(prompt, order["sampling"]) for prompt in prompts]):
        request = requests[piece.index]
        request["tokens"] += piece.tokens
        request["steps"].append([piece.at_s - start_s, len(piece.tokens)])
    elapsed_s = time.monotonic() - start_s
    counts = {name: count - before[name] for name, count in target.proposer_counts().items()}
    verified = [after - count for after, count in zip(target.draft_tokens(), verified_before, strict=True)]
    return {"requests": requests, "elapsed_s": elapsed_s, "counts": counts, "verified": verified}


def _say(sink: Any, document: dict[str, Any]) -> None:
    sink.write(json.dumps(document) + "\n")
    sink.flush()


if __name__ == "__main__":
    main()
