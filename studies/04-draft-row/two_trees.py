#!/usr/bin/env python
"""A draft step by the code of two checkouts, in turns: `specbranch profile` of each, on one core.

studies/04-draft-row/two_trees.py MODEL OLD NEW [--turns 3] [--core 1] [--out studies/04-draft-row/two_trees.json]
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from specbranch.machine import commit, provenance

ROWS = (1, 2, 4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("trees", nargs=2, type=Path, metavar="TREE")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "two_trees.json")
    args = parser.parse_args()
    found: dict[str, dict[int, list[float]]] = {}
    for _ in range(args.turns):
        for tree in args.trees:
            own = found.setdefault(str(commit(tree)), {rows: [] for rows in ROWS})
            for rows, step_ms in profile(args.model, tree, args.core, args.context).items():
                own[rows].append(step_ms)
            print(json.dumps(found), flush=True)
    old, new = found.values()
    ratios = {rows: round(median(old[rows]) / median(new[rows]), 3) for rows in ROWS}
    document = {"provenance": provenance(), "context": args.context, "step_ms": found, "old_over_new": ratios}
    args.out.write_text(json.dumps(document, indent=1) + "\n")


def profile(model: str, tree: Path, core: int, context: int) -> dict[int, float]:
    """The median step in milliseconds by the number of sequences in it."""
    words = ["profile", model, "--engine", "torch", "--rows", ",".join(map(str, ROWS)), "--context", str(context)]
    words += ["--cores", str(core), "--threads", "1", "--json"]
    command = [sys.executable, "-m", "specbranch", *words]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tree / "src")}, capture_output=True, text=True, check=True
    )
    return {int(rows): spread["median_ms"] for rows, spread in json.loads(done.stdout)["rows"].items()}


if __name__ == "__main__":
    main()
