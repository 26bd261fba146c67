#!/usr/bin/env python
"""A rolling update under load: each of two draft services is drained, stopped and started again while targets decode.

The services and targets are those of `pool.py`: real processes on real sockets, whose models are scripts. A hit is a row
that gets a draft. A call fails if it raises or ends after its deadline.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import pool
from specbranch.launch.child import PIPE, Child
from specbranch.machine import provenance

RESULT = Path(__file__).parent / "rolling.json"
NUM_SERVICES, NUM_TARGETS = 2, 4
# Longer steps than in `pool.py`: the new process of a service then takes less from the cores that all share.
pool.DRAFT_STEP_S, pool.TARGET_STEP_S, pool.DEADLINE_S = 0.02, 0.125, 0.125
UPDATES_S = (10.0, 27.0)  # when each service is drained
LOW = 0.8  # of the hit rate before


def main() -> None:
    args = pool.run_arguments(__doc__, RESULT)
    if args is None:
        return
    document = measure()
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({name: document[name] for name in document if name not in ("hit_rates", "provenance")}))


def measure() -> dict[str, Any]:
    """The whole run, by the clock of its script."""
    source = provenance()
    with tempfile.TemporaryDirectory(prefix="specbranch-") as name:
        addresses = [f"ipc://{name}/{number}.sock" for number in range(NUM_SERVICES)]
        children = [start(address) for address in addresses]
        targets: list[Child] = []
        try:
            for address, child in zip(addresses, children, strict=True):
                pool.await_service(address, child)
            begin_s = time.monotonic() + 4.0
            outs = [Path(name) / f"{target}.json" for target in range(NUM_TARGETS)]
            words = ["--begin", str(begin_s), "--addresses", *addresses]
            for target, out in enumerate(outs):
                command = [sys.executable, __file__, "--target", str(target), "--out", str(out), *words]
                targets.append(Child(command))
            updates = [update(number, addresses, children, begin_s) for number in range(NUM_SERVICES)]
            for one in targets:
                if not one.wait(pool.END_S + 30.0) or one.returncode:
                    raise SystemExit(f"a target {one.exit_summary}")
        finally:
            for one in (*targets, *children):
                one.kill()
        runs = [json.loads(out.read_text()) for out in outs]
    return {"provenance": source, "load": round(os.getloadavg()[0], 1), "updates": updates, **figures(runs)}


def start(address: str) -> Child:
    return Child([sys.executable, __file__, "--serve", address], stdin=PIPE)


def update(number: int, addresses: Sequence[str], children: list[Child], begin_s: float) -> dict[str, float | None]:
    """Update one service: drain it, wait until it is idle, stop it, start it again. When all of this was."""
    address = addresses[number]
    pool.sleep_until(begin_s + UPDATES_S[number])
    drained_s = time.monotonic() - begin_s
    pool.drain(address)
    idle_s = pool.await_empty(address, begin_s)
    children[number].kill()
    stopped_s = time.monotonic() - begin_s
    children[number] = start(address)
    pool.await_service(address, children[number])
    moments = {"drained": drained_s, "idle": idle_s, "stopped": stopped_s, "back": time.monotonic() - begin_s}
    return {name: None if at_s is None else round(at_s, 2) for name, at_s in moments.items()}


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rates = hit_rates(runs)
    before = float(np.mean(rates[: round(UPDATES_S[0] / pool.BIN_S)]))
    times_s = [call_s for run in runs for _, call_s, _, _ in run["steps"]]
    return {
        "services": NUM_SERVICES,
        "targets": NUM_TARGETS,
        "rows": pool.NUM_ROWS,
        "draft_step_s": pool.DRAFT_STEP_S,
        "target_step_s": pool.TARGET_STEP_S,
        "deadline_s": pool.DEADLINE_S,
        "texts": sum(run["texts"] for run in runs),
        "texts_changed": sum(run["wrong"] for run in runs),
        "calls": len(times_s),
        "calls_raised": round(sum(run["counts"]["faults"] for run in runs)),
        "calls_over_deadline": sum(call_s > pool.DEADLINE_S for call_s in times_s),
        "call_ms": pool.calls(runs),
        "moved": round(sum(run["counts"]["rerouted"] for run in runs)),
        "counts": {name: round(sum(run["counts"][name] for run in runs), 3) for name in runs[0]["counts"]},
        "hit_rate_before": round(before, 3),
        "lowest_hit_rate": round(min(rates), 3),
        "longest_below_0.8_s": longest_below(rates, LOW * before) * pool.BIN_S,
        "bin_s": pool.BIN_S,
        "hit_rates": [round(rate, 3) for rate in rates],
    }


def hit_rates(runs: Sequence[dict[str, Any]]) -> list[float]:
    """The share of rows that got a draft, of all targets together, bin by bin."""
    hits, rows = np.zeros(round(pool.END_S / pool.BIN_S)), np.zeros(round(pool.END_S / pool.BIN_S))
    for run in runs:
        for when_s, _, found, _ in run["steps"]:
            if when_s < pool.END_S:
                hits[int(when_s / pool.BIN_S)] += sum(found)
                rows[int(when_s / pool.BIN_S)] += len(found)
    return [float(rate) for rate in hits / np.maximum(rows, 1)]


def longest_below(rates: Sequence[float], bound: float) -> int:
    """How many bins in a row were below the bound, at most."""
    return max((len(list(bins)) for is_low, bins in groupby(rate < bound for rate in rates) if is_low), default=0)


if __name__ == "__main__":
    main()
