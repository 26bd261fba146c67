#!/usr/bin/env python3
"""What a draft step costs in each type of weights, for every instruction set that oneDNN can be held to here.

Rows are timed in turns in one process for each limit, so that the machine's noise hits all types alike. The same model
as GGUF in llama.cpp, which no limit of oneDNN changes, is the yardstick. Also: what `auto` takes and how long it takes to
be ready. Writes draft_types-NAME.json, where NAME is the strongest instruction set of this CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from specbranch.bench.profile import measure
from specbranch.engines.base import DraftEngine, EngineOptions, Row
from specbranch.engines.registry import engine_for, open_engine
from specbranch.machine import onednn_limits, provenance

HERE = Path(__file__).parent
ROWS = (1, 4, 8, 16)
DTYPES = ("int8", "w8a16", "bfloat16", "float32")
_CONTEXT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", help="a model of Transformers")
    parser.add_argument("gguf", help="the same model for llama.cpp")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--limit", help="measure in this process, and print")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    if args.limit:
        print(json.dumps(_measured(args)))
        return
    where = provenance()
    named = where["instruction_sets"]
    by_limit = []
    for limit in onednn_limits(named):
        command = [sys.executable, __file__, args.dense, args.gguf, "--turns", str(args.turns)]
        command += ["--core", str(args.core), "--limit", limit]
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": limit, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        by_limit.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(by_limit[-1]), flush=True)
    out = HERE / f"draft_types-{named[-1]}.json"
    out.write_text(
        json.dumps({"model": Path(args.dense).name, "limits": by_limit, "provenance": where}, indent=1) + "\n"
    )


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    start_s = time.perf_counter()
    auto = _opened(args.dense, "auto")
    chosen, ready_s = auto.info.dtype, time.perf_counter() - start_s
    auto.shutdown()
    engines = {"llama.cpp": _opened(args.gguf, "auto"), **{dtype: _opened(args.dense, dtype) for dtype in DTYPES}}
    _teach(engines)
    found: dict[str, dict[int, list[float]]] = {name: {count: [] for count in ROWS} for name in engines}
    prefills: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.turns):
        for name, engine in engines.items():
            timings = measure(engine, ROWS, _CONTEXT, 3)
            prefills[name].append(timings.prefill_tokens_per_s)
            for count, spread in timings.by_rows.items():
                found[name][count].append(1e3 * spread.median_s)
    rows = {
        name: {
            "row_ms": {count: round(median(times), 1) for count, times in by_rows.items()},
            "prefill_tokens_per_s": round(median(prefills[name])),
        }
        for name, by_rows in found.items()
    }
    return {"limit": args.limit, "auto": chosen, "ready_s": round(ready_s, 1), "types": rows}


def _opened(model: str, dtype: str) -> DraftEngine:
    return open_engine(engine_for(model), EngineOptions(model, threads=1, dtype=dtype))


def _teach(engines: dict[str, DraftEngine]) -> None:
    """Let the output layers of 8 bits see traffic, as they would in service; one engine reads for all of them."""
    from specbranch.engines.torch.lm_head import LEARNED
    from specbranch.engines.torch.lm_head import LowRankOutputLayer as CandidateHead

    torch_engines: dict[str, Any] = {name: one for name, one in engines.items() if hasattr(one, "_forward")}
    models = {name: engine._forward.model for name, engine in torch_engines.items()}
    heads = [model.lm_head for model in models.values() if isinstance(getattr(model, "lm_head", None), CandidateHead)]
    reader, norm = engines["int8"], models["int8"].norm

    def learn(_: Any, __: Any, out: Any) -> None:
        for head in heads[1:]:  # the first is the reader's own
            head.observe(out)

    hook = norm.register_forward_hook(learn)
    order = random.Random(0)
    for _ in range(LEARNED // _CONTEXT + 1):
        handle = reader.open()
        reader.run([Row(handle, tuple(order.randrange(reader.info.vocab_len) for _ in range(_CONTEXT)))])
        reader.close(handle)
    hook.remove()


if __name__ == "__main__":
    main()
