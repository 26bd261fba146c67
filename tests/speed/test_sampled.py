"""What drawn tokens cost the target's side: to draw them again."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from specbranch.core.distribution import Distribution, RequestSampling, inverse_cdf, seeded_uniform
from specbranch.service.client.filters import resample_draft
from specbranch.service.wire.payloads import pack_probs, unpack_probs
from tests.counting import num_calls

VOCAB, WINDOW, TOP = 151_936, 8, 32


def draft_of(seed: int) -> tuple[list[int], bytes]:
    """A draft of eight tokens behind a text, each drawn from 32."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    sampled_from = []
    for place in range(WINDOW):
        weights = np.sort(rng.random(TOP) ** 8)[::-1]
        ids = tuple(rng.choice(VOCAB, TOP, replace=False).tolist())
        q = RequestSampling(1.0).apply(Distribution(ids, tuple((weights / weights.sum()).tolist()), 1.0))
        tokens.append(q.ids[inverse_cdf(q.probs, seeded_uniform(seed, 40 + place, [*range(40), *tokens]))])
        sampled_from.append(q)
    return tokens, pack_probs(sampled_from)


class Target:
    """The target's side, with drafts that it was told for some rows."""

    def __init__(self, num_rows: int) -> None:
        self.told = [draft_of(seed) for seed in range(1, num_rows + 1)]
        self.drawn: list[tuple[list[int], list[Distribution | None]]] = []

    def draw(self) -> None:
        self.drawn = [
            resample_draft(list(range(40)), 40, tokens, unpack_probs(packed, len(tokens)), seed, VOCAB)
            for seed, (tokens, packed) in enumerate(self.told, start=1)
        ]


def test_drawing_again_makes_calls_for_tokens_and_not_for_the_vocabulary() -> None:
    """Counted, so that it holds on any machine: eight rows make at most eight times the calls of one."""
    counts = []
    for num_rows in (1, 8):
        target = Target(num_rows)
        counts.append(num_calls(target.draw))
        assert [tokens for tokens, _ in target.drawn] == [tokens for tokens, _ in target.told]

    assert counts[1] <= 8 * counts[0] and counts[0] < 100 * WINDOW


@pytest.mark.nightly
@pytest.mark.parametrize("num_rows", [1, 8])
def test_drawing_again_takes_few_milliseconds(num_rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    target = Target(num_rows)
    draw_s = []
    for _ in range(50):
        start = time.perf_counter()
        target.draw()
        draw_s.append(time.perf_counter() - start)
    with capsys.disabled():
        print(f"\n{num_rows} rows of {WINDOW} tokens: drawn again {statistics.median(draw_s) * 1e3:.2f} ms")
    assert min(draw_s) < 0.002 * num_rows + 0.001
