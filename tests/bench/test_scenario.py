"""Scenario files and prompts: read in full, or refused with the reason."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from specbranch.bench.runner import plan_trials
from specbranch.bench.scenario import PromptError, ScenarioError, read_prompts, read_scenario, scenario_of
from specbranch.core.planners import SettingError
from specbranch.hrad.network import write_hrad
from tests.root import ROOT

SMALL = """
name = "small"
target = "t"
draft = "d"
repeats = 2
concurrency = [1, 2]
[[prompts]]
task = "gsm8k"
file = "g.jsonl"
count = 4
[[methods]]
name = "bare"
[[methods]]
name = "ours"
planner = "specbranch"
settings = { gamma = 3 }
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"question": f"question {number}"} for number in range(40)]
    (tmp_path / "g.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return tmp_path


def written(directory: Path, text: str) -> Path:
    path = directory / "s.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.toml")), ids=lambda path: path.stem)
def test_every_committed_scenario_can_be_read(path: Path) -> None:
    assert read_scenario(path).name == path.stem


def test_a_predictor_for_another_window_is_refused_before_anything_is_loaded(data: Path) -> None:
    pytest.importorskip("safetensors", reason="trained predictors are stored with safetensors")
    from tests.hrad.test_network import CARD, small_tensors

    write_hrad(data / "hrad", small_tensors(), CARD)  # of windows of two tokens
    text = SMALL + f'predictor = "{data / "hrad"}"\n'

    with pytest.raises(SettingError, match="windows of 2 draft tokens, and gamma is 3; set gamma to 2"):
        read_scenario(written(data, text)).check()
    read_scenario(written(data, text.replace("gamma = 3", "gamma = 2"))).check()


def test_every_method_sees_every_group_of_prompts_side_by_side_in_an_order_of_its_own(data: Path) -> None:
    scenario = read_scenario(written(data, SMALL))
    trials = plan_trials(scenario, data)

    assert len(trials) == scenario.num_trials == 2 * (4 + 2) * 2
    pairs = list(zip(trials[::2], trials[1::2], strict=True))
    assert all(a.messages == b.messages and {a.method.name, b.method.name} == {"bare", "ours"} for a, b in pairs)
    assert {a.method.name for a, _ in pairs} == {"bare", "ours"}
    assert trials == plan_trials(scenario, data)
    few = read_scenario(written(data, "groups = 1\n" + SMALL))
    assert len(plan_trials(few, data)) == 2 * (1 + 1) * 2
    settings = scenario.proposer_settings(scenario.methods[1], "ipc:///x")
    assert settings is not None and settings.settings == {"gamma": 3}
    assert scenario.proposer_settings(scenario.methods[0], "ipc:///x") is None


def test_a_scenario_is_known_again_from_its_results(data: Path) -> None:
    scenario = read_scenario(written(data, SMALL))
    document = scenario.as_json()
    del document["groups"]  # written before there were groups

    assert scenario_of(document) == scenario
    assert scenario_of({**document, "seed": 1}) != scenario


def test_speed_is_divided_by_devices_where_none_are_pinned(data: Path) -> None:
    scenario = read_scenario(
        written(data, "target_cores = []\ndraft_cores = []\narguments = {tensor_parallel_size = 2}\n" + SMALL)
    )

    assert [scenario.num_cores(method) for method in scenario.methods] == [2, 3]


def test_prompts_are_spread_over_the_file(data: Path) -> None:
    assert read_prompts("gsm8k", data / "g.jsonl", 4) == [f"question {number}" for number in (0, 10, 20, 30)]
    others = read_prompts("gsm8k", data / "g.jsonl", 4, skip=20)
    assert others == [f"question {number}" for number in (1, 11, 21, 31)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("repeats", "repeat"), "unknown field"),
        (('task = "gsm8k"', 'task = "gsm"'), "did you mean 'gsm8k'"),
        (('"specbranch"', '"specbranh"'), "did you mean 'specbranch'"),
        (('name = "bare"', 'name = "ours"'), "different names"),
        (('name = "bare"', 'name = "bare"\nplanner = "pearl"'), "must be vLLM alone"),
        (('name = "bare"', 'name = "bare"\nspeculative_config = {method = "ngram"}'), "must be vLLM alone"),
        (("count = 4", "count = "), "is not a scenario"),
        (("settings = {", "cores = [0]\nsettings = {"), "only for methods without one"),
    ],
)
def test_a_mistake_in_a_scenario_is_named(data: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises((ScenarioError, SettingError), match=message):
        read_scenario(written(data, SMALL.replace(*change)))


def test_methods_share_an_engine_if_they_need_the_same_one(data: Path) -> None:
    peers = """
[[methods]]
name = "pearl"
planner = "pearl"
[[methods]]
name = "ngram"
speculative_config = { method = "ngram", num_speculative_tokens = 5 }
[[methods]]
name = "both cores"
cores = [0, 1]
"""
    scenario = read_scenario(written(data, SMALL + peers))
    bare, ours, pearl, ngram, both = scenario.methods

    assert ours.engine == pearl.engine
    assert len({bare.engine, ours.engine, ngram.engine, both.engine}) == 4
    assert [scenario.num_cores(method) for method in (bare, ours, ngram, both)] == [1, 2, 1, 2]
    on_gpu = read_scenario(written(data, "target_cores = []\ndraft_cores = []\n" + SMALL + peers))
    assert [on_gpu.num_cores(method) for method in on_gpu.methods[:2]] == [1, 2]


def test_engines_that_do_not_fit_together_take_turns_block_by_block(data: Path) -> None:
    peer = '[[methods]]\nname = "ngram"\nspeculative_config = { method = "ngram" }\n'
    text = "engines_at_once = 1\nblock = 4\n" + SMALL + peer
    trials = plan_trials(read_scenario(written(data, text)), data)
    changes = sum(one.method.engine != other.method.engine for one, other in pairwise(trials))

    # Two repeats of six groups in blocks of four: four blocks of three engines.
    assert len(trials) == 2 * 6 * 3
    assert 4 * 2 <= changes <= 4 * 3
    assert {(trial.messages, trial.method.name) for trial in trials[:12]} == {
        (trial.messages, name) for trial in trials[:4] for name in ("bare", "ours", "ngram")
    }


def test_any_file_of_prompts_will_do(data: Path) -> None:
    text = SMALL.replace('task = "gsm8k"', 'task = "mine"\nfield = "question"')

    assert plan_trials(read_scenario(written(data, text)), data)[0].task == "mine"


def test_prompts_that_are_not_there_are_named(data: Path) -> None:
    for task, name, count, message in (
        ("gsm8k", "none.jsonl", 1, "in the directory --data"),
        ("gsm8k", "g.jsonl", 50, "holds 40 prompts"),
        ("humaneval", "g.jsonl", 1, "does not hold prompts of humaneval"),
        ("poems", "g.jsonl", 1, "no task is called 'poems'"),
    ):
        with pytest.raises(PromptError, match=message):
            read_prompts(task, data / name, count)
    with pytest.raises(ScenarioError, match="cannot read"):
        read_scenario(data / "none.toml")
