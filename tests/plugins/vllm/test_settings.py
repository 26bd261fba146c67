"""The arguments that bring the proposer into vLLM: complete, readable by the proposer, and made without vLLM."""

from __future__ import annotations

import subprocess
import sys

from specbranch.plugins.vllm.settings import PROPOSER, ProposerSettings, proposer_arguments, read_settings


def test_the_proposer_reads_the_settings_that_were_given() -> None:
    settings = ProposerSettings(address="ipc:///d", planner="pearl", settings={"gamma": 3}, deadline_ms=7.0)
    arguments = proposer_arguments(settings, 5)

    assert arguments["speculative_config"] == {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": 5,
    }
    assert set(arguments) == {"speculative_config", "additional_config"}
    assert read_settings(arguments["additional_config"]["specbranch"]) == settings


def test_they_are_made_without_vllm_and_without_heavy_libraries() -> None:
    program = (
        "import sys, specbranch.plugins.vllm.settings\n"
        "assert not {'vllm', 'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
