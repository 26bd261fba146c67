"""What the kit makes of two servers' answers; made-up answers, so that each way of being wrong is seen to be caught."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from specbranch.exactness.openai_server import DraftCounts, Reply
from specbranch.exactness.server_findings import (
    Greedy,
    Sampled,
    check_server_property,
    drafting,
    find_divergence,
    first_difference,
    greedy_equality,
    greedy_together,
    group_by_prefix,
    same_distribution,
)
from specbranch.exactness.vllm_findings import FAILED, HOLDS, NOTE, SKIPPED

TIE = 0.25


def replies(*texts: str) -> list[Reply]:
    return [Reply(text, "length") for text in texts]


def greedy(
    endpoint: Sequence[Reply],
    reference_together: Sequence[Reply] | None = None,
    endpoint_together: Sequence[Reply] | None = None,
    **explained: Reply,
) -> Greedy:
    """The reference says "ab" and "cd"; `explained` has its log-probabilities by prompt."""
    reference, prompts = replies("ab", "cd"), ["one", "two"]
    return Greedy(
        prompts=prompts,
        reference=reference,
        endpoint=endpoint,
        reference_together=reference_together or reference,
        endpoint_together=endpoint_together or endpoint,
        explained={prompts.index(prompt): reply for prompt, reply in explained.items()},
    )


def with_gap(gap: float) -> Reply:
    """The reference's second answer, which prefers "d" to "x" by the gap."""
    return Reply("cd", "length", ["c", "d"], [{"c": -0.1, "z": -4.0}, {"d": -0.5, "x": -0.5 - gap}])


def test_equal_answers_hold() -> None:
    same = greedy(replies("ab", "cd"))

    assert (greedy_equality(same, TIE).result, greedy_together(same, 8, TIE).result) == (HOLDS, HOLDS)
    assert same.differing == []


def test_a_difference_is_told_with_its_place_and_gap() -> None:
    finding = greedy_equality(greedy(replies("ab", "cx"), two=with_gap(2.0)), TIE)

    assert (finding.result, finding.says) == (FAILED, "1 of 2 equal")
    assert finding.details == [
        "'two' at character 1: 'd' became 'x'; token 1 of the reference: 'd', not 'x', gap 2",
    ]


def test_a_near_tie_is_rounding_and_is_told() -> None:
    finding = greedy_equality(greedy(replies("ab", "cx"), two=with_gap(0.125)), TIE)

    assert finding.result == HOLDS
    assert finding.says == "1 of 2 equal, 1 differ by rounding (gap 0.25 or less)"
    assert greedy_equality(greedy(replies("ab", "cx"), two=with_gap(0.125)), 1e-5).result == FAILED


def test_one_real_difference_among_ties_fails() -> None:
    far = Reply("ab", "length", ["a", "b"], [{"a": -0.1, "x": -3.1}, {"b": -0.1}])

    assert greedy_equality(greedy(replies("xb", "cx"), one=far, two=with_gap(0.1)), TIE).result == FAILED


def test_without_log_probabilities_a_difference_fails_and_the_way_out_is_named() -> None:
    finding = greedy_equality(greedy(replies("ab", "cx")), TIE)

    assert finding.result == FAILED
    assert finding.says.endswith("1 of unknown gap: an error, or a tie that rounding decides. Serve both in float32")
    assert finding.details == ["'two' at character 1: 'd' became 'x'; gap unknown"]


def test_a_reference_that_changes_its_own_answers_cannot_prove_a_difference_of_unknown_gap() -> None:
    noisy = greedy(replies("ab", "cx"), reference_together=replies("ax", "cd"))
    finding = greedy_equality(noisy, TIE)

    assert finding.result == NOTE
    assert "the reference itself changes its answers (1 of 2 when asked together)" in finding.says
    known = greedy(replies("ab", "cx"), reference_together=replies("ax", "cd"), two=with_gap(2.0))
    assert greedy_equality(known, TIE).result == FAILED


def test_an_answer_that_the_reference_gave_too_is_none_of_the_endpoint_s_faults() -> None:
    finding = greedy_equality(greedy(replies("ab", "cx"), reference_together=replies("ab", "cx")), TIE)

    assert finding.result == HOLDS
    assert finding.details == ["'two' at character 1: 'd' became 'x'; the reference gave this answer too"]


def test_an_answer_that_ends_for_another_reason_is_a_difference() -> None:
    finding = greedy_equality(greedy([Reply("ab", "stop"), Reply("cd", "length")]), TIE)

    assert finding.result == FAILED
    assert "at character 2: '(end: length)' became '(end: stop)'" in finding.details[0]


@pytest.mark.parametrize(("gap", "result"), [(0.1, HOLDS), (2.0, FAILED)])
def test_requests_together_must_be_answered_as_alone(gap: float, result: str) -> None:
    changed = greedy(replies("ab", "cd"), endpoint_together=replies("ab", "cx"), two=with_gap(gap))

    assert greedy_equality(changed, TIE).result == HOLDS
    assert greedy_together(changed, 8, TIE).result == result
    assert changed.differing == [1]


