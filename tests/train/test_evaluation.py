"""Fitting and judging a predictor as `specbranch train fit` does it, on made examples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specbranch.hrad.examples import ExamplesError
from specbranch.hrad.network import read_hrad
from specbranch.hrad.training import evaluate
from tests.train.test_fit import OPTIONS, examples

pytest.importorskip("torch")


def test_every_input_is_scored_on_prompts_it_has_not_seen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    told: list[str] = []
    found = evaluate(examples(1500, 0, True), OPTIONS, True, lambda stage, done, most: told.append(stage))
    found.write(tmp_path / "out")
    document = json.loads((tmp_path / "out" / "scores.json").read_text())

    assert set(found.scores) == {"majority", "features", "confidence", "both"}
    assert found.scores["features"].accuracy > found.scores["majority"].accuracy
    assert document == json.loads(json.dumps(found.as_json()))
    assert sum(document["positions"].values()) == 1500
    assert set(document["across"]) == {"code"}
    assert set(told) == {f"fitting on {name}" for name in ("features", "confidence", "both", "code")}
    assert read_hrad(tmp_path / "out") is not None


def test_a_split_without_prompts_says_what_to_do() -> None:
    one_prompt = replace(examples(20, 0, True), prompts=np.zeros(20, dtype=np.int64))

    with pytest.raises(ExamplesError, match="collect more prompts"):
        evaluate(one_prompt, OPTIONS, False, lambda stage, done, most: None)
