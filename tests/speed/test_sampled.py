"""What drawn tokens cost the target's side: to draw them again, and to hand their probabilities to vLLM's runner."""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

import numpy as np
import pytest

from specbranch.core.distribution import Distribution
from specbranch.core.sampling import Sampling, number, pick
from specbranch.plugins.vllm.compat.probs import DraftProbs
from specbranch.service.draft_probs import pack_probs, unpack_probs
from specbranch.service.redraw import redraw

torch = pytest.importorskip("torch")

VOCAB, WINDOW, TOP = 151_936, 8, 32


def draft_of(seed: int) -> tuple[list[int], bytes]:
    """A draft of eight tokens behind a text, each drawn from 32."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    drawn_from = []
    for place in range(WINDOW):
        weights = np.sort(rng.random(TOP) ** 8)[::-1]
        ids = tuple(rng.choice(VOCAB, TOP, replace=False).tolist())
        q = Sampling(1.0).shape(Distribution(ids, tuple((weights / weights.sum()).tolist()), 1.0))
        tokens.append(q.ids[pick(q.probs, number(seed, 40 + place, [*range(40), *tokens]))])
        drawn_from.append(q)
    return tokens, pack_probs(drawn_from)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_drawing_again_and_handing_over_takes_few_milliseconds(
    num_rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [draft_of(seed) for seed in range(1, num_rows + 1)]
    names = [str(row) for row in range(num_rows)]
    runner = SimpleNamespace(device=torch.device("cpu"), input_batch=SimpleNamespace(req_ids=names))
    probs = DraftProbs(VOCAB, WINDOW)
    draw_s, hand_s = [], []
    for _ in range(50):
        start = time.perf_counter()
        drawn = [
            redraw(list(range(40)), 40, tokens, unpack_probs(packed, len(tokens)), seed, VOCAB)
            for seed, (tokens, packed) in enumerate(told, start=1)
        ]
        middle = time.perf_counter()
        probs.hand_over(runner, [tokens for tokens, _ in drawn], {row: q for row, (_, q) in enumerate(drawn)})
        end = time.perf_counter()
        draw_s.append(middle - start)
        hand_s.append(end - middle)
    assert [tokens for tokens, _ in drawn] == [tokens for tokens, _ in told]
    draw, hand = statistics.median(draw_s) * 1e3, statistics.median(hand_s) * 1e3
    with capsys.disabled():
        print(f"\n{num_rows} rows of {WINDOW} tokens: drawn again {draw:.2f} ms, handed over {hand:.2f} ms")
    assert min(draw_s) + min(hand_s) < 0.002 * num_rows + 0.003
