"""`benchmarks/never_slower.py`: what it reads off vLLM's log, and how blocks become ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.test_step_cost import load
from tests.root import ROOT

SCRIPT = load(ROOT / "benchmarks" / "never_slower.py")
SLOW = SCRIPT.Cell("slow", 4, "code", 0.0)
DIES = SCRIPT.Cell("dies", 4, "code", 1.0)


def block(ratio: float, *decisions: dict[str, Any]) -> Any:
    return SCRIPT.Block(100.0, 100.0 * ratio, list(decisions))


def decision(step: int, at_s: float, is_open: bool = False) -> dict[str, Any]:
    return {"step": step, "at_s": at_s, "is_open": is_open}


def test_the_lines_of_the_gate_are_understood(caplog: pytest.LogCaptureFixture) -> None:
    """As the proposer writes them."""
    from specbranch.plugins.vllm.proposer import SettingsGate
    from specbranch.service.client.gate import Decision

    with caplog.at_level("INFO", logger="vllm.specbranch"):
        SettingsGate().log_decisions({8: Decision(8, False, 9.1, 9.4, 256), 1: Decision(1, True, 3.0, 2.0, 512)})
    closed, opened = SCRIPT.decisions(["something else", *caplog.messages], 5.0)

    assert (closed.at_s, closed.is_open, closed.drafted, closed.plain) == (5.0, False, 9.1, 9.4)
    assert opened.is_open


def test_lines_are_seen_when_the_log_has_them(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    line = "with 1 requests at once 2.0 tokens/s with the draft model, 3.0 without: the draft model is off, next\n"
    log_file.write_text(line)
    with SCRIPT.watched(log_file) as seen, log_file.open("a") as log:
        log.write(line.replace("off", "on"))

    assert [one.is_open for one in seen] == [True]


def test_blocks_before_the_decision_are_told_apart() -> None:
    blocks = [block(0.7), block(0.8, decision(10, 2.0)), block(0.98), block(1.0)]
    found = SCRIPT.summary(SLOW, blocks)

    assert SCRIPT.num_settled(SLOW, blocks) == 2
    assert found["settled"] == {"ratio": 0.99, "error": 0.01, "blocks": 2} and found["holds"]
    assert found["all"]["ratio"] == 0.87
    assert found["decided"]["step"] == 64 + 10
    assert found["decided"]["at_s"] == pytest.approx(4 * 64 / 70 + 2.0, abs=0.01)


def test_the_death_of_a_draft_counts_from_the_block_in_which_it_dies() -> None:
    blocks = [block(1.2, decision(30, 1.0, is_open=True)), block(1.3), block(1.1, decision(40, 1.5))]
    blocks += [block(0.9), block(0.9)]
    found = SCRIPT.summary(DIES, blocks)

    assert found["settled"]["ratio"] == 0.9 and not found["holds"]
    assert (found["decided"]["step"], found["decided"]["at_s"]) == (40, 1.5)
    assert SCRIPT.summary(DIES, [block(1.0)] * 6)["decided"] is None


def test_too_few_blocks_give_no_ratio() -> None:
    found = SCRIPT.summary(SLOW, [block(0.9, decision(1, 0.1)), block(1.0)])

    assert found["settled"] is None and not found["holds"]


def test_the_table_has_a_line_for_each_cell() -> None:
    blocks = [block(0.9, decision(30, 2.0)), block(0.98), block(1.0)]
    lines = SCRIPT.table({"cells": {SLOW.name: SCRIPT.summary(SLOW, blocks)}}).splitlines()

    assert lines[2] == "|slow|4|code|0|0.990 ± 0.010|0.960 ± 0.031|30 steps, 2.0 s: off|"
    assert lines[-1].startswith("1 of 1 cells")


def test_every_draft_meets_every_load_greedy_and_two_sampled() -> None:
    found = SCRIPT.cells()

    assert len({cell.name for cell in found}) == len(found) == 24
    assert {(cell.pair, cell.load) for cell in found if cell.temperature} == {
        (pair, load) for pair in SCRIPT.PAIRS for load in (1, 16)
    }


def test_a_shuffled_head_says_the_same_under_other_names(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="weights are read with torch")
    safetensors = pytest.importorskip("safetensors.torch")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"tie_word_embeddings": true}')
    head = torch.arange(20.0).reshape(10, 2)
    safetensors.save_file({"model.embed_tokens.weight": head}, model / "model.safetensors")
    out = Path(SCRIPT.shuffled(str(model), tmp_path))
    weights = safetensors.load_file(out / "model.safetensors")

    assert torch.equal(weights["model.embed_tokens.weight"], head)
    assert not torch.equal(weights["lm_head.weight"], head)
    assert torch.equal(weights["lm_head.weight"].sort(0).values, head)
    assert '"tie_word_embeddings": false' in (out / "config.json").read_text()
