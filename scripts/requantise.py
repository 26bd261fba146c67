#!/usr/bin/env python3
"""Requantise a GGUF model with llama.cpp's own quantiser.

`q4_0` is what llama.cpp computes fastest on a CPU; `q2_k` makes a poorly aligned draft for experiments.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import llama_cpp

TYPES = {"q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "q2_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q2_K}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("out", type=Path, help="GGUF file to write")
    parser.add_argument("--type", choices=sorted(TYPES), required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = TYPES[args.type]
    params.allow_requantize = True
    llama_cpp.llama_backend_init()
    if llama_cpp.llama_model_quantize(str(args.model).encode(), str(args.out).encode(), params):
        raise SystemExit(f"llama.cpp could not requantise {args.model}")


if __name__ == "__main__":
    main()
