#!/usr/bin/env python3
"""How well drafts agree with a target on answers that were collected, and what their rows cost, one after the other.

Answers come from `specbranch train collect`. Writes results/draft_agreement.json.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from specbranch.bench.profile import measure, provenance
from specbranch.bench.survey import record_laws
from specbranch.engines.options import EngineOptions, engine_for, open_engine
from specbranch.engines.protocol import DraftEngine, Row
from specbranch.train.examples import read_answers, split_of

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", nargs="+", help="MODEL, or MODEL@DTYPE")
    parser.add_argument("--collection", type=Path, required=True)
    parser.add_argument("--count", type=int, default=4, help="answers of each task")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--longest", type=int, default=200, help="prompts with more tokens are left out")
    parser.add_argument("--texts", type=int, default=48, help="other answers that are read first")
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "draft_agreement.json")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    by_task: dict[str, list[tuple[list[int], list[int]]]] = {}
    for task, prompt, answer in read_answers(args.collection):
        chosen = by_task.setdefault(task, [])
        if split_of(prompt) == "test" and len(chosen) < args.count and len(answer.prompt) <= args.longest:
            chosen.append((list(answer.prompt), list(answer.tokens[: args.tokens])))
    texts = [[*one.prompt, *one.tokens] for _, name, one in read_answers(args.collection) if split_of(name) == "train"]
    rows = []
    for draft in args.drafts:
        model, _, dtype = draft.partition("@")
        engine = open_engine(engine_for(model), EngineOptions(model, threads=1, dtype=dtype or "auto"))
        if engine_for(model) == "torch":
            _read(engine, texts[:: max(1, len(texts) // args.texts)])
        agreement = {}
        for task, pairs in by_task.items():
            if pairs:
                trace = record_laws(engine, pairs)
                agreement[task] = {"greedy": trace.match_share(), "tokens": trace.num_tokens}
        timings = measure(engine, (1, 4, 8, 16), 256, 5)
        cost_ms = {count: round(1e3 * spread.median_s, 1) for count, spread in timings.by_rows.items()}
        engine.shutdown()
        rows.append({"draft": draft, "agreement": agreement, "row_ms": cost_ms})
        shares = "  ".join(f"{task} {figure['greedy']:.3f}" for task, figure in agreement.items())
        print(f"{draft:24} {shares}   rows {cost_ms}", flush=True)
    args.out.write_text(json.dumps({"drafts": rows, "provenance": provenance()}, indent=1) + "\n")


def _read(engine: DraftEngine, texts: list[list[int]]) -> None:
    """Let an engine see some traffic first, of prompts that are not asked later: its output layer learns from it."""
    for text in texts:
        handle = engine.open()
        engine.run([Row(handle, tuple(text))])
        engine.close(handle)


if __name__ == "__main__":
    main()