def sampled(name: str, weights: Sequence[float], other: Sequence[float], size: int = 400) -> Sampled:
    chance = random.Random(len(name))
    one, two = ([replies(text) for text in chance.choices("abc", chosen, k=size)] for chosen in (weights, other))
    return Sampled(name, one, two)


def test_one_distribution_holds_and_another_is_caught() -> None:
    """The seeds are fixed."""
    same = sampled("same", [0.7, 0.2, 0.1], [0.7, 0.2, 0.1])
    other = sampled("other", [0.7, 0.2, 0.1], [0.5, 0.3, 0.2])
    right = same_distribution([same], 1e-3, np.random.default_rng(0))
    wrong = same_distribution([same, other], 1e-3, np.random.default_rng(0))

    assert [finding.result for finding in right] == [HOLDS, HOLDS]
    assert "would notice a shift of 0." in right[0].says
    assert [finding.result for finding in wrong] == [HOLDS, FAILED, FAILED]
    assert wrong[-1].name == "distribution: all together"


def test_a_shift_that_no_single_feature_shows_is_seen_in_all_together() -> None:
    small = [sampled("x" * number, [0.6, 0.3, 0.1], [0.5, 0.4, 0.1], 120) for number in range(1, 13)]
    findings = same_distribution(small, 1e-3, np.random.default_rng(0))

    assert [finding.result for finding in findings] == [HOLDS] * 12 + [FAILED]


def test_log_probabilities_are_compared_where_both_servers_give_them() -> None:
    """The texts show nothing, but the second server takes less likely tokens."""
    chance = random.Random(0)
    one, two = (
        [[Reply(f"{chance.random()}", "length", ["t"], [{"t": chance.gauss(mean, 1)}])] for _ in range(200)]
        for mean in (-3, -4)
    )
    [with_both, _] = same_distribution([Sampled("logprobs", one, two)], 1e-3, np.random.default_rng(0))
    without = [[Reply(reply.text, "length")] for [reply] in two]
    [with_one, _] = same_distribution([Sampled("logprobs", one, without)], 1e-3, np.random.default_rng(0))

    assert (with_both.compared, with_both.result) == ("mean log-probability of a sample", FAILED)
    assert (with_one.compared, with_one.result) == ("joint distribution, 14 cells", HOLDS)


def test_samples_without_an_accepted_draft_token_show_nothing_of_drafts() -> None:
    one = sampled("one", [0.7, 0.2, 0.1], [0.7, 0.2, 0.1])
    with_drafts, without = (
        same_distribution([replace(one, drafts=drafts)], 1e-3, np.random.default_rng(0))[0]
        for drafts in (DraftCounts(10, 4), DraftCounts(10, 0))
    )

    assert (with_drafts.result, without.result) == (HOLDS, NOTE)
    assert with_drafts.says.startswith("4 of 10 draft tokens accepted; would notice a shift of 0.")
    wrong = replace(sampled("other", [0.7, 0.2, 0.1], [0.3, 0.3, 0.4]), drafts=DraftCounts(10, 0))
    assert same_distribution([wrong], 1e-3, np.random.default_rng(0))[0].result == FAILED


def test_samples_of_one_text_could_not_have_shown_anything() -> None:
    [finding, _] = same_distribution([sampled("one text", [1, 0, 0], [1, 0, 0])], 1e-3, np.random.default_rng(0))

    assert (finding.result, finding.says) == (NOTE, "too few samples to notice any shift")


def test_choices_that_are_always_equal_are_noticed() -> None:
    """Each choice has the right distribution, but the second server repeats its first one."""
    chance = random.Random(0)
    free = [replies(*chance.choices("abc", [0.5, 0.3, 0.2], k=2)) for _ in range(200)]
    bound = [replies(*chance.choices("abc", [0.5, 0.3, 0.2]) * 2) for _ in range(200)]
    [finding, _] = same_distribution([Sampled("n = 2", free, bound)], 1e-3, np.random.default_rng(0))

    assert finding.result == FAILED


def test_a_property_of_every_answer() -> None:
    good, bad = replies("yes", "yes"), replies("yes", "no")

    def find(reference: list[Reply], endpoint: list[Reply]) -> tuple[str, Sequence[str]]:
        finding = check_server_property("says yes", "all", reference, endpoint, lambda one: one.text == "yes")
        return finding.result, finding.details

    assert find(good, good) == (HOLDS, ())
    assert find(good, bad) == (FAILED, ["'no' (length)"])
    assert find(bad, bad) == (SKIPPED, ())  # the reference cannot do it either
    assert find(good, []) == (SKIPPED, ())


@pytest.mark.parametrize(
    ("reference", "endpoint", "result", "says"),
    [
        (None, None, NOTE, "the server does not report draft tokens; make sure that speculative decoding is on"),
        (None, DraftCounts(10, 4), HOLDS, "4 of 10 draft tokens accepted"),
        (DraftCounts(), DraftCounts(10, 0), FAILED, "nothing was checked: 0 of 10 draft tokens accepted"),
        (
            DraftCounts(7, 3),
            DraftCounts(10, 4),
            HOLDS,
            "4 of 10 draft tokens accepted; the reference drafts too (7 tokens)",
        ),
    ],
)
def test_a_server_that_accepts_no_draft_token_was_not_checked(
    reference: DraftCounts | None, endpoint: DraftCounts | None, result: str, says: str
) -> None:
    finding = drafting(reference, endpoint)

    assert (finding.result, finding.says) == (result, says)


