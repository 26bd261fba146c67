#!/usr/bin/env python3
"""What H-RAD knows of a draft token once the draft's distribution at its place is known.

For each token of a window: log loss of whether it is accepted, by a logistic line over the distribution's log-odds,
over H-RAD's, and over both. H-RAD learned from the training prompts, the lines from the held-out ones, and the test
prompts judge. From collections of `specbranch train collect` and a predictor of `specbranch train fit`. Writes
result.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from specbranch.hrad.examples import Array, Examples, read_examples, split_of
from specbranch.hrad.network import Hrad, read_hrad, survival
from specbranch.machine import provenance

HERE = Path(__file__).parent
_LEAST = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collections", type=Path, nargs="+")
    parser.add_argument("--hrad", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    examples = read_examples(args.collections)
    predicted = _predicted(examples, read_hrad(args.hrad))
    said = _log_odds(examples.distributions[:, 0])
    split = {name: split_of(int(name)) for name in np.unique(examples.prompts)}
    splits = np.array([split[name] for name in examples.prompts])
    rows = []
    for ahead in range(predicted.shape[1]):
        is_reached = (examples.runs >= ahead) & (examples.left > ahead)
        positions = np.flatnonzero(
            is_reached
        )  # the distribution of the token so far ahead is as many positions further
        is_accepted = examples.runs[positions] > ahead
        seen = {"distribution": said[positions + ahead], "hrad": predicted[positions, ahead]}
        learned, judged = (splits[positions] == name for name in ("held-out", "test"))
        row = {"ahead": ahead, "positions": int(judged.sum())}
        for name, columns in (
            ("distribution", ["distribution"]),
            ("hrad", ["hrad"]),
            ("both", ["distribution", "hrad"]),
        ):
            inputs = np.stack([seen[column] for column in columns], axis=-1)
            row[name] = round(_loss(inputs[learned], is_accepted[learned], inputs[judged], is_accepted[judged]), 4)
        rows.append(row)
        print(row, flush=True)
    args.out.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")


def _predicted(examples: Examples, hrad: Hrad, rows: int = 4096) -> Array:
    """H-RAD's log-odds that a token of the window is accepted, if those before it are, [n, window]."""
    parts = [
        survival(hrad.tensors, examples.features[start : start + rows].astype(np.float32))
        for start in range(0, len(examples), rows)
    ]
    chances = np.concatenate(parts).clip(_LEAST, 1)
    before = np.concatenate([np.ones((len(chances), 1)), chances[:, :-1]], axis=1)
    return _log_odds(chances / before)


def _log_odds(chances: Array) -> Array:
    chances = np.clip(chances, _LEAST, 1 - _LEAST)
    odds: Array = np.log(chances / (1 - chances))
    return odds


def _loss(inputs: Array, truth: Array, asked: Array, answers: Array) -> float:
    """Log loss on what is asked of a logistic line that was learned from the inputs."""
    line = torch.nn.Linear(inputs.shape[1], 1)
    optimiser = torch.optim.LBFGS(line.parameters(), max_iter=100)

    def loss_of(x: Array, y: Array) -> torch.Tensor:
        logits = line(torch.from_numpy(x).float())[:, 0]
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(y).float())

    def closure() -> float:
        optimiser.zero_grad()
        loss = loss_of(inputs, truth)
        loss.backward()
        return float(loss)

    optimiser.step(closure)
    with torch.inference_mode():
        return float(loss_of(asked, answers))


if __name__ == "__main__":
    main()
