"""Programs of this repository that need real vLLM, in small forms on the CPU, so that they work on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import SHORT, require_pair
from tests.proof import report
from tests.proof.plan import BARE, OURS
from tests.root import ROOT


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_reduced_proof_passes_and_writes_one_report(tmp_path: Path) -> None:
    target, _ = require_pair("torch", "transformers", name=SHORT)
    out = tmp_path / "proof.md"
    script, minutes = ROOT / "scripts" / "gpu-proof", "18"  # for busy machines; two or three are enough on an idle one
    command = [str(script), str(target), str(target), "--reduced", "--minutes", minutes, "--out", str(out)]
    environment = {**os.environ, "SPECBRANCH_VENV": sys.prefix}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert out.exists(), done.stderr[-4000:]
    document = report.read(out.read_text())
    failed = {stage["name"]: stage["why"] for stage in document["stages"] if stage["ending"] != "passed"}
    assert done.returncode == 0, failed or document["equality"]
    names = [stage["name"] for stage in document["stages"]]
    assert names == ["machine", BARE, OURS, "engine", "profile", "draft_model", "ngram"]
    assert document["equality"]["holds"] and document["equality"]["accepted"] > 0
    assert f"| {OURS} | 1 | " in out.read_text()


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_hits_are_found_and_timed_in_all_their_parts(tmp_path: Path) -> None:
    model, _ = require_pair("torch", "transformers", name=SHORT)
    stand_in, out = tmp_path / "stand-in", tmp_path / "out.json"
    run_script("scripts/stand_in.py", str(model), str(stand_in))
    size = ["--requests", "2", "--contexts", "256", "--steps", "40"]
    run_script("benchmarks/step_cost.py", str(stand_in), *size, "--out", str(out))
    (found,) = json.loads(out.read_text())["sizes"]

    assert found["has_caught_up"] and found["hits"]["steps"] > 0
    assert found["tokens_per_row"] > 1
    assert all(found["hits"][f"{name}_ms"][0] > 0 for name in ("step", "hook", "client", "lookup"))
    assert found["hits"]["hook_ms"][0] < found["hits"]["step_ms"][0]


def run_script(script: str, *words: str) -> None:
    done = subprocess.run([sys.executable, ROOT / script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
