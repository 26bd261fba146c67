#!/usr/bin/env python
"""Prompts of repeated traffic, made of public ones: edits of one file, and an agent that comes back to one problem.

benchmarks/repeated.py DATA OUT reads humaneval.jsonl and gsm8k.jsonl in DATA, and writes edits.jsonl and turns.jsonl,
ten prompts each, to OUT. `benchmarks/equal.toml` runs them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FILES = (11, 40, 77, 110)  # of HumanEval
_PROBLEMS = (4, 30)  # of GSM8K
_EDITS = (
    "Rename its argument or arguments to shorter names.",
    "Add a line to its docstring that says what it returns.",
    "Raise a ValueError if the input is None.",
    "Add type hints to every name that is assigned.",
    "Log the result before it is returned.",
)
_TURNS = (
    "Solve the problem step by step.",
    "A colleague could not follow. Write the whole solution again, and say at each step what is computed.",
    "Check each number, and write the whole solution again.",
    "Write the whole solution again with a title above it.",
    "Write the whole solution again for a pupil of ten years.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="directory with humaneval.jsonl and gsm8k.jsonl")
    parser.add_argument("out", type=Path, help="directory to write to")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "edits.jsonl", edits(read(args.data / "humaneval.jsonl")))
    write(args.out / "turns.jsonl", turns(read(args.data / "gsm8k.jsonl")))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, prompts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def edits(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Five edits of each of two files, which hold two functions each."""
    files = [rows[number]["prompt"] + rows[number]["canonical_solution"] for number in _FILES]
    pairs = ["\n\n".join(files[:2]), "\n\n".join(files[2:])]
    return [
        f"This is a Python file.\n\n```python\n{text}```\n\nChange its first function: {edit} Answer with the whole file."
        for text in pairs
        for edit in _EDITS
    ]


def turns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Five turns of each of two conversations; a turn has the solution that came before it."""
    found = []
    for number in _PROBLEMS:
        text = f"Problem: {rows[number]['question']}\n\n"
        for turn in _TURNS:
            found.append(text + turn)
            text += f"{turn}\n\nSolution: {rows[number]['answer']}\n\n" if turn is _TURNS[0] else f"{turn}\n\n"
    return found


if __name__ == "__main__":
    main()
