"""`benchmarks/step_cost.py` on a stand-in: every part of a step's cost is found, and its draft is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import SHORT, require_pair
from tests.root import ROOT


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_hits_are_found_and_timed_in_all_their_parts(tmp_path: Path) -> None:
    model, _ = require_pair("torch", "transformers", name=SHORT)
    stand_in, out = tmp_path / "stand-in", tmp_path / "out.json"
    run("scripts/stand_in.py", str(model), str(stand_in))
    size = ["--requests", "2", "--contexts", "256", "--steps", "40"]
    run("benchmarks/step_cost.py", str(stand_in), *size, "--out", str(out))
    (found,) = json.loads(out.read_text())["sizes"]

    assert found["has_caught_up"] and found["hits"]["steps"] > 0
    assert found["tokens_per_row"] > 1
    assert all(found["hits"][f"{name}_ms"][0] > 0 for name in ("step", "hook", "client", "lookup"))
    assert found["hits"]["hook_ms"][0] < found["hits"]["step_ms"][0]


def run(script: str, *words: str) -> None:
    done = subprocess.run([sys.executable, ROOT / script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
