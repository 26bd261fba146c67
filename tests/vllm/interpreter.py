"""vLLM's Model Runner V2 on the CPU. Imported before vLLM: it sets vLLM's environment.

V2's kernels are written in Triton, whose interpreter runs them on tensors in host memory. vLLM asks Triton only whether
it has a backend for the CPU, so one of that name is put there.
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace

os.environ |= {
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",  # it would ask the backend for more
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}

import triton.backends

_DRIVER = SimpleNamespace(is_active=lambda: True)
triton.backends.backends["cpu"] = SimpleNamespace(driver=_DRIVER, compiler=None)

# The interpreter has no device library. Of that, V2's sampler needs one function, to resample by draft probabilities.
_UTILS = importlib.import_module("vllm.triton_utils")  # not before there is a backend
vars(_UTILS)["tldevice"] = SimpleNamespace(log1p=lambda value: _UTILS.tl.log(1.0 + value))
