#!/usr/bin/env python3
"""Write replay traces of the prompts that H-RAD was not trained on, with what it foresees at every place.

From collections of `specbranch train collect` and a predictor of `specbranch train fit`: one trace for each task and
temperature, in the format that `specbranch simulate --trace` reads. Prompt texts are left out.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from specbranch.hrad.examples import read_answers, read_examples, read_examples_card, split_of
from specbranch.hrad.network import read_hrad
from specbranch.trace import Header, Trace, write_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collections", type=Path, nargs="+")
    parser.add_argument("--hrad", type=Path, required=True)
    parser.add_argument("--count", type=int, default=16, help="answers of a task at most")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    args = parser.parse_args()
    hrad = read_hrad(args.hrad)
    args.out.mkdir(parents=True, exist_ok=True)
    for directory in args.collections:
        card = read_examples_card(directory)
        features = read_examples([directory]).features
        chosen: dict[str, list[object]] = {}
        row = 0
        for task, prompt, answer in read_answers(directory):
            own = features[row : row + len(answer.tokens) - 1]
            row += len(own)
            if split_of(prompt) == "test" and len(chosen.setdefault(task, [])) < args.count:
                signals = [int(hint.signal) for hint in hrad.predict(own.astype(np.float32))]
                chosen[task].append(replace(answer, prompt=(), foreseen=(*signals, 1)))
        for task, answers in chosen.items():
            header = Header(target=card.target, draft=card.draft, task=task, temperature=card.temperature)
            path = args.out / f"{task}-t{card.temperature:g}.jsonl.gz"
            write_trace(path, Trace(header, tuple(answers)))  # type: ignore[arg-type]
            print(f"{path.name}: {len(answers)} answers")


if __name__ == "__main__":
    main()
