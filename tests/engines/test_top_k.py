"""The top-k of a distribution from logits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbranch.core.distribution import top_k_of


@given(
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 1.0, 5.0, 30.0]),
    vocab_len=st.sampled_from([200, 1000, 3001]),
)
def test_the_top_k_equals_a_plain_softmax(seed: int, scale: float, vocab_len: int) -> None:
    logits = (np.random.default_rng(seed).standard_normal(vocab_len) * scale).astype(np.float32)
    exact = np.exp(logits.astype(np.float64) - logits.max())
    exact /= exact.sum()

    distribution = top_k_of(logits, 8)

    assert list(distribution.probs) == pytest.approx(sorted(exact, reverse=True)[:8], rel=1e-4, abs=1e-9)
    assert [exact[i] for i in distribution.ids] == pytest.approx(list(distribution.probs), rel=1e-4, abs=1e-9)
    positive = exact[exact > 0]
    assert distribution.entropy == pytest.approx(-(positive * np.log(positive)).sum(), abs=1e-3)


def test_the_best_tokens_may_all_be_in_one_block() -> None:
    logits = np.zeros(6400, dtype=np.float32)
    logits[130:142] = np.arange(12)

    assert top_k_of(logits, 8).ids == tuple(range(141, 133, -1))


def test_the_best_token_may_be_behind_the_last_whole_block() -> None:
    logits = np.zeros(6401, dtype=np.float32)
    logits[-1] = 5.0

    assert top_k_of(logits, 4).ids == (6400, 0, 1, 2)
