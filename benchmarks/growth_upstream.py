#!/usr/bin/env python
"""Show with vLLM's own matrix product, without an engine and without SpecBranch, that each new batch size takes memory.

benchmarks/growth_upstream.py [--sizes 500] needs vLLM for the CPU alone. With ONEDNN_PRIMITIVE_CACHE_CAPACITY=64 in the
environment the memory stays nearly flat. `growth.py` measures the same in whole engines.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path

INPUTS, OUTPUTS = 576, 960
OWN_CAPACITY = 32  # as vLLM creates its handlers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, default=500, help="how many batch sizes, in a random order")
    args = parser.parse_args()
    import torch
    import vllm._custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    weight = torch.randn(OUTPUTS, INPUTS)
    handler = ops.create_onednn_mm(weight.t(), OWN_CAPACITY)
    ops.onednn_mm(handler, torch.zeros(args.sizes, INPUTS), None)
    start_mb = rss_mb()
    for number, size in enumerate(random.Random(1).sample(range(1, args.sizes + 1), args.sizes), 1):
        ops.onednn_mm(handler, torch.zeros(size, INPUTS), None)
        if number % 100 == 0:
            print(f"{number} batch sizes: {rss_mb() - start_mb:+.0f} MB", flush=True)


def rss_mb() -> float:
    """Return the memory that this process occupies, in megabytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
