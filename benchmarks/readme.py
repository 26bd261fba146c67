#!/usr/bin/env python
"""Run the README's first command on models of this machine, and keep the lines that it prints and when each text came.

benchmarks/readme.py TARGET DRAFT [--dtype float32] [--max-tokens 64]

Then benchmarks/recording.py draws it.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from specbranch.provenance import provenance

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", default="256")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "readme.json")
    args = parser.parse_args()
    words = [*command(), "--dtype", args.dtype, "--max-tokens", args.max_tokens, "--json"]
    words[2], words[words.index("--draft") + 1] = args.target, args.draft
    print(shlex.join(words), flush=True)
    where = provenance()
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if "tokens/s" in line]
    print(*lines, sep="\n")
    answer = json.loads(done.stdout)
    pieces = {"with drafts": answer["pieces"], "without drafts": answer["plain"]["pieces"]}
    said = [Path(word).name if word in (args.target, args.draft) else word for word in words]
    document = {"provenance": where, "command": said, "lines": lines, "pieces": pieces}
    args.out.write_text(json.dumps(document, ensure_ascii=False) + "\n")


def command() -> list[str]:
    """The words of the README's first command of ours."""
    text = re.sub(r"\\\n\s+", "", (ROOT / "README.md").read_text())
    line = next(line for line in text.splitlines() if line.startswith("    specbranch generate "))
    return shlex.split(line)


if __name__ == "__main__":
    main()
