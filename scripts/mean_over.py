#!/usr/bin/env python3
"""One method over all others of a result file: on each task, and on their geometric mean. Prints a Markdown table.

In brackets: 95 % of resamples of the prompts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from specbranch.bench.results import read_results
from specbranch.bench.summary import Ratio, cells, compare, mean_ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("method")
    args = parser.parse_args()
    by_task = {task: methods for (task, _), methods in cells(read_results(args.results)).items()}
    others = [name for name in next(iter(by_task.values())) if name != args.method]
    print(f"| `{args.method}` over | " + " | ".join(by_task) + " | mean |")
    print("|---|" + "---|" * (len(by_task) + 1))
    for other in others:
        pairs = [(methods[args.method], methods[other]) for methods in by_task.values()]
        cells_of = [_words(compare(*pair)) for pair in pairs]
        print(f"| {other} | " + " | ".join(cells_of) + f" | {_words(mean_ratio(pairs))} |")


def _words(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


if __name__ == "__main__":
    main()
