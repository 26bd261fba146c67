"""The kit on toy models in this process: its false alarms, and what it catches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specbranch.exactness.openai_server import CHAT, Reply, RequestRefused, ServerError
from specbranch.exactness.server_check import CompareOptions, Comparison, compare
from specbranch.exactness.vllm_check import CheckSize
from specbranch.exactness.vllm_findings import FAILED, NOTE, SKIPPED
from specbranch.launch.vllm_worker import PromptRequest
from tests.exactness.toy import InProcess, Toy, gullible, speculative

SMALL = CompareOptions(size=CheckSize(2, 4, 64, 0))


def compared(endpoint: Toy, reference: Toy | None = None, options: CompareOptions = SMALL) -> Comparison:
    one, other = InProcess(endpoint), InProcess(reference or Toy(seed=10_000 + endpoint.seed))
    return compare(one, other, options, lambda stage, done, total: None)


def results(found: Comparison) -> dict[str, str]:
    return {finding.name: finding.result for finding in found.findings}


@pytest.fixture
def without_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test would notice takes longer to find than the test itself, and decides nothing."""
    monkeypatch.setattr("specbranch.exactness.statistics.detectable_shift", lambda *_: 0.0)


@pytest.mark.usefixtures("without_power")
def test_false_alarms_are_as_rare_as_stated() -> None:
    """200 runs against a right speculative server at a rate of 0.2: 63 alarms or more once in ten thousand times."""
    options = CompareOptions(size=CheckSize(1, 2, 30, 0), alpha=0.2)
    alarms = [
        any(result == FAILED for result in results(compared(Toy(speculative, seed=seed), options=options)).values())
        for seed in range(200)
    ]

    assert 0 < sum(alarms) < 63


@pytest.mark.usefixtures("without_power")
@pytest.mark.parametrize(
    "wrong",
    [Toy(gullible, seed=1), Toy(speculative, wrong_temperature=1.5, seed=1)],
    ids=["a wrong acceptance rule", "another temperature"],
)
def test_a_wrong_distribution_is_caught_with_few_samples(wrong: Toy) -> None:
    found = compared(wrong)

    assert found.has_failed
    assert results(found)["distribution: all together"] == FAILED
    assert results(found)["greedy"] == "holds"


@pytest.mark.parametrize(
    ("wrong", "failed"),
    [
        (Toy(keeps_stop=True), "stop string absent"),
        (Toy(breaks_json=True), "JSON parses"),
        (Toy(ignores_n=True), "all choices given"),
        (Toy(likes=" cloud,"), "greedy"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_every_check_can_fail(wrong: Toy, failed: str) -> None:
    assert results(compared(wrong))[failed] == FAILED


def test_a_feature_that_a_server_refuses_is_skipped() -> None:
    class Refusing(InProcess):
        def ask_all(
            self, asks: Sequence[PromptRequest], at_once: int, on_done: Callable[[int], None]
        ) -> list[list[Reply]]:
            try:
                return super().ask_all(asks, at_once, on_done)
            except ValueError as error:
                raise RequestRefused(str(error)) from error

    toy = Refusing(Toy(refuses=["response_format", "logprobs", "n"], seed=1))
    found = compare(toy, InProcess(Toy(seed=2)), SMALL, lambda stage, done, total: None)
    skipped = {finding.name: list(finding.details) for finding in found.findings if finding.result == SKIPPED}

    assert not found.has_failed
    assert skipped == {
        "distribution: JSON schema": ["response_format is not supported"],
        "distribution: logprobs": ["logprobs is not supported"],
        "distribution: n = 2": ["n is not supported"],
    }
    assert "JSON parses" not in results(found)


def test_a_server_that_repeats_itself_is_given_seeds() -> None:
    """As some do that have one seed for all requests; without seeds both samples would be one text each."""

    seeds: list[int] = []

    class Repeating(Toy):
        def answer(self, body: dict[str, Any], is_chat: bool = False) -> dict[str, Any]:
            seeds.extend([body["seed"]] if "seed" in body else [])
            return super().answer({"seed": self.seed, **body}, is_chat)

    found = compared(Repeating(seed=1), Repeating(seed=2))

    assert results(found)["seeds"] == NOTE
    assert len(set(seeds)) == len(seeds) > 1000  # no sample is drawn twice: the features are independent
    assert not found.has_failed
    assert results(found)["distribution: temperature 1"] == "holds"


def test_servers_without_an_api_in_common_are_refused() -> None:
    with pytest.raises(ServerError, match="both must answer"):
        compare(InProcess(Toy(), takes=[CHAT]), InProcess(Toy(), takes=[]), SMALL, lambda stage, done, total: None)


def test_servers_with_chats_only_are_compared_by_chats() -> None:
    one, other = (InProcess(Toy(seed=seed), takes=[CHAT]) for seed in (1, 2))
    found = compare(one, other, SMALL, lambda stage, done, total: None)

    assert not found.has_failed
    assert {finding.result for finding in found.findings} == {"holds", NOTE}


def test_rounding_noise_is_told_from_an_error() -> None:
    """A reference whose logits change a little from request to request, like one in bfloat16."""
    options = CompareOptions(size=CheckSize(32, 40, 8, 0))
    by_rounding = compared(Toy(noise=0.02, seed=1), Toy(noise=0.02, seed=2), options)
    by_error = compared(Toy(noise=0.02, likes=" cloud,", seed=1), Toy(noise=0.02, seed=2), options)
    greedy = by_rounding.findings[0]

    assert (greedy.result, results(by_error)["greedy"]) == ("holds", FAILED)
    assert greedy.figures["equal"] < 32
    assert "differ by rounding" in greedy.says


def test_nothing_in_common_but_the_path_is_an_error() -> None:
    class Refusing(InProcess):
        def ask_all(
            self, asks: Sequence[PromptRequest], at_once: int, on_done: Callable[[int], None]
        ) -> list[list[Reply]]:
            raise RequestRefused("not today")

    with pytest.raises(ServerError, match="nothing could be compared: not today"):
        compare(Refusing(Toy()), InProcess(Toy()), SMALL, lambda stage, done, total: None)
