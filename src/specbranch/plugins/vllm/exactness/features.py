"""The sampling features under test: each samples one prompt many times, with and without the proposer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from specbranch.plugins.vllm.exactness.prompts import COIN, TOSS_SCHEMA, TOSSES, WEATHER
from specbranch.plugins.vllm.messages import Ask

STOP = "tails"
_SEEDS = 1_000_000  # of one sample; the next has others, so that the samples are independent


@dataclass(frozen=True, slots=True)
class Feature:
    """One prompt and one set of sampling parameters, at temperature 1 unless they say otherwise."""

    name: str
    prompt: str
    _: KW_ONLY
    sampling: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int = 3
    schema: dict[str, Any] | None = None
    is_seeded: bool = False

    def asks(self, num_samples: int, temperature: float = 1.0, sample: int = 0) -> list[Ask]:
        """The requests of the bare (`sample` 0) or the other (1) sample."""
        common = {"temperature": temperature, "max_tokens": self.num_tokens, **self.sampling}
        return [
            Ask(
                self.prompt,
                {**common, "seed": sample * _SEEDS + index} if self.is_seeded else common,
                self.schema,
            )
            for index in range(num_samples)
        ]


FEATURES = (
    Feature("temperature 1", COIN),
    Feature("temperature 0.7, top-p 0.9", WEATHER, sampling={"temperature": 0.7, "top_p": 0.9}),
    Feature("top-k 5", WEATHER, sampling={"top_k": 5}),
    Feature(
        "penalties", WEATHER, sampling={"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.05}
    ),
    Feature("seed per request", COIN, is_seeded=True),
    Feature("JSON schema", TOSSES, num_tokens=48, schema=TOSS_SCHEMA),
    Feature("stop string", COIN, sampling={"stop": [STOP]}),
    Feature("logprobs", COIN, sampling={"logprobs": 2}),
)
# What is not drafted for, so that a run of it needs no accepted draft token.
UNDRAFTED = frozenset(feature.name for feature in FEATURES if feature.is_seeded)
