"""What an engine is asked to decode, and what came of it. Crosses a process border as JSON; knows nothing of vLLM."""

from __future__ import annotations

from typing import Any

import msgspec


class Ask(msgspec.Struct, frozen=True):
    """One text to continue. `sampling` are vLLM's sampling parameters; `schema` asks for JSON of that shape."""

    prompt: str
    sampling: dict[str, Any]
    schema: dict[str, Any] | None = None


class Run(msgspec.Struct, frozen=True):
    """Requests that run together, at most `batch` of them at a time (0: as many as the engine takes).

    `section` are the proposer's settings from this run on; None leaves them.
    """

    name: str
    asks: list[Ask]
    batch: int = 0
    section: dict[str, Any] | None = None


class Job(msgspec.Struct, frozen=True):
    """An engine, bare if it has no `section`, and what it shall run."""

    model: str
    arguments: dict[str, Any]
    runs: list[Run]
    section: dict[str, Any] | None = None
    num_speculative_tokens: int = 4
    cores: list[int] | None = None


class Answer(msgspec.Struct, frozen=True):
    """What one request became. `logprobs` has, for each token, the log-probabilities that vLLM reported."""

    tokens: list[int]
    text: str
    finish_reason: str | None = None
    logprobs: list[dict[int, float]] = msgspec.field(default_factory=list)


class Done(msgspec.Struct, frozen=True):
    """A run that is over, with the draft tokens that vLLM verified and accepted in the last attempt at it."""

    name: str
    answers: list[Answer]
    submitted: int = 0
    accepted: int = 0
    attempts: int = 1


class News(msgspec.Struct, frozen=True):
    """One line from a working engine: it is up (`engine` says what it is), requests ended, or a run is over."""

    engine: dict[str, str] | None = None
    num_ended: int = 0
    done: Done | None = None
