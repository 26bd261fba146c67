#!/usr/bin/env python
"""How fast Transformers decodes one text with drafts, against itself.

benchmarks/seams.py TARGET DRAFT    two directories of Transformers models

Four ways take turns on every prompt: the engine alone on the target's cores, alone on all cores, with its own method
on all cores (`assistant_model`), and with our drafts, which have cores of their own and no gate. Greedy. `--dtype` is of
the target and its assistant.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specbranch import DraftServer
from specbranch.launch.placement import CoreSplit, split_cores, usable_cores
from specbranch.machine import provenance

OUT = Path(__file__).parent
PROMPTS = (
    "def merge_sorted(left: list[int], right: list[int]) -> list[int]:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "# Count how often each word occurs in a file, and print the ten most common ones.\nimport sys\n",
    "def is_palindrome(text: str) -> bool:\n    # Letters only; upper and lower case are the same.\n",
    "The three most important rules of writing clear documentation are these. First,",
    "def fibonacci(n: int) -> list[int]:\n    # The first n numbers.\n",
)
_PAUSE_S = 0.5  # the draft service still works on a text that has just ended

Decode = Callable[[str, int], list[int]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode a prompt, and the cores of this process meanwhile."""

    name: str
    cores: tuple[int, ...]
    decode: Decode


@dataclass(frozen=True, slots=True)
class Run:
    """One text."""

    way: str
    prompt: int
    num_tokens: int
    seconds: float
    is_equal: bool  # to that of the first way
    accepted: int | None  # draft tokens of ours


class Engine:
    """An engine with its ways of decoding."""

    def __init__(self, cores: CoreSplit) -> None:
        assert cores.target is not None and cores.draft is not None, "both are on the CPU"
        self.target_cores = cores.target
        self.all_cores = tuple(sorted({*cores.target, *cores.draft}))
        self.ways: list[Way] = []

    def use_threads(self, count: int) -> None:
        raise NotImplementedError

    def num_accepted(self) -> int:
        raise NotImplementedError


class Transformers(Engine):
    def __init__(self, args: argparse.Namespace, draft: DraftServer, cores: CoreSplit) -> None:
        super().__init__(cores)
        import transformers

        transformers.utils.logging.set_verbosity_error()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(args.target, dtype=args.dtype)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(args.target)
        self._arguments = draft.transformers_args(is_gated=False)
        self.ways = [
            Way("alone, target's cores", self.target_cores, self._decode()),
            Way("alone, all cores", self.all_cores, self._decode()),
            Way("assistant_model, all cores", self.all_cores, self._decode(assistant_model=load(args.draft, dtype=args.dtype))),
            Way("SpecBranch", self.target_cores, self._decode(**self._arguments)),
        ]  # fmt: skip

    def use_threads(self, count: int) -> None:
        import torch

        torch.set_num_threads(count)

    def num_accepted(self) -> int:
        return int(self._arguments["custom_generate"].num_accepted)

    def _decode(self, **arguments: Any) -> Decode:
        def decode(prompt: str, num_tokens: int) -> list[int]:
            inputs = self._tokenizer(prompt, return_tensors="pt")
            text = self._model.generate(**inputs, do_sample=False, max_new_tokens=num_tokens, **arguments)
            return list(text[0, inputs["input_ids"].shape[1] :].tolist())

        return decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=OUT / "seams-transformers.json")
    args = parser.parse_args()
    where = provenance()
    cores = split_cores(usable_cores(), target_on_cpu=True, draft_on_cpu=True)
    with DraftServer(args.draft, cores=cores.draft) as draft:
        runs = measure(Transformers(args, draft, cores), PROMPTS[: args.prompts], args.tokens)
    document = {
        "provenance": where,
        "versions": {name: version(name) for name in ("transformers", "torch")},
        "target": Path(args.target).name,
        "draft": Path(args.draft).name,
        "dtype": args.dtype,
        "cores": asdict(cores),
        "speeds": speeds(runs),
        "runs": [asdict(run) for run in runs],
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document["speeds"], runs))


def measure(engine: Engine, prompts: Sequence[str], num_tokens: int) -> list[Run]:
    """All prompts in all ways, each time another way first; before that, one text in each way that does not count."""
    for way in engine.ways:
        timed(engine, way, prompts[0], num_tokens)
    runs = []
    for index, prompt in enumerate(prompts):
        texts: dict[str, list[int]] = {}
        found = {}
        for turn in range(len(engine.ways)):
            way = engine.ways[(index + turn) % len(engine.ways)]
            before = engine.num_accepted()
            texts[way.name], seconds = timed(engine, way, prompt, num_tokens)
            found[way.name] = (seconds, engine.num_accepted() - before)
        for way in engine.ways:
            seconds, accepted = found[way.name]
            is_equal = texts[way.name] == texts[engine.ways[0].name]
            ours = accepted if way is engine.ways[-1] else None
            runs.append(Run(way.name, index, len(texts[way.name]), seconds, is_equal, ours))
            print(f"prompt {index}: {way.name}: {len(texts[way.name]) / seconds:.1f} tokens/s", flush=True)
    return runs


def timed(engine: Engine, way: Way, prompt: str, num_tokens: int) -> tuple[list[int], float]:
    """The tokens of an answer, and the seconds from the prompt to its last token."""
    time.sleep(_PAUSE_S)
    engine.use_threads(len(way.cores))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), way.cores)
    start_s = time.monotonic()
    text = way.decode(prompt, num_tokens)
    return text, time.monotonic() - start_s


def speeds(runs: Sequence[Run]) -> dict[str, float]:
    """Tokens per second of each way over all prompts."""
    ways = dict.fromkeys(run.way for run in runs)
    return {
        way: sum(run.num_tokens for run in runs if run.way == way) / sum(run.seconds for run in runs if run.way == way)
        for way in ways
    }


def table(found: dict[str, float], runs: Sequence[Run]) -> str:
    """The speeds, and how many times each is that of the first way."""
    first = next(iter(found.values()))
    lines = ["| way | tokens/s | times | equal texts |", "|---|---|---|---|"]
    for way, speed in found.items():
        equal = [run.is_equal for run in runs if run.way == way]
        lines.append(f"| {way} | {speed:.1f} | {speed / first:.2f} | {sum(equal)} of {len(equal)} |")
    accepted = sum(run.accepted or 0 for run in runs)
    return "\n".join([*lines, "", f"draft tokens accepted: {accepted}"])


if __name__ == "__main__":
    main()
