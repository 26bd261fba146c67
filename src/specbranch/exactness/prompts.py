"""The prompts and the sampling features that `specbranch check` sends to engines and servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from specbranch.launch.vllm_worker import PromptRequest

GREEDY = (
    "def is_palindrome(text):\n",
    "The three largest planets of the solar system are",
    "Q: How do I boil an egg?\nA:",
    "Shopping list:\n- bread\n- milk\n-",
    "class Stack:\n    def __init__(self):\n",
    "Water freezes at zero degrees, and it boils at",
    "User: I slept badly and have an exam today. What should I do?\nAssistant:",
    "Colours of the rainbow, in order: red,",
    "SELECT name, price FROM products WHERE",
    "The capital of France is Paris. The capital of Italy is",
    "Dear neighbour,\nthank you for",
    "Steps to plant a tree:\n1. Dig a hole.\n2.",
    "for (int i = 0; i < n; i++) {\n",
    "The heart pumps blood through the body, while the lungs",
    "User: Tell me a joke about cats.\nAssistant:",
    "Months with thirty days: April,",
    "import json\n\nwith open('data.json') as file:\n",
    "Once upon a time, at the edge of a dark forest,",
    "Q: Why is the sky blue?\nA: Because",
    "2, 4, 8, 16, 32,",
    "<html>\n<head>\n<title>",
    "A triangle has three sides, a square has four, and a hexagon has",
    "User: Which is heavier, a kilogram of iron or a kilogram of feathers?\nAssistant:",
    "Ingredients for pancakes:\n* flour\n*",
    "fn main() {\n    let mut total = 0;\n",
    "In winter the days are short, because the Earth",
    "To whom it may concern: I am writing to",
    "Monday, Tuesday, Wednesday,",
    "# Counts the words of a file\ndef count_words(path):\n",
    "The opposite of hot is cold, the opposite of early is",
    "User: Please translate 'good morning' into Spanish.\nAssistant:",
    "Reasons to learn a second language:\n1.",
)

# Short, because the draft prefills from the start whenever two samples differ.
COIN = "Coin tosses: heads, tails, tails, heads, tails, heads, heads, tails,"

WEATHER = "Weather: sun, rain, cloud, sun, rain, rain, cloud, sun,"

TOSSES = "".join(
    f'{{"coin": "{coin}", "won": {won}}}\n'
    for coin, won in (("heads", "true"), ("tails", "true"), ("heads", "false"), ("tails", "false"))
)

TOSS_KEYS = ("coin", "won")
TOSS_SCHEMA = {
    "type": "object",
    "properties": {"coin": {"enum": ["heads", "tails"]}, "won": {"type": "boolean"}},
    "required": list(TOSS_KEYS),
    "additionalProperties": False,
}
STOP = "tails"
_SEEDS = 1_000_000  # distance between the seeds of two samples, so that they share no seed and are independent
_LONG_LEN = 16  # tokens; over a longer text, errors of the log-probabilities add up and are easier to find
NUM_CHOICES = 2


def greedy_prompts(count: int) -> list[str]:
    """Return `count` different prompts: those in `GREEDY`, then the same with one more space at the end, and so on."""
    return [GREEDY[index % len(GREEDY)] + " " * (index // len(GREEDY)) for index in range(count)]


@dataclass(frozen=True, slots=True)
class Feature:
    """A sampling feature to check: one prompt with one set of sampling parameters, at temperature 1 by default.

    With `is_seeded`, each request has a seed of its own.
    """

    name: str
    prompt: str
    _: KW_ONLY
    sampling: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int = 3
    schema: dict[str, Any] | None = None
    is_seeded: bool = False

    def asks(self, num_samples: int, temperature: float = 1.0, sample: int = 0) -> list[PromptRequest]:
        """Return `num_samples` requests of this feature, whose outputs are the sample with the number `sample`.

        Requests of samples with different numbers share no seeds.
        """
        common = {"temperature": temperature, "max_tokens": self.num_tokens, **self.sampling}
        return [
            PromptRequest(
                self.prompt, {**common, "seed": sample * _SEEDS + index} if self.is_seeded else common, self.schema
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
# Features that get no drafts, so that a run of them needs no accepted draft token.
UNDRAFTED = frozenset(feature.name for feature in FEATURES if feature.is_seeded)

CHOICES = Feature(f"n = {NUM_CHOICES}", COIN, sampling={"n": NUM_CHOICES})
REPEATED = Feature("seeds", COIN, num_tokens=_LONG_LEN)


def _adapted(feature: Feature) -> Feature:
    sampling = {name: value for name, value in feature.sampling.items() if name != "repetition_penalty"}
    return replace(feature, sampling=sampling, num_tokens=_LONG_LEN if "logprobs" in sampling else feature.num_tokens)


# Parameters outside OpenAI's API come last: a server may refuse them, or break.
SERVER_FEATURES = tuple(sorted((*map(_adapted, FEATURES), CHOICES), key=lambda feature: "top_k" in feature.sampling))
