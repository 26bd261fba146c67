"""Where an answer leaves the reference's, told from the reference's log-probabilities and the other text alone."""

from __future__ import annotations

from collections.abc import Mapping

from specbranch.exactness.openai_server import Reply
from specbranch.exactness.server_findings import find_divergence, first_difference


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
