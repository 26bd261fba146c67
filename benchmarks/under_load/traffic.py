"""Mixed requests drawn from a seed: which kind, which prompt, how many tokens, how many at once. Knows no server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WHOLE, STREAM, SAMPLED, SEVERAL, SCHEMA, ABORTED = "whole", "stream", "sampled", "several", "schema", "aborted"
SHARES = {WHOLE: 0.25, STREAM: 0.35, SAMPLED: 0.12, SEVERAL: 0.08, SCHEMA: 0.08, ABORTED: 0.12}
GREEDY = (WHOLE, STREAM, SCHEMA)
LENGTHS = {"short": 0.92, "middle": 0.07, "long": 0.01}  # of prompts
BOUNDS = {"short": (40, 160), "middle": (160, 800), "long": (3000, 6000)}  # characters; about four make a token
POOL = {"short": 200, "middle": 40, "long": 12}  # different prompts; vLLM's prefix cache is in play
MAX_TOKENS, MEAN_TOKENS = 24, 6
SCHEMA_TOKENS = 24  # enough for the longest object
ENDLESS = 200  # tokens asked for by who leaves before
LEVELS = {1: 1, 4: 1, 16: 3, 32: 3, 64: 6}  # requests at once: weight
LEVEL_SPAN = 100  # requests between changes of the level

ANIMAL = {
    "type": "object",
    "properties": {
        "animal": {"type": "string", "enum": ["cat", "dog", "fox"]},
        "legs": {"type": "integer", "enum": [2, 4]},
    },
    "required": ["animal", "legs"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `level` is how many may be under way with it, `leaves_after` the pieces read before an abort.

    `is_to_the_last`: the answer has all of its tokens. So small a model would end half of the answers with the first.
    """

    number: int
    kind: str
    prompt: str
    max_tokens: int
    level: int
    temperature: float = 0.0
    n: int = 1
    leaves_after: int | None = None
    is_to_the_last: bool = True

    @property
    def is_greedy(self) -> bool:
        """Whether bare vLLM must give the same text."""
        return self.kind in GREEDY


def draw(seed: int, count: int, prompts: Mapping[str, Sequence[str]]) -> list[Request]:
    """So many requests; the first ones do not depend on how many."""
    chance = random.Random(seed)
    found = []
    level = 1
    for number in range(count):
        if number % LEVEL_SPAN == 0:
            level = _choose(chance, LEVELS)
        kind, length = _choose(chance, SHARES), _choose(chance, LENGTHS)
        prompt = chance.choice(prompts[length])
        is_to_the_last = kind != SCHEMA and (kind == ABORTED or number % 4 != 0)
        details = _details(chance, kind)
        found.append(Request(number, kind, prompt, level=level, is_to_the_last=is_to_the_last, **details))
    return found


def _details(chance: random.Random, kind: str) -> dict[str, Any]:
    """What only this kind of request has."""
    max_tokens = min(1 + int(chance.expovariate(1 / MEAN_TOKENS)), MAX_TOKENS)
    # None has a seed of its own: vLLM 0.32 on a CPU ends where such a prompt is prefilled in pieces.
    number, temperature = chance.randrange(12), round(chance.uniform(0.3, 1.2), 2)
    if kind == SCHEMA:
        return {"max_tokens": SCHEMA_TOKENS}
    if kind == ABORTED:
        return {"max_tokens": ENDLESS, "leaves_after": 1 + number % 4}
    if kind == SEVERAL:
        return {"max_tokens": max_tokens, "temperature": temperature, "n": 2 + number % 3}
    if kind == SAMPLED:
        return {"max_tokens": max_tokens, "temperature": temperature}
    return {"max_tokens": max_tokens}


def window(requests: Sequence[Request], num_greedy: int) -> list[Request]:
    """The requests in a row, from a quarter of all on, of which so many are greedy; all if there are not so many."""
    start = len(requests) // 4
    if sum(request.is_greedy for request in requests[start:]) < num_greedy:
        return list(requests)
    found: list[Request] = []
    while num_greedy:
        found.append(requests[start + len(found)])
        num_greedy -= found[-1].is_greedy
    return found


def read_prompts(data: Path) -> dict[str, list[str]]:
    """Prompts by length, from gsm8k.jsonl, humaneval.jsonl and spec_bench.jsonl in a directory; always the same ones."""
    texts = sorted(set(_texts(data)))
    random.Random(0).shuffle(texts)
    found = {name: [text for text in texts if low <= len(text) < high] for name, (low, high) in BOUNDS.items()}
    return {name: some[: POOL[name]] for name, some in found.items()}


def _texts(data: Path) -> Iterator[str]:
    for name, field in (("gsm8k", "question"), ("humaneval", "prompt"), ("spec_bench", "turns")):
        for line in (data / f"{name}.jsonl").read_text().splitlines():
            value = json.loads(line)[field]
            yield value if isinstance(value, str) else value[0]


def _choose(chance: random.Random, weights: Mapping[Any, float]) -> Any:
    return chance.choices(list(weights), list(weights.values()))[0]
