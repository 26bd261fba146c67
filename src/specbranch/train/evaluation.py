"""Fitting H-RAD on collected examples, judging it on test prompts, and writing it with its scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbranch.predictor.hrad import write_hrad
from specbranch.provenance import commit
from specbranch.train.examples import SPLITS, Examples, ExamplesError
from specbranch.train.figures import draw_scores
from specbranch.train.fit import INPUTS, FitOptions, Inputs, Network, fit
from specbranch.train.score import Score, majority, score

SHOWN: Inputs = "features"  # the network that is written; the others show what each input is worth
Tell = Callable[[str, int, int], None]  # stage, epochs done, epochs at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Networks by their inputs, and their scores on prompts that they were not trained on."""

    splits: Mapping[str, Examples]
    options: FitOptions
    networks: Mapping[str, Network]
    scores: Mapping[str, Score]
    across: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """One document."""
        train, window = self.splits["train"], self.options.window
        return {
            "target": train.card.target,
            "draft": train.card.draft,
            "window": window,
            "positions": {name: len(part) for name, part in self.splits.items()},
            "shares": (train.classes(window)[:, None] == range(3)).mean(0).tolist(),
            "epochs": {name: network.epochs for name, network in self.networks.items()},
            "scores": {name: one.as_json() for name, one in self.scores.items()},
            "by_task": scores_by_task(self.networks[SHOWN], self.splits["test"], window),
            "across": dict(self.across),
        }

    def write(self, directory: Path) -> None:
        """Write the predictor, its card, its scores and their figure."""
        directory.mkdir(parents=True, exist_ok=True)
        card = self.splits["train"].card
        own = {
            "target": card.target,
            "draft": card.draft,
            "num_layers": card.num_layers,
            "hidden_len": card.hidden_len,
            "window": self.options.window,
            "tasks": list(card.tasks),
            "positions": len(self.splits["train"]),
            "commit": commit(Path(__file__).parent),
        }
        write_hrad(directory, self.networks[SHOWN].tensors, own)
        (directory / "scores.json").write_text(json.dumps(self.as_json(), indent=1) + "\n")
        draw_scores(self.scores, SHOWN, directory / "scores.png")


def evaluate(data: Examples, options: FitOptions, is_across: bool, tell: Tell) -> Evaluation:
    """Fit one network for each kind of input; `is_across` also fits one for each task and tests it on all tasks."""
    splits = {name: data.split(name) for name in SPLITS}
    for name, part in splits.items():
        if not len(part):
            raise ExamplesError(
                f"the {name} split has no prompts; collect more prompts with `specbranch train collect`"
            )
    networks: dict[str, Network] = {
        inputs: _fit(splits["train"], splits["held-out"], inputs, options, inputs, tell) for inputs in INPUTS
    }
    truth = splits["test"].classes(options.window)
    scores = {"majority": majority(splits["train"].classes(options.window), truth)}
    for name, network in networks.items():
        scores[name] = score(network.foresee(splits["test"])[0], truth)
    across = _across(splits, options, tell) if is_across else {}
    return Evaluation(splits=splits, options=options, networks=networks, scores=scores, across=across)


def scores_by_task(network: Network, test: Examples, window: int) -> dict[str, dict[str, Any]]:
    """The main scores of a network on each task."""
    found = {}
    for task in test.card.tasks:
        part = test.of_task(task)
        if len(part):
            one = score(network.foresee(part)[0], part.classes(window))
            found[task] = {name: getattr(one, name) for name in ("positions", "accuracy", "macro_f1", "log_loss")}
    return found


def _fit(train: Examples, held_out: Examples, inputs: Inputs, options: FitOptions, name: str, tell: Tell) -> Network:
    return fit(train, held_out, inputs, options, lambda epoch, most, loss: tell(f"fitting on {name}", epoch, most))


def _across(splits: Mapping[str, Examples], options: FitOptions, tell: Tell) -> dict[str, dict[str, float]]:
    """Accuracy on every task of a network that was trained on one."""
    found = {}
    for task in splits["train"].card.tasks:
        parts = [splits[name].of_task(task) for name in ("train", "held-out")]
        if all(len(part) for part in parts):
            network = _fit(parts[0], parts[1], SHOWN, options, task, tell)
            by_task = scores_by_task(network, splits["test"], options.window)
            found[task] = {name: one["accuracy"] for name, one in by_task.items()}
    return found
