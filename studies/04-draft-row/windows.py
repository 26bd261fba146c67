#!/usr/bin/env python3
"""How often a draft model agrees with its target when it has read only a window of the prompt.

studies/04-draft-row/windows.py MODEL [--traces traces] [--out studies/04-draft-row/windows.json]

The draft model reads the first 16 tokens of each prompt and its last ones, and then the target's answer. For each window
the file has the share of the answer's tokens that are the draft's first choice, and how many tokens were read before the
first of them.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean

from specbranch.engines.base import EngineOptions, Row
from specbranch.engines.registry import open_engine
from specbranch.engines.tree_cache import NUM_FIRST
from specbranch.machine import provenance
from specbranch.trace import Trace

TASKS = ("humaneval", "gsm8k", "summarization", "chat")
WINDOWS = (None, 256, 128, 64, 32, 16)  # None: the whole prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--traces", type=Path, default=Path("traces"))
    parser.add_argument("--answers", type=int, default=16, help="of each task")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "windows.json")
    args = parser.parse_args()
    engine = open_engine("torch", EngineOptions(args.model, threads=args.threads, dtype="int8"))
    found = []
    for task in TASKS:
        answers = Trace.read(args.traces / f"qwen-coder-{task}.jsonl.gz").answers[: args.answers]
        for window in WINDOWS:
            shares, lens, rates = [], [], []
            for answer in answers:
                prompt, tokens = list(answer.prompt), list(answer.tokens[: args.tokens])
                if window is not None and len(prompt) > NUM_FIRST + window:
                    prompt = prompt[:NUM_FIRST] + prompt[-window:]
                handle = engine.open()
                start_s = time.perf_counter()
                engine.run([Row(handle, tuple(prompt[:-1]))])
                rates.append(len(prompt) / (time.perf_counter() - start_s))
                distributions = engine.run([Row(handle, (prompt[-1], *tokens[:-1]), len(tokens))])
                engine.close(handle)
                shares.append(mean(one.ids[0] == token for one, token in zip(distributions, tokens, strict=True)))
                lens.append(len(prompt))
            found.append(
                {
                    "task": task,
                    "window": window,
                    "agreement": round(mean(shares), 4),
                    "tokens_read": round(mean(lens)),
                    "tokens_per_s": round(mean(rates)),
                }
            )
            print(json.dumps(found[-1]), flush=True)
    args.out.write_text(
        json.dumps({"provenance": provenance(), "dtype": engine.info.dtype, "windows": found}, indent=1)
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
