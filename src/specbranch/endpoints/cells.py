"""Cells for texts, so that two samples of many different texts can be compared by their counts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_MOST_CELLS = 50
_RARE = 5


def in_cells(ones: Sequence[str], others: Sequence[str]) -> tuple[list[str], list[str]]:
    """Each text as the longest beginning that it shares with enough others of both samples.

    The cells depend on the pooled texts only, which a permutation leaves alone: a permutation test stays exact.
    """
    pooled = [*ones, *others]
    enough = max(_RARE, len(pooled) // _MOST_CELLS)
    counts = Counter(text[:end] for text in pooled for end in range(len(text) + 1))

    def cell(text: str) -> str:
        return next((text[:end] for end in range(len(text), 0, -1) if counts[text[:end]] >= enough), "")

    return [cell(text) for text in ones], [cell(text) for text in others]
