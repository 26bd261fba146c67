"""The running texts on the host. V2's runner keeps them on its device, and a step copies only what it added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Texts:
    """The tokens of every request, by its slot in the runner's states.

    `whole` reads a text from the device: from this slot, of this length. It is used for a request that is new, and
    wherever a step was missed.
    """

    def __init__(self, num_slots: int, max_len: int, whole: Callable[[int, int], Array]) -> None:
        self._table = np.zeros((num_slots, max_len), dtype=np.int32)  # memory is taken where tokens are written
        self._lens = [0] * num_slots
        self._names = [""] * num_slots
        self._whole = whole

    def extend(self, slot: int, name: str, length: int, before: int, new: Array) -> Array:
        """The text of the request of this name, now of this length, which ends with `new` after the token `before`."""
        text = self._table[slot, :length]
        border = length - len(new)
        is_known = self._names[slot] == name and self._lens[slot] == border > 0 and text[border - 1] == before
        if is_known:
            text[border:] = new
        else:
            text[:] = self._whole(slot, length)
        self._names[slot], self._lens[slot] = name, length
        return text
