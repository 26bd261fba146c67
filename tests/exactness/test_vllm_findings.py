"""What the kit makes of engines' outputs; made-up outputs, so that each way of being wrong is seen to be caught."""

from __future__ import annotations

import numpy as np

from specbranch.exactness.vllm_findings import (
    FAILED,
    HOLDS,
    NOTE,
    check_property,
    divergence_rates,
    divergences,
    drop_truncated,
    greedy_equality,
    has_all_logprobs,
    is_json,
    logprob_agreement,
    same_distribution,
    seeds_repeat,
)
from specbranch.launch.vllm_worker import DecodedOutput, DecodeResult, PromptRequest

ASKS = [PromptRequest("one", {}), PromptRequest("two", {})]


def done(*answers: DecodedOutput, accepted: int = 7) -> DecodeResult:
    return DecodeResult(answers=list(answers), submitted=9, accepted=accepted)


def answer(*tokens: int, logprobs: list[dict[int, float]] | None = None, text: str = "") -> DecodedOutput:
    return DecodedOutput(tokens=list(tokens), text=text, finish_reason="length", logprobs=logprobs or [])


def sampled(distribution: list[float], size: int, seed: int) -> list[DecodedOutput]:
    """Samples of two tokens, each from the distribution, with their log-probabilities."""
    rng = np.random.default_rng(seed)
    drawn = rng.choice(len(distribution), p=distribution, size=(size, 2))
    base = [0.7, 0.2, 0.1]
    return [answer(*row, logprobs=[{token: float(np.log(base[token]))} for token in row]) for row in drawn.tolist()]


def test_equal_outputs_hold() -> None:
    same = done(answer(1, 2), answer(3, 4))

    assert greedy_equality("greedy", ASKS, same, same).result == HOLDS


def test_one_other_token_fails_and_is_shown_with_its_gap() -> None:
    bare = done(answer(1, 2), answer(3, 4, logprobs=[{3: -0.1}, {4: -0.5, 9: -0.75}]))
    finding = greedy_equality("greedy", ASKS, bare, done(answer(1, 2), answer(3, 9)))

    assert finding.result == FAILED
    assert finding.says.startswith("1 of 2 equal")
    assert finding.details == ["'two' at token 1: bare 4, with the proposer 9, gap 0.25"]


def test_equally_likely_tokens_are_the_only_excuse() -> None:
    tie = done(answer(1, logprobs=[{1: -0.5, 2: -0.5}]), answer(3))
    finding = greedy_equality("greedy", ASKS, tie, done(answer(2), answer(3)))

    assert (finding.result, finding.figures["ties"]) == (HOLDS, 1)


def test_an_output_that_ends_early_is_a_difference() -> None:
    [found] = divergences([answer(1, 2)], [answer(1)])

    assert (found.position, found.token, found.other_token, found.is_tie) == (1, 2, None, False)


def test_without_accepted_drafts_nothing_was_checked() -> None:
    same, distribution = done(answer(1), answer(2), accepted=0), done(*sampled([0.7, 0.2, 0.1], 50, 0), accepted=0)
    findings = [
        greedy_equality("greedy", ASKS, same, same),
        *same_distribution([("plain", distribution, distribution)], 1e-3, np.random.default_rng(0)),
        check_property("any", "all", same, lambda _: True),
    ]

    assert [finding.result for finding in findings] == [FAILED] * 4
    assert all(finding.says.startswith("nothing was checked") for finding in findings)


def test_requests_with_a_seed_need_no_drafts_and_must_have_none() -> None:
    answers = sampled([0.7, 0.2, 0.1], 50, 0)
    none, some = DecodeResult(answers=list(answers)), done(*answers)
    without, with_drafts = (
        same_distribution([("seed per request", none, other)], 1e-3, np.random.default_rng(0))[0]
        for other in (none, some)
    )

    assert (without.result, with_drafts.result) == (HOLDS, FAILED)
    assert without.says.startswith("such requests get no drafts")
    assert with_drafts.says.startswith("such requests must get no drafts")


def test_logprobs_must_agree_and_be_there() -> None:
    bare = done(answer(1, 2, logprobs=[{1: -0.5}, {2: -0.25}]))
    near = done(answer(1, 2, logprobs=[{1: -0.5002}, {2: -0.25}]))
    far = done(answer(1, 2, logprobs=[{1: -0.51}, {2: -0.25}]))
    missing = done(answer(1, 2, logprobs=[{1: -0.5}, {3: -0.25}]))

    assert [logprob_agreement(bare, other).result for other in (near, far, missing)] == [HOLDS, FAILED, FAILED]


def test_one_distribution_holds_and_another_is_caught() -> None:
    """The same distribution sampled twice; then one with a fifth of each token's mass elsewhere.

    The seeds are fixed.
    """
    distribution, wrong = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]
    bare = done(*sampled(distribution, 400, 1))
    right, caught = (
        same_distribution([("plain", bare, done(*sampled(other, 400, 2)))], 1e-3, np.random.default_rng(0))
        for other in (distribution, wrong)
    )

    assert [finding.result for finding in right] == [HOLDS, HOLDS]
    assert [finding.result for finding in caught] == [FAILED, FAILED]
    assert "would notice a shift of 0." in right[0].says


def test_p_values_are_adjusted_for_all_features_together() -> None:
    bare, other = (done(*sampled([0.7, 0.2, 0.1], 60, seed)) for seed in (1, 2))
    alone = same_distribution([("plain", bare, other)], 1e-2, np.random.default_rng(0))
    among = same_distribution([("plain", bare, other)] * 4, 1e-2, np.random.default_rng(0))

    assert len(among) == 4 * len(alone)
    assert all(finding.p_value is not None and finding.p_value >= finding.figures["raw_p_value"] for finding in among)


def test_a_property_of_every_output() -> None:
    good, bad = answer(1, text='{"a": 1, "b": 2}'), answer(1, text='{"a": 1')

    def holds(one: DecodedOutput) -> bool:
        return is_json(one.text, ("b", "a"))

    assert check_property("JSON", "all", done(good), holds).result == HOLDS
    assert check_property("JSON", "all", done(good, bad), holds).details == ["'{\"a\": 1' (length)"]
    none = check_property("JSON", "all", drop_truncated(done(bad)), holds)
    assert (none.result, none.says) == (FAILED, "nothing was checked: there are no such outputs")
    assert not holds(answer(1, text='{"a": 1}'))
    assert not has_all_logprobs(answer(1, 2, logprobs=[{1: -0.5}]))


def test_noise_and_seeds_are_reported_and_never_fail() -> None:
    one, two = done(answer(1)), done(answer(2))
    noise, seeds = divergence_rates("bfloat16", one, one, two), seeds_repeat((one, one), (one, two))

    assert (noise.result, noise.figures["proposer"], noise.figures["own"]) == (NOTE, 1, 0)
    assert (seeds.result, seeds.figures) == (NOTE, {"bare": 1, "proposer": 0})
