"""How good a prediction is, on prompts that were not trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specbranch.train.examples import Array

_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Stats of predicted chances of the three classes against what happened."""

    positions: int
    accuracy: float
    macro_f1: float
    log_loss: float
    calibration_error: float  # mean distance between how sure it was and how often it was right, by the first class
    confusion: tuple[tuple[int, ...], ...]  # rows: what happened; columns: what was foreseen
    bins: tuple[tuple[float, float, int], ...]  # how sure on the mean, how often right, how many

    def as_json(self) -> dict[str, Any]:
        """One object for machines."""
        return {name: getattr(self, name) for name in self.__slots__}


def score(chances: Array, classes: Array) -> Score:
    """Judge chances [n, 3] by classes [n]."""
    foreseen = chances.argmax(-1)
    confusion = np.zeros((3, 3), dtype=int)
    np.add.at(confusion, (classes, foreseen), 1)
    bins = _bins(chances.max(-1), foreseen == classes)
    return Score(
        positions=len(classes),
        accuracy=float((foreseen == classes).mean()),
        macro_f1=_macro_f1(confusion),
        log_loss=float(-np.log(np.maximum(chances[np.arange(len(classes)), classes], 1e-9)).mean()),
        calibration_error=float(sum(abs(sure - right) * count for sure, right, count in bins) / len(classes)),
        confusion=tuple(tuple(int(count) for count in row) for row in confusion),
        bins=bins,
    )


def majority(train: Array, classes: Array) -> Score:
    """What the shares of the classes alone foresee, always the same."""
    shares = np.bincount(train, minlength=3) / len(train)
    return score(np.tile(shares, (len(classes), 1)), classes)


def _macro_f1(confusion: Array) -> float:
    """The mean over classes that occur."""
    right, said, is_so = np.diag(confusion), confusion.sum(0), confusion.sum(1)
    found = [2 * r / (s + i) for r, s, i in zip(right, said, is_so, strict=True) if i]
    return float(np.mean(found))


def _bins(sure: Array, is_right: Array) -> tuple[tuple[float, float, int], ...]:
    place = np.minimum((sure * _BINS).astype(int), _BINS - 1)
    found = []
    for index in range(_BINS):
        chosen = place == index
        if chosen.any():
            found.append((float(sure[chosen].mean()), float(is_right[chosen].mean()), int(chosen.sum())))
    return tuple(found)
