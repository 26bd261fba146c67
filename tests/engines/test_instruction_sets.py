"""Drafts in 8 bits on the CPUs that this one can behave like: right, never slow beyond reason, and ready on one core.

oneDNN reads its limit once in a process, so each limit has processes of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the torch engine needs torch")
pytest.importorskip("transformers", reason="the torch engine needs transformers")

from specbranch.machine import onednn_limits, provenance
from tests.measuring import record
from tests.models import model_path
from tests.root import ROOT
from tests.service.harness import START_S, Service, running

LIMITS = onednn_limits(provenance()["instruction_sets"])
STEPS = """
import json, sys, time
from specbranch.engines.base import EngineOptions
from specbranch.engines.registry import open_engine
from specbranch.engines.base import Row
model, found = sys.argv[1], {}
engines = {dtype: open_engine("torch", EngineOptions(model, threads=1, dtype=dtype)) for dtype in ("auto", "float32")}
trunks = {dtype: engine.open() for dtype, engine in engines.items()}
for dtype, engine in engines.items():
    engine.run([Row(trunks[dtype], tuple(range(500, 532)))])
for _ in range(12):
    for dtype, engine in engines.items():
        for count in (1, 8):
            forks = [engine.fork(trunks[dtype], 32) for _ in range(count)]
            start_s = time.perf_counter()
            engine.run([Row(fork, (600 + number,)) for number, fork in enumerate(forks)])
            found.setdefault(f"{dtype} {count}", []).append(1000 * (time.perf_counter() - start_s))
            for fork in forks:
                engine.close(fork)
print(json.dumps({"chosen": engines["auto"].info.dtype, **{name: min(times) for name, times in found.items()}}))
"""


def environment(limit: str) -> dict[str, str]:
    return {**os.environ, "ONEDNN_MAX_CPU_ISA": limit, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("limit", LIMITS[1:])
def test_eight_bits_are_right_with_fewer_instructions(limit: str) -> None:
    """What other modules test without a limit: conformance, nearness to the whole model, no sum that is lost."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engines/torch/test_linear.py"]
    command += ["tests/engines/torch/test_engine.py", "-k", "Onednn or WeightOnly or eight_bits or fused or test_int8"]
    done = subprocess.run(command, cwd=ROOT, env=environment(limit), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_chosen_is_not_slower_than_plain_weights(limit: str) -> None:
    command = [sys.executable, "-c", STEPS, str(model_path("smollm2-135m-dense"))]
    done = subprocess.run(command, env=environment(limit), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])

    record("draft_types", limit=limit, **found)
    # What is chosen is best for one row and eight together; beside it there is the machine's noise.
    assert found["auto 1"] + found["auto 8"] < 1.3 * (found["float32 1"] + found["float32 8"])
    assert found["auto 1"] < 3 * found["float32 1"]


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("model", ["smollm2-135m-dense", "qwen-coder-0.5b-dense"])
def test_a_draft_answers_on_one_core(model: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it takes until then is recorded."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    program = shutil.which("specbranch", path=str(Path(sys.executable).parent))
    assert program is not None
    address, core = f"ipc://{tmp_path}/draft.sock", str(max(os.sched_getaffinity(0)))
    command = [program, "draft", str(model_path(model)), "--listen", address, "--threads", "1"]
    start_s = time.monotonic()
    with running(Service([*command, "--cores", core], address)):
        ready_s = time.monotonic() - start_s

    record("draft_ready", model=model, limit=limit, seconds=round(ready_s, 1))
