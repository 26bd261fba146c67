"""The sampling features that servers are asked for: those of the kit for vLLM, and several choices at once."""

from __future__ import annotations

from dataclasses import replace

from specbranch.plugins.vllm.exactness.features import FEATURES as KIT
from specbranch.plugins.vllm.exactness.features import Feature
from specbranch.plugins.vllm.exactness.prompts import COIN

_LONG = 16  # tokens, where log-probabilities are compared: the longer a text, the more an error adds up
NUM_CHOICES = 2
CHOICES = Feature(f"n = {NUM_CHOICES}", COIN, sampling={"n": NUM_CHOICES})
REPEATED = Feature("seeds", COIN, num_tokens=_LONG)


def _adapted(feature: Feature) -> Feature:
    sampling = {name: value for name, value in feature.sampling.items() if name != "repetition_penalty"}
    return replace(feature, sampling=sampling, num_tokens=_LONG if "logprobs" in sampling else feature.num_tokens)


# What is not in OpenAI's API comes last: it may be refused, or break a server.
SERVER_FEATURES = tuple(sorted((*map(_adapted, KIT), CHOICES), key=lambda feature: "top_k" in feature.sampling))