def reference(*likely: Mapping[str, float], end: str = "") -> Reply:
    """The first token of each row is the one that was chosen; `end` is not part of the text."""
    tokens = [next(iter(row)) for row in likely]
    return Reply("".join(tokens).removesuffix(end), "stop" if end else "length", tokens, likely)


def test_the_gap_of_the_first_other_token() -> None:
    found = find_divergence(
        reference({"a": -0.1, "b": -3.0}, {"c": -0.5, "d": -0.75}, {"e": -0.1, "x": -9.0}), Reply("adx")
    )

    assert found is not None
    assert (found.position, found.token, found.other_token, found.gap) == (1, "c", "d", 0.25)
    assert found.is_tie(0.25) and not found.is_tie(0.24)


def test_a_token_that_begins_with_the_reference_s_own() -> None:
    """The other text is "then", "go": it parts at the first token, though "the" fits both texts."""
    found = find_divergence(reference({" the": -0.5, " then": -0.6}, {" sea": -0.1, " n": -7.0}), Reply(" then go"))

    assert found is not None
    assert (found.position, found.other_token, round(found.gap, 6)) == (0, " then", 0.1)


def test_a_token_that_both_texts_begin_with_explains_nothing() -> None:
    """ " hea" is as likely as " heads" but fits both; they part at the second token, far from a tie."""
    found = find_divergence(reference({" heads": -0.5, " hea": -0.5}, {",": -0.1, ".": -5.1}), Reply(" heads."))

    assert found is not None
    assert (found.position, found.other_token, found.gap) == (1, ".", 5.0)


def test_a_token_that_was_not_reported_is_no_tie() -> None:
    found = find_divergence(reference({"a": -1.0, "b": -1.1}), Reply("zzz"))

    assert found is not None
    assert found.is_least and round(found.gap, 6) == 0.1
    assert not found.is_tie(0.25)


def test_an_answer_that_ends_early_took_a_token_that_ends() -> None:
    found = find_divergence(reference({"a": -0.1}, {"b": -0.7, "</s>": -0.8, "c": -9.0}), Reply("a", "stop"))

    assert found is not None
    assert (found.position, found.other_token, round(found.gap, 6)) == (1, "</s>", 0.1)


def test_an_answer_that_goes_on_where_the_reference_ends() -> None:
    found = find_divergence(
        reference({"a": -0.1}, {"<|im_end|>": -0.5, "b": -0.6}, end="<|im_end|>"), Reply("abc", "length")
    )

    assert found is not None
    assert (found.position, found.token, found.other_token, round(found.gap, 6)) == (1, "<|im_end|>", "b", 0.1)


def test_tokens_that_are_no_text_tell_nothing() -> None:
    """Half a character is reported as a replacement; the texts agree beyond it."""
    halves = Reply(
        "é!", "length", ["\ufffd", "\ufffd", "!"], [{"\ufffd": -0.1}, {"\ufffd": -0.1}, {"!": -0.2, "?": -0.3}]
    )

    assert find_divergence(halves, Reply("é?", "length")) is None
    assert find_divergence(Reply("a", "length"), Reply("b", "length")) is None


def test_the_first_character_that_differs() -> None:
    assert [first_difference("abc", other) for other in ("abd", "ab", "abcd", "abc")] == [2, 2, 3, 3]


def test_frequent_texts_are_cells_of_their_own_and_rare_ones_share_a_beginning() -> None:
    ones, others = group_by_prefix(["heads"] * 6 + ["heap", "hero"], ["tails"] * 5 + ["head", "x"])

    assert ones == ["heads"] * 6 + ["hea", "he"]
    assert others == ["tails"] * 5 + ["head", ""]


def test_the_cells_depend_on_the_pooled_texts_only() -> None:
    """Whoever gave a text, its cell is the same: what keeps a permutation test exact."""
    chance = random.Random(0)
    texts = ["".join(chance.choices("abc", k=4)) for _ in range(100)]
    order = chance.sample(range(100), 100)
    one, two = group_by_prefix(texts[:50], texts[50:])
    mixed = [texts[index] for index in order]
    three, four = group_by_prefix(mixed[:50], mixed[50:])
    cells, mixed_cells = one + two, three + four

    assert [cells[index] for index in order] == mixed_cells
    assert 3 < len(set(cells)) < 50


def test_many_samples_do_not_have_more_cells_than_can_be_compared() -> None:
    chance = random.Random(0)
    texts = ["".join(chance.choices("abcdef", k=6)) for _ in range(2000)]
    ones, others = group_by_prefix(texts[:1000], texts[1000:])

    assert 6 <= len(set(ones + others)) <= 60
