"""`scripts/gpu-proof` in its reduced form on the CPU, so that it works when somebody has a GPU."""

from __future__ import annotations

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
