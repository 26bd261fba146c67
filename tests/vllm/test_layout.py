"""Real vLLM with two pipeline stages stops before the last one loads its weights, and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from specbranch.launch.placement import usable_cores
from specbranch.launch.vllm_log import FailureParser
from specbranch.plugins.vllm.settings import ProposerSettings, proposer_arguments
from tests.models import model_path


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_proposer_refuses_pipeline_parallelism(tmp_path: Path) -> None:
    cores = usable_cores()
    if len(cores) < 2:
        pytest.skip("two workers need two cores")
    ours = proposer_arguments(ProposerSettings(address=f"ipc://{tmp_path}/nobody.sock"), 4)
    words = [
        "serve",
        str(model_path("smollm2-short-dense")),
        "-pp",
        "2",
        "--dtype",
        "float32",
        "--max-model-len",
        "256",
    ]
    words += ["--enforce-eager", "--port", "0", "--speculative-config", json.dumps(ours["speculative_config"])]
    words += ["--additional-config", json.dumps(ours["additional_config"])]
    binding = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "specbranch.launch.vllm_server", *words],
        env={**os.environ, **binding},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert done.returncode != 0
    assert "pipeline parallelism (2 stages) cannot be combined with drafts" in done.stdout, done.stdout[-4000:]
    loading = [line for line in done.stdout.splitlines() if "Starting to load model" in line]
    assert not any(
        "PP1" in line for line in loading
    )  # the stage that has the proposer; the other one knows nothing of it
    assert "pipeline parallelism" in FailureParser(done.stdout.splitlines()).cause(done.returncode)
