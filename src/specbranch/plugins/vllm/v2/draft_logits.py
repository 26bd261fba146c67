"""Rule B in vLLM's V2 runner: what draft tokens were drawn from, as logits by slot of the runner's states.

V2 divides these logits by the request's temperature, and tests the draft tokens of sampled rows by them. A place that
was not drawn by chance has all weight on its token. The rows of a slot are read until its next drafts are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbranch.core.distribution import MOST_IDS, Distribution, Sampling
from specbranch.plugins.vllm.v2.texts import Array

MOST_BYTES = 256 << 20  # of logits that are kept for a runner
WIDTH = 2 * MOST_IDS  # numbers for a place: ids, and the bits of their logits
_OWN = -1  # in place of ids: the token that the place has, whichever it is


class DraftLogits:
    """Rows over the vocabulary for every place of every slot. Memory is taken once, before vLLM measures what is left.

    Nothing waits for the device here.
    """

    def __init__(self, num_slots: int, num_places: int, vocab_len: int, device: Any) -> None:
        import torch

        self.values = torch.full((num_slots, num_places, vocab_len), -torch.inf, device=device)
        self._never = torch.tensor(-torch.inf, device=device)  # a number of the host would be waited for
        self._written = torch.zeros((num_slots, num_places, MOST_IDS), dtype=torch.int64, device=device)
        self._places = torch.arange(num_places, device=device)[None, :, None]

    def write(self, slots: Any, drafts: Any, packed: Any) -> None:
        """The drafts of these slots # [rows, places], and what they were drawn from: of `pack`, without the tokens."""
        import torch

        ids = packed[..., :MOST_IDS]
        ids = torch.where(ids == _OWN, drafts[..., None], ids)
        logits = packed[..., MOST_IDS:].to(torch.int32).view(torch.float32)
        slots = slots.to(torch.int64)
        rows = slots[:, None, None]
        self.values[rows, self._places, self._written[slots]] = self._never
        self.values[rows, self._places, ids] = logits
        self._written[slots] = ids

    def write_certain(self, slots: Any, drafts: Any) -> None:
        """The drafts of these slots # [rows, places], none of them drawn by chance; below 0: none."""
        import torch

        packed = torch.zeros((*drafts.shape, WIDTH), dtype=torch.int64, device=drafts.device)
        packed[..., :MOST_IDS] = _OWN
        self.write(slots, drafts.clamp(min=0), packed)


def has_room(num_slots: int, num_places: int, vocab_len: int) -> bool:
    """Whether the rows of so many places are small enough to be kept."""
    return 4 * num_slots * num_places * vocab_len <= MOST_BYTES


def pack(
    answer: Array, samplings: Mapping[int, Sampling], drawn_from: Mapping[int, Sequence[Distribution | None]]
) -> Array:
    """Drafts # [rows, places] with what they were drawn from # [rows, places, 1 + WIDTH], for all ranks.

    `samplings` and `drawn_from` are those of rows by their index.
    """
    packed = np.zeros((*answer.shape, 1 + WIDTH), dtype=np.int64)
    packed[..., 0] = answer
    packed[..., 1 : 1 + MOST_IDS] = _OWN  # with a logit of 0
    drawn = [
        (row, place, q)
        for row, distributions in drawn_from.items()
        for place, q in enumerate(distributions)
        if q is not None and len(q.ids) <= MOST_IDS  # else certain, which is exact for any token
    ]
    if not drawn:
        return packed
    # The first id fills the rest: writing it again changes nothing.
    ids = np.array([q.ids + q.ids[:1] * (MOST_IDS - len(q.ids)) for _, _, q in drawn])
    probs = np.array([q.probs + q.probs[:1] * (MOST_IDS - len(q.probs)) for _, _, q in drawn])
    totals = np.array([sum(q.probs) for _, _, q in drawn])
    temperatures = np.array([samplings[row].temperature for row, _, _ in drawn])
    logits = (temperatures[:, None] * np.log(probs / totals[:, None])).astype(np.float32)
    rows, places = (np.array([one[index] for one in drawn]) for index in (0, 1))
    packed[rows, places, 1 : 1 + MOST_IDS] = ids
    packed[rows, places, 1 + MOST_IDS :] = logits.view(np.int32)
    return packed
