#!/usr/bin/env python
"""Run the README's first command word for word, and keep the lines that it prints and when each text came.

benchmarks/readme.py TARGET DRAFT

TARGET and DRAFT are models of this machine, which stand in under the names that the README uses. Then
benchmarks/recording.py draws the run.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from specbranch.machine import provenance

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "readme.json")
    args = parser.parse_args()
    words, where = command(), provenance()
    print(shlex.join(words), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for name, path in ((words[2], args.target), (words[words.index("--draft") + 1], args.draft)):
            link = Path(directory) / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
        environment = {**os.environ, "SPECBRANCH_MODELS": directory}
        done = subprocess.run(
            [sys.executable, "-m", *words, "--json"],
            capture_output=True,
            text=True,
            check=True,
            cwd=directory,
            env=environment,
        )
    lines = [line for line in done.stderr.splitlines() if "tokens/s" in line]
    print(*lines, sep="\n")
    answer = json.loads(done.stdout)
    pieces = {"with drafts": answer["pieces"], "without drafts": answer["plain"]["pieces"]}
    models = {"target": args.target.name, "draft": args.draft.name}
    document = {"provenance": where, "command": words, "models": models, "lines": lines, "pieces": pieces}
    args.out.write_text(json.dumps(document, ensure_ascii=False) + "\n")


def command() -> list[str]:
    """The words of the README's first command of ours."""
    text = re.sub(r"\\\n\s+", "", (ROOT / "README.md").read_text())
    line = next(line for line in text.splitlines() if line.startswith("    specbranch generate "))
    return shlex.split(line)


if __name__ == "__main__":
    main()
