"""What an outlook costs a step of the target: hooks, reading the features, the network. No vLLM, no weights.

A stand-in target of the given shape hands its layers' states on as vLLM's does; only our own work is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from specbranch.plugins.vllm.compat.features import FeatureHook
from specbranch.plugins.vllm.foresight import Foresight
from specbranch.predictor.hrad import read_hrad, write_hrad

WINDOW = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-len", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--submitted", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        _write(Path(directory), args.layers, args.hidden_len)
        hrad = read_hrad(Path(directory))
    for rows in args.rows:
        times = _times(hrad, args, rows)
        shown = {name: round(1e6 * statistics.median(values)) for name, values in times.items()}
        print(json.dumps({"hidden_len": args.hidden_len, "layers": args.layers, "rows": rows, "median_us": shown}))


class Layer(torch.nn.Module):
    def forward(self, hidden: Any, residual: Any) -> Any:
        return hidden, residual


class Target(torch.nn.Module):
    aux_hidden_state_layers = ()
    start_layer = 0

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(num_layers)])


def _times(hrad: Any, args: argparse.Namespace, num_rows: int) -> dict[str, list[float]]:
    per_row = args.submitted + 1
    table = torch.randn(1000, args.hidden_len, dtype=torch.bfloat16)
    plain, target = Target(args.layers), Target(args.layers)
    foresight = Foresight(hrad, FeatureHook(target, args.layers, lambda tokens: table[torch.tensor(tokens)]))
    names = [str(row) for row in range(num_rows)]
    scheduled = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(names, per_row),
        scheduled_spec_decode_tokens={name: [1] * args.submitted for name in names},
    )
    hidden = torch.randn(num_rows * per_row, args.hidden_len, dtype=torch.bfloat16)
    state = SimpleNamespace(
        sample_hidden_states=hidden, spec_decode_metadata=SimpleNamespace(num_draft_tokens=[args.submitted] * num_rows)
    )
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=names), device="cpu", execute_model_state=state, drafter=None
    )
    sampled = [[1] * 4 for _ in names]
    times: dict[str, list[float]] = {"hooks": [], "read_and_predict": [], "total": []}
    for _ in range(args.repeats):
        bare_s = _run(plain, hidden)
        start_s = time.perf_counter()
        foresight.feature_hook.begin(runner, scheduled)
        _run(target, hidden)
        foresight.feature_hook.end(runner)
        middle_s = time.perf_counter()
        found = foresight.outlooks(sampled, range(num_rows))
        assert len(found) == num_rows
        end_s = time.perf_counter()
        times["hooks"].append(middle_s - start_s - bare_s)
        times["read_and_predict"].append(end_s - middle_s)
        times["total"].append(end_s - start_s - bare_s)
    return times


def _run(target: Target, hidden: Any) -> float:
    start_s = time.perf_counter()
    for layer in target.layers:
        layer(hidden, hidden)
    return time.perf_counter() - start_s


def _write(directory: Path, num_layers: int, hidden_len: int) -> None:
    d_in, rng = (num_layers + 1) * hidden_len, np.random.default_rng(1)
    shapes = {"mean": (d_in,), "scale": (d_in,), "w0": (d_in, 256), "b0": (256,), "w1": (256, 64), "b1": (64,)}
    shapes |= {"w_class": (64, 3), "b_class": (3,), "w_survival": (64, WINDOW), "b_survival": (WINDOW,)}
    tensors = {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}
    card = {"target": "stand-in", "draft": "none", "num_layers": num_layers, "hidden_len": hidden_len}
    write_hrad(directory, tensors, {**card, "window": WINDOW, "tasks": [], "positions": 0, "commit": None})


if __name__ == "__main__":
    main()
