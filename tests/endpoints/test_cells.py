"""Texts that are all different still fall into cells by their beginnings."""

from __future__ import annotations

import random

from specbranch.exactness.server_findings import group_by_prefix


def test_frequent_texts_are_cells_of_their_own_and_rare_ones_share_a_beginning() -> None:
    ones, others = group_by_prefix(["heads"] * 6 + ["heap", "hero"], ["tails"] * 5 + ["head", "x"])

    assert ones == ["heads"] * 6 + ["hea", "he"]
    assert others == ["tails"] * 5 + ["head", ""]


def test_the_cells_depend_on_the_pooled_texts_only() -> None:
    """Whoever gave a text, its cell is the same: what keeps a permutation test exact."""
    chance = random.Random(0)
    texts = ["".join(chance.choices("abc", k=4)) for _ in range(100)]
    order = chance.sample(range(100), 100)
    one, two = group_by_prefix(texts[:50], texts[50:])
    mixed = [texts[index] for index in order]
    three, four = group_by_prefix(mixed[:50], mixed[50:])
    cells, mixed_cells = one + two, three + four

    assert [cells[index] for index in order] == mixed_cells
    assert 3 < len(set(cells)) < 50


def test_many_samples_do_not_have_more_cells_than_can_be_compared() -> None:
    chance = random.Random(0)
    texts = ["".join(chance.choices("abcdef", k=6)) for _ in range(2000)]
    ones, others = group_by_prefix(texts[:1000], texts[1000:])

    assert 6 <= len(set(ones + others)) <= 60
