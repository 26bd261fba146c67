"""A target that `specbranch quantize` wrote: stock vLLM loads it, its output layer is in int8, and it reads alike."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.measuring import record
from tests.models import model_path
from tests.root import ROOT

TEXTS = [
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Germany is",
    "Water boils at one hundred degrees Celsius at sea level. In the mountains the pressure of the air is lower, so "
    "water boils at a lower temperature there, and food takes longer to cook.",
    "def add(first, second):\n    return first + second\n\n\ndef multiply(first, second):\n    return first * second\n",
    "Dear Anna, thank you for your letter. I was very happy to hear that you and your family are well and that the "
    "new house is nearly finished. We will visit you in the summer.",
]
MAX_WORSE = 0.1  # nats for each token of text, on average: a tenth more perplexity

pytestmark = pytest.mark.timeout(900)


def run(command: list[str], said: str = "") -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, input=said, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def read_texts(target: Path) -> Any:
    command = [sys.executable, "-m", "tests.vllm.run_quantized", "--target", str(target)]
    return json.loads(run(command, json.dumps(TEXTS)).splitlines()[-1])


def test_vllm_loads_an_int8_target_that_reads_as_the_dense_one(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    source, out = model_path("smollm2-135m-dense"), tmp_path / "int8"
    run([sys.executable, "-m", "specbranch", "quantize", str(source), str(out)])
    dense, int8 = read_texts(source), read_texts(out)
    pairs = [
        (a, b)
        for one, other in zip(dense["texts"], int8["texts"], strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    worse = fmean(a[0] - b[0] for a, b in pairs)
    equal = fmean(a[1] == b[1] for a, b in pairs)

    record("quantized", tokens=len(pairs), worse_nats=round(worse, 4), equal_ranks=round(equal, 3))
    assert dense["output_layer"].startswith("Unquantized")
    assert int8["output_layer"] == "CompressedTensorsLinearMethod"
    assert len(pairs) > 100
    assert worse < MAX_WORSE, (worse, equal)
    assert "Berlin" in dense["answer"] and "Berlin" in int8["answer"]
