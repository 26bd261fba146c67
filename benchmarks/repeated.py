#!/usr/bin/env python3
"""Write prompts that repeat each other, as agents and editors send them: 20 requests on 4 files, in turns.

    benchmarks/repeated.py DATA      # reads DATA/humaneval.jsonl, writes DATA/repeated.jsonl

Each request shows a file of two functions and asks for it back with one small change; the change of one request is in
the file of the next.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

FILES = 4
EDITS = (
    "Return the whole file with a comment line at its top that says what the file does.",
    "Return the whole file; rename nothing, but add `# reviewed` after the first import.",
    "Return the whole file without its doctests.",
    "Return the whole file and add a function `main` at its end that calls the first function.",
    "Return the whole file with a blank line before each `return`.",
)
NOTES = (
    "# tools\n",
    "# tools, reviewed\n",
    "# tools, third edition\n",
    "# tools, with main\n",
    "# tools, in the end\n",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="directory with humaneval.jsonl")
    data: Path = parser.parse_args().data
    problems = [json.loads(line) for line in (data / "humaneval.jsonl").read_text().splitlines()[: 2 * FILES]]
    functions = [problem["prompt"] + problem["canonical_solution"] for problem in problems]
    with (data / "repeated.jsonl").open("w") as out:
        for note, edit in zip(NOTES, EDITS, strict=True):
            for index in range(FILES):
                file = note + functions[2 * index] + "\n\n" + functions[2 * index + 1]
                out.write(json.dumps({"prompt": f"{edit}\n\n```python\n{file}```"}) + "\n")


if __name__ == "__main__":
    main()
