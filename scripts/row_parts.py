#!/usr/bin/env python3
"""Where the time of one draft row goes: products of packed weights, and everything else.

A draft of torch in 8 bits on one core. The whole row is timed as it is; the products' part is taken from torch's
profiler, which slows small operations but hardly them. Writes results/row_parts.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from statistics import median

from torch.profiler import ProfilerActivity, profile

from specbranch.bench.profile import provenance
from specbranch.engines.options import EngineOptions, open_engine
from specbranch.engines.protocol import DraftEngine, Row
from specbranch.engines.screened import LEARNED

ROOT = Path(__file__).parents[1]
_PRODUCT = "onednn::qlinear_pointwise"
_CONTEXT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", help="a model of Transformers")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "row_parts.json")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    engine = open_engine("torch", EngineOptions(args.draft, threads=1, dtype="int8"))
    order = random.Random(0)
    vocab = engine.info.vocab_len
    for _ in range(LEARNED // _CONTEXT + 1):  # then the output layer has learned
        _text(engine, [order.randrange(vocab) for _ in range(_CONTEXT)])
    handle = engine.open()
    engine.run([Row(handle, tuple(order.randrange(vocab) for _ in range(_CONTEXT)))])
    times_ms = []
    for _ in range(args.steps):
        begin_s = time.perf_counter()
        engine.run([Row(handle, (order.randrange(vocab),))])
        times_ms.append(1e3 * (time.perf_counter() - begin_s))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(args.steps):
            engine.run([Row(handle, (order.randrange(vocab),))])
    events = profiler.key_averages()
    products_ms = sum(one.self_cpu_time_total for one in events if one.key == _PRODUCT) / args.steps / 1e3
    calls = sum(one.count for one in events) / args.steps
    engine.shutdown()
    found = {
        "draft": Path(args.draft).name,
        "row_ms": round(median(times_ms), 1),
        "products_ms": round(products_ms, 1),
        "operations": round(calls),
    }
    print(found)
    args.out.write_text(json.dumps({**found, "provenance": provenance()}, indent=1) + "\n")


def _text(engine: DraftEngine, tokens: list[int]) -> None:
    handle = engine.open()
    engine.run([Row(handle, tuple(tokens))])
    engine.close(handle)


if __name__ == "__main__":
    main()
