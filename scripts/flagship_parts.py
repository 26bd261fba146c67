#!/usr/bin/env python3
"""The flagship run in its three sittings: what the machine gave the draft, and what came of it. Prints a Markdown table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

from specbranch.bench.results import read_results
from specbranch.bench.summary import cells, compare

RESULTS = Path(__file__).parents[1] / "results" / "bench-flagship.jsonl"
SITTINGS = (slice(0, 40), slice(40, 88), slice(88, None))


def main() -> None:
    whole = read_results(RESULTS)
    print("| sitting | task | prompts | bare step | draft row | `sps` | `pearl` | `specbranch` |")
    print("|---|---|---|---|---|---|---|---|")
    for number, sitting in enumerate(SITTINGS, start=1):
        part = replace(whole, records=whole.records[sitting])
        for (task, _), methods in cells(part).items():
            steps = [(one["elapsed_s"] - one["first_s"]) / (one["rounds"] - 1) for one in methods["bare"]]
            told = [one["draft_us"][0] / 1e3 for one in methods["specbranch"] if one.get("draft_us")]
            row = f"{median(told):.0f} ms" if told else "not recorded"
            speeds = " | ".join(
                f"{compare(methods[name], methods['bare']).value:.2f}" for name in ("sps", "pearl", "specbranch")
            )
            prompts = len(methods["bare"])
            print(f"| {number} | {task} | {prompts} | {1e3 * median(steps):.0f} ms | {row} | {speeds} |")


if __name__ == "__main__":
    main()
