#!/usr/bin/env python
"""What `specbranch top` costs a server that it looks at: 16 requests at once, with it and without it in turns.

benchmarks/top_cost.py TARGET DRAFT [--turns 12] [--dtype float32]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from specbranch.bench.load import server
from specbranch.cli.commands.top import view_as_screen
from specbranch.cli.readings import open_source
from specbranch.machine import provenance

RESULT = Path(__file__).parent / "top-cost.json"
AT_ONCE = 16
PROMPT = "def merge_sorted(left: list[int], right: list[int]) -> list[int]:\n    # Number {number}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=12, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--picture", type=Path, help="draw what `top` shows then to this .svg file")
    args = parser.parse_args()
    where = provenance()
    words = [args.target, "--draft", args.draft, "--dtype", args.dtype, "--served-model-name", "m"]
    words += ["--max-model-len", "1024", "--max-num-seqs", str(AT_ONCE), "--no-gate"]
    speeds: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as name, server(words, Path(name) / "log") as url:
        load(url, args.max_tokens)  # warm-up
        for turn in range(args.turns):
            for way in ("without", "with") if turn % 2 else ("with", "without"):
                with watching(url) if way == "with" else contextlib.nullcontext():
                    speeds[way].append(load(url, args.max_tokens))
            print(
                f"{turn + 1}: {speeds['without'][-1]:.1f} tokens/s without, {speeds['with'][-1]:.1f} with", flush=True
            )
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(load, url, args.max_tokens)
            if args.picture:
                draw(url, args.picture)
            running.result()
    ratios = [own / bare for own, bare in zip(speeds["with"], speeds["without"], strict=True)]
    mean = statistics.fmean(ratios)
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    print(f"with top {mean:.4f} of the speed without, standard error {error:.4f}")
    document = {"provenance": where, "at_once": AT_ONCE, "tokens_per_s": speeds, "ratio": mean, "error": error}
    args.out.write_text(json.dumps(document, indent=1) + "\n")


@contextlib.contextmanager
def watching(url: str) -> Iterator[None]:
    """With `specbranch top` on this server."""
    words = [sys.executable, "-m", "specbranch", "top", url]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(3.0)  # its start is not what is measured
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def draw(url: str, path: Path) -> None:
    """Draw the screen of `top` in the midst of a load."""
    with contextlib.closing(open_source(url, None)) as source:
        time.sleep(2.0)
        earlier = source.read()
        time.sleep(1.0)
        console = Console(record=True, width=78, file=io.StringIO())
        console.print(view_as_screen("http://localhost:8000", source.read(), earlier))
    console.save_svg(str(path), title="specbranch top", unique_id="top")


def load(url: str, max_tokens: int) -> float:
    """Tokens a second of requests that all come at once."""
    start_s = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        counts = list(pool.map(lambda number: ask(url, PROMPT.format(number=number), max_tokens), range(AT_ONCE)))
    return sum(counts) / (time.monotonic() - start_s)


def ask(url: str, prompt: str, max_tokens: int) -> int:
    """Send one request; the tokens of its answer."""
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


if __name__ == "__main__":
    main()
