"""The stand-in for a GPU's step times: the model that it decodes with, and how its times are put together."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.root import ROOT


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


STEP_COST = load(ROOT / "benchmarks" / "step_cost.py")


def step(start_s: float, *, drafted: int = 1, told: int = 1, wait_s: float = 0.001) -> Any:
    """Ten milliseconds, the hook in the last four of them."""
    call = STEP_COST.Call(start_s + 0.006, start_s + 0.010, 0.002, client_s=0.003, wait_s=wait_s, num_drafted=drafted)
    call.num_asked, call.num_told = 1, told
    return STEP_COST.Step(start_s, start_s + 0.010, 0.008, 1, 2, call)


def test_what_the_service_did_goes_to_the_call_that_asked_for_it() -> None:
    steps = [step(1.00), step(1.01)]
    spans = [(1.005, 1.0055, 0.0), (1.0065, 1.0070, 0.0004), (1.0165, 1.0175, 0.0005), (2.0, 2.1, 0.1)]
    STEP_COST.join(steps, spans)

    assert [one.call.lookup_s for one in steps] == [pytest.approx(0.0005), pytest.approx(0.001)]
    assert [one.call.lookup_work_s for one in steps] == [0.0004, 0.0005]


def test_hits_and_others_are_told_apart() -> None:
    steps = [step(1.00), step(1.01, told=0), step(1.02, drafted=0)]
    found = STEP_COST.summary([step(0.5)], steps)

    assert (found["hits"]["steps"], found["others"]["steps"]) == (1, 2)
    assert found["hits"]["hook_ms"] == [4.0, 4.0]
    assert (found["hits"]["client_ms"][0], found["hits"]["wait_ms"][0]) == (2.0, 1.0)
    assert (found["hits"]["hook_share"], found["hits"]["hook_work_share"]) == (0.4, 0.25)
    assert (found["tokens_per_row"], found["drafted_rows"], found["told_rows"]) == (2.0, 0.667, 0.667)


def test_a_table_has_a_line_for_each_kind_of_step_that_there_was() -> None:
    sizes = [STEP_COST.summary([step(0.5)], [step(1.0, drafted=drafted)]) for drafted in (0, 1)]
    document = {"sizes": [{"requests": 8, "context": 4096, **size} for size in sizes]}
    head, rule, others, hits = STEP_COST.table(document).splitlines()

    assert head.count("|") == rule.count("|") == others.count("|") == hits.count("|")
    assert others == "|8|4,096|others|1|10.0|4.0/4.0|2.0|1.0|0|40%|8.0|2.0|0|25%|"
    assert hits == others.replace("others", "hits")


def test_a_method_that_does_not_exist_is_not_timed() -> None:
    class Owner:
        def double(self, number: int) -> int:
            return 2 * number

    STEP_COST.wrap(Owner, "double", lambda inner, *args: inner(*args) + 1)
    STEP_COST.wrap(Owner, "triple", lambda inner, *args: inner(*args))

    assert Owner().double(3) == 7
    assert not hasattr(Owner, "triple")


def test_a_stand_in_has_the_vocabulary_of_its_model_and_is_sure_of_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the torch engine needs torch")
    pytest.importorskip("transformers", reason="the torch engine needs transformers")
    pytest.importorskip("safetensors")
    from specbranch.engines.base import EngineOptions
    from specbranch.engines.torch import TorchEngine
    from tests.engines.conformance import fresh_distribution

    stand_in = load(ROOT / "scripts" / "stand_in.py")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": 500, "eos_token_id": 7}))
    (tmp_path / "model" / "vocab.txt").write_text("of the tokenizer")
    config = stand_in.config_of({"vocab_size": 500, "eos_token_id": 7}, 2, 128, 20000)
    stand_in.write(tmp_path / "model", tmp_path / "out", config, 1)
    stand_in.write(tmp_path / "model", tmp_path / "draft", {**config, "num_hidden_layers": 1}, 1)
    engine, draft = (TorchEngine(EngineOptions(str(tmp_path / name), dtype="float32")) for name in ("out", "draft"))
    texts = [[start, start + 1, start + 2] for start in range(0, 400, 20)]
    firsts = [fresh_distribution(engine, text) for text in texts]

    assert (tmp_path / "out" / "vocab.txt").exists()
    assert engine.info.vocab_len == 500
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 7
    assert sum(float(distribution.probs[0]) > 0.9 for distribution in firsts) > len(firsts) / 2
    assert len({distribution.ids[0] for distribution in firsts}) > len(firsts) / 2
    assert [one.ids[0] for one in firsts] == [fresh_distribution(draft, text).ids[0] for text in texts]
