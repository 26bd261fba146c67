"""Draft probabilities in vLLM's V1 runner: which requests have them, and what the runner finds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specbranch.core.distribution import Distribution
from specbranch.core.sampling import Sampling
from specbranch.plugins.vllm.compat import probs as module
from specbranch.plugins.vllm.compat.probs import DraftProbs, sampling_of

torch = pytest.importorskip("torch")


def params(**given: Any) -> Any:
    return SimpleNamespace(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": None, **given})


def runner_of(*parameters: Any) -> Any:
    names = [f"r{index}" for index in range(len(parameters))]
    return SimpleNamespace(
        _draft_probs=None,
        _draft_prob_req_ids=None,
        device=torch.device("cpu"),
        input_batch=SimpleNamespace(req_ids=names),
        requests={name: SimpleNamespace(sampling_params=one) for name, one in zip(names, parameters, strict=True)},
    )


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (params(), Sampling(1.0)),
        (params(temperature=0.7, top_p=0.9, top_k=20), Sampling(0.7, 0.9, 20)),
        (params(top_k=-1, seed=5), Sampling(1.0)),  # the client draws by a number of its own
        (params(temperature=0.0), None),
        (params(structured_outputs=object()), None),
        (params(thinking_token_budget=5), None),
        (None, None),
    ],
)
def test_how_a_request_samples(parameters: Any, expected: Sampling | None) -> None:
    assert sampling_of(parameters) == expected


def test_the_runner_finds_what_each_token_was_drawn_from() -> None:
    runner = runner_of(params(), params(temperature=0.0), params())
    probs = DraftProbs(10, 3)
    q = Distribution((4, 7), (0.75, 0.25), 0.0)

    assert probs.samplings(runner, [0, 1, 2]) == {0: Sampling(1.0), 2: Sampling(1.0)}
    probs.hand_over(runner, [[4, 5], [6], []], {0: [q, None]})

    assert runner._draft_prob_req_ids == ["r0", "r1", "r2"]
    rows = runner._draft_probs
    assert rows[0, 0].nonzero().flatten().tolist() == [4, 7] and rows[0, 0, 4] == 0.75
    assert rows[0, 1].nonzero().flatten().tolist() == [5] and rows[0, 1, 5] == 1.0
    assert rows[1, 0, 6] == 1.0
    assert rows.sum() == 3.0

    probs.hand_over(runner, [[], [], [7]], {2: [q]})
    assert runner._draft_probs.sum() == 1.0 and runner._draft_probs[2, 0, 7] == 0.25


def test_where_nothing_was_drawn_the_runner_is_left_alone() -> None:
    runner = runner_of(params())
    DraftProbs(10, 3).hand_over(runner, [[4]], {0: [None]})

    assert runner._draft_probs is None


def test_a_runner_that_takes_none_and_too_many_rows_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(params())
    probs = DraftProbs(10, 3)
    assert probs.samplings(SimpleNamespace(), [0]) == {}
    del runner.requests["r0"]
    assert probs.samplings(runner, [0]) == {}

    monkeypatch.setattr(module, "MOST_BYTES", 4 * 10 * 3 * 2)
    assert probs.samplings(runner_of(params(), params()), [0, 1])
    assert probs.samplings(runner_of(params(), params(), params()), [0]) == {}


def test_drafts_that_were_cut_to_nothing_and_a_failure_leave_the_runner_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner, probs = runner_of(params()), DraftProbs(10, 3)
    q = Distribution((4, 7), (0.75, 0.25), 0.0)
    probs.hand_over(runner, [[]], {0: [q]})
    assert runner._draft_probs is None and not caplog.records

    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: 1 / 0)
    probs.hand_over(runner, [[4]], {0: [q]})
    assert runner._draft_probs is None and "as certain now" in caplog.text
    assert probs.samplings(runner, [0]) == {}


def test_rows_of_another_width_than_the_logits_are_not_handed_over() -> None:
    runner, probs = runner_of(params()), DraftProbs(10, 3)
    runner.model = SimpleNamespace(logits_processor=SimpleNamespace(org_vocab_size=10))
    assert probs.samplings(runner, [0])
    runner.model.logits_processor.org_vocab_size = 12
    assert probs.samplings(runner, [0]) == {}
