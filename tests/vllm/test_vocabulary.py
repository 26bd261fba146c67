"""Stock vLLM with a draft of another family: the output is vLLM's, nothing is drafted, and the reason is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.models import model_path
from tests.root import ROOT
from tests.vllm.pair import SHORT, require_pair


@pytest.mark.timeout(1200)
def test_a_draft_of_another_family_costs_vllm_nothing_and_is_told(tmp_path: Path) -> None:
    target, _ = require_pair("prometheus_client", name=SHORT)
    draft = model_path("qwen-coder-0.5b")
    command = [sys.executable, "-m", "tests.vllm.run_vocabulary", "--target", str(target), "--draft", str(draft)]
    environment = {**os.environ, "SPECBRANCH_RUN": "vocabulary", "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["equal"] == result["prompts"] == 3
    assert result["tokens"] > 20
    assert result["draft_tokens"] == 0
    found = result["metrics"]
    assert found["vocabulary"] == 1 and "on" not in found
    assert found["specbranch_other_vocabulary_total"] == found["specbranch_calls_total"] > 10
    assert "specbranch_submitted_tokens_sum" not in found and "specbranch_faults_total" not in found
    assert done.stderr.count("nothing is drafted: the draft 'qwen-coder-0.5b.gguf' has another vocabulary") == 1
    assert "stand for different text in the draft; choose a draft with the target's tokenizer" in done.stderr
