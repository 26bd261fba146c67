"""What the proposer takes from a running target is what the predictor was trained on, and it reaches the service."""

from __future__ import annotations

import pytest

from tests.measuring import record
from tests.vllm.programs import run_program


@pytest.mark.timeout(900)
def test_features_are_those_of_transformers_and_the_output_is_bare_vllms() -> None:
    """Float32, greedy, six requests at once, one of them read in pieces; drafts stood and fell."""
    pytest.importorskip("prometheus_client")
    result = run_program("features")

    runs = result["runs"]
    num_faults = sum(run["hint_faults"] for run in runs.values())
    record("features", compared=result["compared"], largest_error=max(result["errors"]), hint_faults=num_faults)
    assert {run["equal"] for run in runs.values()} == {result["prompts"]}
    assert {run["hint_faults"] + run["faults"] for run in runs.values()} == {0}
    # Hidden states of four layers, and the embedding.
    assert len(result["errors"]) == 5 and max(result["errors"]) < 1e-3
    assert result["compared"] > 300 and result["after_accepted"] > 50 and result["unknown"] == 0
    assert runs["all"]["submitted"] > runs["all"]["accepted"] > 50
    # The hints were heard, every one, and they decide.
    assert runs["none"]["submitted"] == 0
    assert result["heard"] == result["told"] == result["compared"]
    assert "enforce_eager" in result["refusal"] and "--layers 1" in result["refusal"]
