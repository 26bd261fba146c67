#!/usr/bin/env python
"""Time of a draft step with heads and without, in turns, by the number of outputs.

studies/08-heads/cost.py DRAFT HEADS STATES [--dtype int8] [--out studies/08-heads/cost.json]

STATES is the directory of hidden states that `specbranch train heads` keeps: the output layer is fitted to them.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from safetensors.numpy import load_file

from specbranch.engines.options import EngineOptions
from specbranch.engines.protocol import Row
from specbranch.engines.torch import TorchEngine
from specbranch.provenance import provenance

CONTEXT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft")
    parser.add_argument("heads")
    parser.add_argument("states", type=Path)
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "cost.json")
    args = parser.parse_args()
    options = EngineOptions(args.draft, threads=1, dtype=args.dtype, max_tokens=4096, heads=args.heads)
    engine = TorchEngine(options)
    part = load_file(max(args.states.glob("*.safetensors"), key=lambda path: path.stat().st_size))
    text = part["tokens"][: CONTEXT + 8].tolist()
    output = engine._forward.model.get_output_embeddings()
    if hasattr(output, "learn"):
        output.learn(torch.from_numpy(part["states"]).float())
    handle = engine.open()
    engine.run([Row(handle, tuple(text[:CONTEXT]))])
    head, found = engine._forward.guesser, []
    for count in (1, 4, 8):
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * args.turns + 2):
            engine._forward.guesser = head if turn % 2 else None
            start_s = time.perf_counter()
            engine.run([Row(handle, tuple(text[CONTEXT : CONTEXT + count]), num_outputs=count)])
            times[bool(turn % 2)].append(time.perf_counter() - start_s)
            engine.truncate(handle, CONTEXT)
        with_ms, without_ms = (1000 * median(times[has][1:]) for has in (True, False))
        least = [1000 * min(times[has][1:]) for has in (True, False)]
        found.append(
            {
                "outputs": count,
                "with_ms": round(with_ms, 2),
                "without_ms": round(without_ms, 2),
                "share": round(with_ms / without_ms - 1, 4),
                "least_with_ms": round(least[0], 2),
                "least_without_ms": round(least[1], 2),
            }
        )
        print(found[-1], flush=True)
    document = {"provenance": provenance(), "dtype": engine.info.dtype, "context": CONTEXT, "steps": found}
    args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
