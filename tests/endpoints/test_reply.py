"""Answers in the forms that servers have."""

from __future__ import annotations

import pytest

from specbranch.exactness.openai_server import Reply, read_replies

LEGACY = {
    "text": " heads",
    "finish_reason": "length",
    "logprobs": {"tokens": [" he", "ads"], "token_logprobs": [-0.5, -0.25], "top_logprobs": [{" ta": -1.0}, None]},
}
CHAT = {
    "message": {"content": " heads"},
    "finish_reason": "length",
    "logprobs": {
        "content": [
            {"token": " he", "logprob": -0.5, "top_logprobs": [{"token": " ta", "logprob": -1.0}]},
            {"token": "ads", "logprob": -0.25},
        ]
    },
}
BOTH = Reply(" heads", "length", [" he", "ads"], [{" ta": -1.0, " he": -0.5}, {"ads": -0.25}])


@pytest.mark.parametrize("choice", [LEGACY, CHAT, {**CHAT, "text": " heads"}], ids=["completion", "chat", "llama.cpp"])
def test_both_forms_say_the_same(choice: dict[str, object]) -> None:
    assert read_replies({"choices": [choice]}) == [BOTH]
    assert BOTH.surprise == -0.75


def test_choices_are_in_the_order_of_their_index() -> None:
    choices = [{"index": 1, "text": "b"}, {"index": 0, "text": "a", "logprobs": None}]

    assert [reply.text for reply in read_replies({"choices": choices})] == ["a", "b"]


def test_a_chat_without_text_is_empty() -> None:
    assert read_replies({"choices": [{"message": {"content": None}}]}) == [Reply("", None, [], [])]


def test_an_impossible_token_has_a_finite_number() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"b": float("-inf")}]}
    [reply] = read_replies({"choices": [{"text": "a", "logprobs": logprobs}]})

    assert reply.logprobs == [{"b": -9999.0, "a": -0.5}]
    logprobs["token_logprobs"] = [float("nan")]
    with pytest.raises(ValueError, match="not a number"):
        read_replies({"choices": [{"text": "a", "logprobs": logprobs}]})


@pytest.mark.parametrize("document", [{}, {"choices": []}, {"choices": [{}]}, {"choices": [3]}, {"choices": None}])
def test_anything_else_is_an_error(document: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        read_replies(document)
