#!/usr/bin/env python3
"""How long a step of bare vLLM on the CPU takes against its number of tokens, for each data type of the target.

DENSE is a dense checkpoint and INT8 what `specbranch quantize` made of it. INT8 is also run with its output layer in
bfloat16, which most quantized checkpoints keep. A step of n tokens is n requests with one token each. Types are loaded one
after the other; sizes are measured upwards and downwards, so that a machine that drifts hits all. Takes about five minutes
for 1.5 billion weights on one core. Writes result.json; --table prints its table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from specbranch.engines.models import local_model
from specbranch.launch.vllm_engine import LocalEngineOptions
from specbranch.launch.vllm_worker import DecodeJob, PromptRequest, TargetProcess, step_gaps_s
from specbranch.machine import provenance

OUT = Path(__file__).parent / "result.json"
SIZES = (1, 2, 4, 8, 16)
_NUM_TOKENS = 7  # of each answer; the first two steps are prefill, and the first of a size, which prepares kernels
_PROMPT = "One, two,"
_KEPT = "int8, output layer in bfloat16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", nargs="?", help="a dense checkpoint: a path or a name below $SPECBRANCH_MODELS")
    parser.add_argument("int8", nargs="?", help="the same in int8")
    parser.add_argument("--cores", default="0", help="cores of the target, separated by commas")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--table", action="store_true", help="only print the table of the result")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.out.read_text())))
        return
    dense, int8 = (local_model(name) if name else None for name in (args.dense, args.int8))
    if dense is None or int8 is None:
        parser.error("give DENSE and INT8 that are on this machine")
    cores = [int(core) for core in args.cores.split(",")]
    types: dict[str, Any] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="specbranch-study-") as name:
        kept = _with_dense_output(int8, Path(name) / "kept")
        todo = {
            "float32": (dense, "float32"),
            "bfloat16": (dense, "bfloat16"),
            _KEPT: (kept, "auto"),
            "int8": (int8, "auto"),
        }
        for kind, (model, dtype) in todo.items():
            arguments = {"dtype": dtype, "max_model_len": 256, "max_num_seqs": max(SIZES), "enforce_eager": True}
            options = LocalEngineOptions(str(model), arguments={**arguments, "enable_prefix_caching": False})
            with TargetProcess(options, Path(name) / "target.log", cores) as process:
                versions = process.engine.versions
                types[kind] = {"step_ms": _step_ms(process)}
            print(json.dumps({kind: types[kind]}), flush=True)
    result = {"model": dense.name, "cores": cores, "types": types, "provenance": {**provenance(), **versions}}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """The step times as a table in Markdown."""
    lines = [f"| ms a step, tokens | {' | '.join(str(size) for size in SIZES)} |", "|---" * (1 + len(SIZES)) + "|"]
    for kind, found in result["types"].items():
        times = [format(found["step_ms"][str(size)], ".0f") for size in SIZES]
        lines.append(f"| {kind} | {' | '.join(times)} |")
    return "\n".join(lines)


def _step_ms(process: TargetProcess) -> dict[str, float]:
    times_s: dict[int, list[float]] = {size: [] for size in SIZES}
    for size in (*SIZES, *SIZES[::-1]):
        sampling = {"temperature": 0.0, "max_tokens": _NUM_TOKENS, "ignore_eos": True}
        answers = process.run(DecodeJob([PromptRequest(_PROMPT, sampling)] * size)).answers
        times_s[size] += step_gaps_s(answers, skip=1)
    return {str(size): round(1e3 * median(times), 1) for size, times in times_s.items()}


def _with_dense_output(int8: Path, out: Path) -> Path:
    """The same checkpoint without its output layer, tied to the input embedding instead, which is dense."""
    from safetensors.torch import load_file, save_file

    out.mkdir()
    for file in int8.resolve().iterdir():
        if file.suffix == ".safetensors":
            kept = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("lm_head.")}
            save_file(kept, out / file.name, metadata={"format": "pt"})
        elif file.name not in ("config.json", "model.safetensors.index.json"):
            (out / file.name).symlink_to(file)
    config = json.loads((int8 / "config.json").read_text())
    config["tie_word_embeddings"] = True
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = ["Linear"]
    config["quantization_config"]["ignore"] = ["lm_head"]
    (out / "config.json").write_text(json.dumps(config))
    return out


if __name__ == "__main__":
    main()
