"""Real vLLM stops before it loads weights and says why: with two pipeline stages, with a hybrid target on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from specbranch.launch.placement import usable_cores
from specbranch.launch.vllm_log import FailureParser
from specbranch.plugins.vllm.settings import ProposerSettings, proposer_arguments
from tests.models import model_path
from tests.vllm.made_models import write_hybrid


def served(words: Sequence[str], tmp_path: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Start vLLM's server with our proposer and these words; return what it did until it ended."""
    ours = proposer_arguments(ProposerSettings(address=f"ipc://{tmp_path}/nobody.sock"), 4)
    command = ["serve", *words, "--max-model-len", "256", "--enforce-eager", "--port", "0"]
    command += ["--speculative-config", json.dumps(ours["speculative_config"])]
    command += ["--additional-config", json.dumps(ours["additional_config"])]
    return subprocess.run(
        [sys.executable, "-m", "specbranch.launch.vllm_server", *command],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_proposer_refuses_pipeline_parallelism(tmp_path: Path) -> None:
    cores = usable_cores()
    if len(cores) < 2:
        pytest.skip("two workers need two cores")
    words = [str(model_path("smollm2-short-dense")), "-pp", "2", "--dtype", "float32"]
    done = served(words, tmp_path, {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}"})

    assert done.returncode != 0
    assert "pipeline parallelism (2 stages) cannot be combined with drafts" in done.stdout, done.stdout[-4000:]
    loading = [line for line in done.stdout.splitlines() if "Starting to load model" in line]
    assert not any(
        "PP1" in line for line in loading
    )  # the stage that has the proposer; the other one knows nothing of it
    assert "pipeline parallelism" in FailureParser(done.stdout.splitlines()).cause(done.returncode)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_proposer_refuses_a_hybrid_target_on_a_cpu(tmp_path: Path) -> None:
    """A tiny Qwen3-Next, whose answers were wrong with drafts, by any proposer (studies/12-families)."""
    target = write_hybrid(tmp_path / "hybrid")

    done = served([str(target), "--skip-tokenizer-init"], tmp_path, {})

    assert done.returncode != 0
    assert "has recurrent layers, and on a CPU vLLM takes their state back wrongly" in done.stdout, done.stdout[-4000:]
    assert "Starting to load model" not in done.stdout
    assert "recurrent layers" in FailureParser(done.stdout.splitlines()).cause(done.returncode)
