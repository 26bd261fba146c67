"""What a target's process is asked to decode, and what came of it. Crosses the process border as lines of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from specbranch.plugins.vllm.settings import ProposerSettings


class Ask(msgspec.Struct, frozen=True):
    """One prompt. `sampling` are vLLM's sampling parameters; `schema` asks for JSON of that shape.

    A chat prompt is a user's message, put into the model's own template; any other is continued as it is. With
    `tokens` these are continued instead.
    """

    prompt: str
    sampling: dict[str, Any]
    schema: dict[str, Any] | None = None
    is_chat: bool = False
    tokens: list[int] | None = None


class Run(msgspec.Struct, frozen=True):
    """Requests that are decoded together, at most `batch` of them at a time (0: as many as the engine takes).

    `settings` are the proposer's from this run on; None leaves them. With several `attempts` the run is repeated as
    long as no draft token was accepted.
    """

    asks: list[Ask]
    batch: int = 0
    settings: ProposerSettings | None = None
    attempts: int = 1


class Answer(msgspec.Struct, kw_only=True):
    """The output of one request; it grows while it is decoded.

    `steps` are the engine steps that added to it: seconds since the start of the run, and how many tokens; `texts`
    is what each of them added to the text. `logprobs` are those that vLLM reported, for each token; empty if none were
    asked for.
    """

    prompt: list[int] = []
    tokens: list[int] = []
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[dict[int, float]] = []
    steps: list[tuple[float, int]] = []
    texts: list[str] = []


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is over. All numbers are of its last attempt.

    `submitted` and `accepted` are draft tokens that vLLM verified and accepted; `counts` are the proposer's counters.
    """

    answers: list[Answer]
    submitted: int = 0
    accepted: int = 0
    attempts: int = 1
    elapsed_s: float = 0.0
    counts: dict[str, float] = {}


class Engine(msgspec.Struct, frozen=True):
    """What a loaded engine says of itself.

    `is_eager`: neither compiled nor run from CUDA graphs. `is_invariant`: a position is computed the same in any batch.
    """

    versions: dict[str, str]
    dtype: str
    device: str
    is_eager: bool = False
    is_invariant: bool = False

    @property
    def computes_in(self) -> str:
        """The number format, and what is special about it."""
        return f"batch-invariant {self.dtype}" if self.is_invariant else self.dtype


class News(msgspec.Struct, frozen=True):
    """One line from a target's process: its engine is loaded, requests have finished, or a run is over."""

    engine: Engine | None = None
    num_finished: int = 0
    done: Done | None = None


def step_gaps_s(answers: Sequence[Answer], skip: int = 0) -> list[float]:
    """Times between the steps of the answers, all but the first `skip` steps of each."""
    return [end_s - start_s for answer in answers for (start_s, _), (end_s, _) in pairwise(answer.steps[skip:])]
