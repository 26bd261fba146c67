"""A trained predictor (H-RAD) that runs after every step in vLLM's worker, on that step's hidden states."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbranch.core.round import Outlook
from specbranch.hrad.network import Hrad
from specbranch.plugins.vllm.compat.features import FeatureHook

log = logging.getLogger(__name__)
_Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(slots=True)
class ForesightCounts:
    """Predictions that were made, steps that failed, and the time that predictions took."""

    outlooks: int = 0
    outlook_faults: int = 0  # steps
    outlook_s: float = 0.0


class Foresight:
    """A trained predictor on a target's features. It never raises: a step that fails has no outlooks."""

    def __init__(self, hrad: Hrad, feature_hook: FeatureHook, clock: Callable[[], float] = time.perf_counter) -> None:
        self.feature_hook = feature_hook
        self._hrad = hrad
        self._clock = clock
        self.counts = ForesightCounts()

    def outlooks(self, sampled: Sequence[Sequence[int]], rows: Sequence[int]) -> dict[int, Outlook]:
        """The predictions for these rows of the last step, which sampled these tokens."""
        if not rows:
            return {}
        start_s = self._clock()
        try:
            features = self.feature_hook.read(sampled, rows)
            found = dict(zip(rows, self._hrad.predict(features, _product), strict=True))
        except Exception:
            if not self.counts.outlook_faults:
                log.exception(
                    "the target's features could not be read; the draft's confidence is used instead. Logged once"
                )
            self.counts.outlook_faults += 1
            return {}
        self.counts.outlooks += len(found)
        self.counts.outlook_s += self._clock() - start_s
        return found


def _product(one: _Array, other: _Array) -> _Array:
    """A matrix product on the target's own threads, which are idle now.

    NumPy would start threads on the cores of the draft, and both would slow each other down.
    """
    import torch

    product: _Array = torch.matmul(torch.from_numpy(one), torch.from_numpy(other)).numpy()
    return product
