"""The speculator for Model Runner V2 against a runner of torch tensors; vLLM itself does not run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from specbranch.core.round import Draft
from specbranch.plugins.vllm import compat
from specbranch.plugins.vllm.hidden_states import FeatureError
from specbranch.plugins.vllm.settings import ProposerSettings
from tests.vllm.ranks import GAMMA, MAX_LEN, Group, Rank


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "broadcast", lambda tensor: tensor)


def test_drafts_follow_the_texts_that_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.states.sample(2, [5, 6, 7])
    rank.states.sample(0, [1, 2, 3, 4, 40])

    assert rank.propose(("a", 2, 1), ("b", 0, 4)) == [[8, 9, 10], [41, 42, 43]]
    assert rank.client.told == [([5, 6, 7], 1), ([1, 2, 3, 4, 40], 4)]

    rank.states.sample(2, [5, 6, 7, 8, 20])
    assert rank.propose(("a", 2, 2)) == [[21, 22, 23]]
    assert rank.client.told == [([5, 6, 7, 8, 20], 2)]


def test_a_row_in_chunked_prefill_gets_its_last_token_and_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.states.sample(0, [1, 2, 3])
    rank.states.sample(1, [7, 8])

    assert rank.propose(("a", 0, 0), ("b", 1, 1)) == [[3, 3, 3], [9, 10, 11]]
    assert rank.client.told == [([7, 8], 1)]


def test_a_short_draft_is_filled_and_cut_where_the_scheduler_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.client.length = 1
    rank.states.sample(0, [1, 2])

    assert rank.propose(("a", 0, 1)) == [[3, 2, 2]]
    asked = SimpleNamespace(req_ids=["a", "gone"], draft_token_ids=[[-1] * GAMMA, [-1] * GAMMA])
    assert rank.speculator.trim_drafts(asked).draft_token_ids == [[-1], []]


def test_the_end_of_the_longest_text_gets_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.states.sample(0, list(range(1, MAX_LEN)))
    rank.states.sample(1, list(range(1, MAX_LEN - 1)))

    assert rank.propose(("a", 0, 1), ("b", 1, 1)) == [[15, 15, 15], [15, 14, 14]]


def test_vllm_may_verify_fewer_places_at_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.states.sample(0, [1, 2])

    assert rank.propose(("a", 0, 1), num_speculative_tokens=2) == [[3, 4, 2]]
    rank.client.told = []
    assert rank.propose(("a", 0, 1), num_speculative_tokens=0) == [[0, 0, 0]]
    assert rank.client.told == []


@pytest.mark.parametrize("name", ["a", "_warmup_0_"])
def test_dummy_runs_and_warmups_ask_nobody(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rank = Rank(monkeypatch)
    rank.states.sample(0, [1, 2])
    kwargs = {"dummy_run": True} if name == "a" else {}
    monkeypatch.setattr(compat, "broadcast", None)

    assert rank.propose((name, 0, 1), **kwargs) == [[0, 0, 0]]
    assert rank.client.told == []
    rank.speculator.init_cudagraph_manager(None)
    rank.speculator.capture()


def test_all_ranks_have_the_drafts_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "broadcast", Group().broadcast)
    ranks = [Rank(monkeypatch, is_output_rank=is_first) for is_first in (True, False)]
    for rank in ranks:
        rank.states.sample(0, [1, 2])
        rank.states.sample(1, [7, 8])
    ranks[0].client.length = 2

    first, second = (rank.propose(("a", 0, 1), ("b", 1, 1)) for rank in ranks)
    assert first == second == [[3, 4, 2], [9, 10, 8]]
    assert ranks[1].client is None
    probabilities = [rank.speculator.draft_token_confidence_probs[:2].tolist() for rank in ranks]
    assert probabilities[0] == probabilities[1]


def test_a_rank_that_fails_lets_no_other_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "broadcast", Group().broadcast)
    ranks = [Rank(monkeypatch, is_output_rank=is_first) for is_first in (True, False)]
    ranks[0].client.has_failed = True
    for _ in range(2):
        for rank in ranks:
            rank.states.sample(0, [1, 2])
        first, second = (rank.propose(("a", 0, 1)) for rank in ranks)
        assert first == second == [[2, 2, 2]]

    assert caplog.text.count("drafting failed") == 1


def test_without_a_planner_nothing_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, planner="none")
    rank.states.sample(0, [1, 2])
    monkeypatch.setattr(rank.speculator, "_copier", SimpleNamespace(send=torch.from_numpy))

    assert rank.propose(("a", 0, 1)) == [[2, 2, 2]]


def test_the_runner_tells_of_prompts_and_of_rows_that_stand_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.states.sample(0, [1, 2])
    rank.states.sample(1, [7, 8])
    rank.sample_at([0.0] * 4)
    model_runner = rank.speculator._runner
    model_runner.lora_state.lora_ids[0] = 5
    rank.speculator.on_step_scheduled(model_runner, compat.StepInfo([[1]]))

    assert rank.client.expected == [[1]]
    assert rank.propose(("a", 0, 1), ("b", 1, 1)) == [[2, 2, 2], [9, 10, 11]]
    assert rank.speculator._core._stats.skipped == {"lora": 1}


def test_adaptive_verification_leaves_out_places_without_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own function, which gives a number of places to those rows that are likeliest to be accepted."""
    module = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.adaptive_verification")
    rank = Rank(monkeypatch)
    assert rank.speculator.enable_adaptive_verification
    rank.states.sample(0, [1, 2])
    rank.states.sample(1, [7, 8])
    monkeypatch.setattr(
        rank.client,
        "propose",
        lambda rows, step_s: [Draft([3, 4, 5][: 1 if row.tokens[0] == 1 else 3]) for row in rows],
    )
    rank.propose(("a", 0, 1), ("b", 1, 1))
    capacities = torch.tensor([GAMMA, GAMMA], dtype=torch.int32)
    probabilities = rank.speculator.draft_token_confidence_probs
    module._assign_draft_token_budget(probabilities, torch.tensor([0, 1]), capacities, 4, GAMMA)

    assert capacities.tolist() == [1, 3]


def test_settings_can_change_but_not_to_a_trained_predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.speculator.configure(ProposerSettings(planner="pearl", address="ipc:///nowhere"))
    with pytest.raises(FeatureError, match="'v1'"):
        rank.speculator.configure(ProposerSettings(predictor="/somewhere/hrad"))
