"""Stock vLLM with the proposer and a LoRA adapter: rows that have it are not drafted for, and all outputs stand."""

from __future__ import annotations

import pytest

from tests.vllm.programs import run_program


@pytest.mark.timeout(900)
def test_rows_with_an_adapter_get_no_drafts_and_the_others_do() -> None:
    result = run_program("lora")

    assert result["differing"], "the adapter must change what the model says"
    assert result["equal"] == dict.fromkeys(("bare", "told", "untold"), result["rows"])
    assert result["drafted"]["told"]["lora"] == 0 < result["drafted"]["told"]["plain"]
    assert result["asides"] > 0
    # The reason for all this: a proposer that cannot tell the rows apart drafts for both.
    assert result["drafted"]["untold"]["lora"] > 0
