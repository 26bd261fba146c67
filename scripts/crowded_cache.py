#!/usr/bin/env python3
"""What a draft row costs beside sessions that have ended but still stand in llama.cpp's cache.

One session of 256 tokens drafts; others of 1,024 tokens each are read in and left alone; at the end they are closed and
a new session takes the drafting one's place. Writes results/crowded_cache.json.
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

from specbranch.bench.profile import provenance
from specbranch.engines.options import EngineOptions
from specbranch.engines.protocol import DraftEngine, Row
from specbranch.engines.registry import open_engine

ROOT = Path(__file__).parents[1]
_RANDOM = random.Random(0)


def _text(length: int) -> tuple[int, ...]:
    return tuple(_RANDOM.randrange(1000, 20000) for _ in range(length))


def _read(engine: DraftEngine, length: int) -> int:
    handle = engine.open()
    for _ in range(0, length, 128):
        engine.run([Row(handle, _text(128))])
    return handle


def _row_ms(engine: DraftEngine, handle: int, count: int = 12) -> float:
    times = []
    for _ in range(count):
        start_s = time.perf_counter()
        engine.run([Row(handle, _text(1))])
        times.append(time.perf_counter() - start_s)
    return round(1e3 * median(times), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--others", type=int, default=5)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "crowded_cache.json")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    engine = open_engine("llamacpp", EngineOptions(args.model, threads=1))
    drafting = _read(engine, 256)
    found: list[dict[str, Any]] = [{"cells": engine.num_tokens, "row_ms": _row_ms(engine, drafting)}]
    others = []
    for _ in range(args.others):
        others.append(_read(engine, 1024))
        found.append({"cells": engine.num_tokens, "row_ms": _row_ms(engine, drafting)})
        print(found[-1], flush=True)
    for handle in others:
        engine.close(handle)
    new = _read(engine, 256)
    engine.close(drafting)
    found.append({"cells": engine.num_tokens, "row_ms": _row_ms(engine, new), "is_after_closing": True})
    engine.shutdown()
    document = {"script": "scripts/crowded_cache.py", "model": args.model, "rows": found, "provenance": provenance()}
    args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
