"""Pictures of a predictor: how well its chances hold, and what it takes for what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specbranch.pyplot import load_pyplot
from specbranch.train.score import Score

_CLASSES = ("none", "some", "all")


def draw_scores(scores: Mapping[str, Score], shown: str, path: Path) -> None:
    """Calibration of all predictors, and the confusion matrix of one of them."""
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2))
    left.plot([0.3, 1], [0.3, 1], color="0.7", linewidth=1)
    for name, one in scores.items():
        sure, true, _ = zip(*one.bins, strict=True)
        left.plot(sure, true, marker="o", markersize=4, label=f"{name}: error {one.calibration_error:.3f}")
    left.set(xlabel="how sure it was", ylabel="how often it was right", xlim=(0.3, 1), ylim=(0, 1.02))
    left.legend(frameon=False)
    confusion = scores[shown].confusion
    totals = [sum(row) or 1 for row in confusion]
    right.imshow([[count / total for count in row] for row, total in zip(confusion, totals, strict=True)], cmap="Blues")
    for row, counts in enumerate(confusion):
        for column, count in enumerate(counts):
            share = count / totals[row]
            colour = "white" if share > 0.6 else "black"
            right.text(column, row, f"{share:.2f}\n{count}", ha="center", va="center", color=colour)
    right.set(xticks=range(3), yticks=range(3), xlabel="foreseen", ylabel="what happened", title=shown)
    right.set_xticklabels(_CLASSES)
    right.set_yticklabels(_CLASSES)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
