"""What an OpenAI-compatible server answers, read from its JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LEAST = -9999.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One choice of an answer.

    `tokens` and, for each of them, `logprobs` (the likeliest tokens and the chosen one) are there if they were asked
    for.
    """

    text: str
    finish_reason: str | None = None
    tokens: Sequence[str] = ()
    logprobs: Sequence[Mapping[str, float]] = ()

    def __str__(self) -> str:
        return f"{self.text!r} ({self.finish_reason})"

    @property
    def surprise(self) -> float:
        """The log-probability of the whole text."""
        return sum(likely[token] for token, likely in zip(self.tokens, self.logprobs, strict=True))


def read_replies(document: Mapping[str, Any]) -> list[Reply]:
    """All choices of a completion, or of a chat completion; raises KeyError, TypeError or ValueError on others."""
    choices = sorted(document["choices"], key=lambda choice: int(choice.get("index", 0)))
    if not choices:
        raise ValueError("no choices")
    return [_read_choice(choice) for choice in choices]


def _read_choice(choice: Mapping[str, Any]) -> Reply:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    tokens, logprobs = _read_logprobs(choice.get("logprobs") or {})
    return Reply(text or "", choice.get("finish_reason"), tokens, logprobs)


def _read_logprobs(found: Mapping[str, Any]) -> tuple[list[str], list[dict[str, float]]]:
    if found.get("content"):  # the form of chats, which some servers have everywhere
        rows = [(one["token"], _number(one["logprob"]), _likeliest(one)) for one in found["content"]]
    elif found.get("tokens"):
        likeliest = [
            {token: _number(value) for token, value in (likely or {}).items()}
            for likely in found.get("top_logprobs") or [None] * len(found["tokens"])
        ]
        rows = list(zip(found["tokens"], map(_number, found["token_logprobs"]), likeliest, strict=True))
    else:
        rows = []
    return [token for token, _, _ in rows], [{**likely, token: own} for token, own, likely in rows]


def _likeliest(one: Mapping[str, Any]) -> dict[str, float]:
    return {other["token"]: _number(other["logprob"]) for other in one.get("top_logprobs") or ()}


def _number(logprob: Any) -> float:
    """A log-probability; that of an impossible token, which some servers call minus infinity, is a number too."""
    number = max(float(logprob), _LEAST)
    if math.isnan(number):
        raise ValueError("a log-probability is not a number")
    return number
