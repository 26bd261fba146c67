#!/usr/bin/env python
"""What trained heads guess at every place of traces, and how sure they are.

studies/08-heads/guess.py DRAFT HEADS OUT traces/*.jsonl.gz
"""

import argparse
import json
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from specbranch.engines.heads import read_heads
from specbranch.engines.options import found_model
from specbranch.provenance import provenance
from specbranch.trace import read_trace
from specbranch.train.heads import guess
from specbranch.train.states import read_over, task_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft")
    parser.add_argument("heads", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("traces", type=Path, nargs="+")
    args = parser.parse_args()
    heads = read_heads(args.heads)
    draft = AutoModelForCausalLM.from_pretrained(found_model(args.draft), dtype=torch.float32).eval()
    guesses = {}
    for trace in map(read_trace, args.traces):
        guesses[task_of(trace)] = [
            along(draft, heads, text.states[text.start - 1 : -1], answer.distributions)
            for answer in trace.answers
            for text in read_over(draft, [("", answer)], "cpu")
        ]
    document = {"provenance": provenance(), "card": msgspec.to_builtins(heads.card), "guesses": guesses}
    args.out.write_text(json.dumps(document, separators=(",", ":")) + "\n")


def along(draft, heads, states, distributions) -> list[tuple[int, float]]:
    """Guesses behind the first choices of the recorded distributions."""
    tokens, sureness = guess(heads, draft, states, np.array([one.ids[0] for one in distributions]))
    return [(int(token), round(float(sure), 4)) for token, sure in zip(tokens, sureness, strict=True)]


if __name__ == "__main__":
    main()
