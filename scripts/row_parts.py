#!/usr/bin/env python3
"""Where the time of one draft row goes: products of packed weights, and everything else.

A draft of torch in 8 bits on one core. A row is timed as it is, and with products that give what they gave before at
once; in turns, for a short and a long text behind it. Writes results/row_parts.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specbranch.bench.profile import provenance
from specbranch.engines.options import EngineOptions
from specbranch.engines.protocol import DraftEngine, Row
from specbranch.engines.registry import open_engine
from specbranch.engines.torch.head import LEARNED

ROOT = Path(__file__).parents[1]
_CONTEXTS = (256, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", help="a model of Transformers")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "row_parts.json")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    engine = open_engine("torch", EngineOptions(args.draft, threads=1, dtype="int8"))
    order = random.Random(0)
    vocab = engine.info.vocab_len
    for _ in range(LEARNED // _CONTEXTS[0] + 1):  # then the output layer has learned
        _text(engine, [order.randrange(vocab) for _ in range(_CONTEXTS[0])])
    product = torch.ops.onednn.qlinear_pointwise
    parts = []
    for context in _CONTEXTS:
        handle = engine.open()
        engine.run([Row(handle, tuple(order.randrange(vocab) for _ in range(context)))])
        times_ms: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(args.turns):
            for is_whole, spent_ms in times_ms.items():
                torch.ops.onednn.qlinear_pointwise = product if is_whole else _Remembered(product)
                for turn in range(args.steps + 1):
                    fork = engine.fork(handle, context)
                    begin_s = time.perf_counter()
                    engine.run([Row(fork, (order.randrange(vocab),))])
                    if turn:  # the first one remembers
                        spent_ms.append(1e3 * (time.perf_counter() - begin_s))
                    engine.close(fork)
        torch.ops.onednn.qlinear_pointwise = product
        engine.close(handle)
        row_ms, rest_ms = (median(times_ms[is_whole]) for is_whole in (True, False))
        parts.append({"context": context, "row_ms": round(row_ms, 1), "without_products_ms": round(rest_ms, 1)})
        print(parts[-1], flush=True)
    weight_mb = round(engine.weight_bytes / 1e6)
    engine.shutdown()
    found = {"draft": Path(args.draft).name, "weight_mb": weight_mb, "parts": parts}
    args.out.write_text(json.dumps({**found, "provenance": provenance()}, indent=1) + "\n")


class _Remembered:
    """Products that are computed once for each layer, and copied after that."""

    def __init__(self, product: Any) -> None:
        self._product = product
        self._known: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, rows: torch.Tensor, *others: Any) -> torch.Tensor:
        key = id(others[2]), len(rows)
        if key not in self._known:
            self._known[key] = self._product(rows, *others)
        return self._known[key].clone()


def _text(engine: DraftEngine, tokens: list[int]) -> None:
    handle = engine.open()
    engine.run([Row(handle, tuple(tokens))])
    engine.close(handle)


if __name__ == "__main__":
    main()
