"""Train H-RAD, score it on unseen prompts, and write the predictor with its scores.

All examples of a prompt are in the same split. Training stops when predictions on the held-out prompts do not improve
any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specbranch.extensions import load_pyplot
from specbranch.hrad.examples import SPLITS, Array, Examples, ExamplesError
from specbranch.hrad.network import class_logits, survival, write_hrad
from specbranch.machine import commit

Inputs = Literal["features", "confidence", "both"]
INPUTS: tuple[Inputs, ...] = ("features", "confidence", "both")
FitProgress = Callable[[int, int, float], None]  # epochs done, epochs at most, loss on the held-out examples
_BINS = 10
SHOWN: Inputs = "features"  # the input of the network that is written; other networks show what each input contributes
EvaluationProgress = Callable[[str, int, int], None]  # stage, epochs done, epochs at most
_CLASSES = ("none", "some", "all")


@dataclass(frozen=True, slots=True)
class FitOptions:
    """The options of the network and of its training.

    `window` is the number of draft tokens that a prediction is about, `hidden` the lengths of the two hidden layers.
    Training uses only the first `rank` principal components of the features, as thousands of inputs overfit; None: it
    uses all numbers. It stops after `patience` epochs without improvement; None: only after the last. `rate` is the
    learning rate, `decay` the weight decay. With `balance` 1 all classes have equal weight, with 0 each has the weight
    of its frequency.
    """

    window: int
    rank: int | None = 256
    hidden: tuple[int, int] = (256, 64)
    dropout: float = 0.2
    rate: float = 1e-3
    decay: float = 1e-2
    batch: int = 256
    epochs: int = 20
    patience: int | None = 3
    balance: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Network:
    """A trained network: the kind of its input, its arrays, named as in `hrad/network.py`, and the epochs it took."""

    inputs: Inputs
    tensors: dict[str, Array]
    epochs: int

    def foresee(self, examples: Examples, rows: int = 4096) -> tuple[Array, Array]:
        """Return predicted probabilities: of the classes [n, 3], and of at least 1, 2, ... accepted tokens [n, window].

        At most `rows` examples are computed at a time, to limit memory.
        """
        parts = [
            self._forward(select_inputs(examples.take(slice(start, start + rows)), self.inputs))
            for start in range(0, len(examples), rows)
        ]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def _forward(self, x: Array) -> tuple[Array, Array]:
        logits = class_logits(self.tensors, x)
        classes = np.exp(logits - logits.max(-1, keepdims=True))
        return classes / classes.sum(-1, keepdims=True), survival(self.tensors, x)


def select_inputs(examples: Examples, inputs: Inputs) -> Array:
    """Return the input of a network for these examples as float32, [n, d_in].

    `d_in` is the length of one input. `inputs` names its kind: `features` of the target, `confidence` for three numbers
    that describe the draft's distribution of the next token, or `both`.
    """
    confidence, second, entropy = examples.distributions.T
    odds = np.log(np.clip(confidence, 1e-4, 1 - 1e-4) / np.clip(1 - confidence, 1e-4, 1))
    distributions = np.stack([odds, np.log(second + 1e-4), entropy], axis=-1).astype(np.float32)
    if inputs == "confidence":
        return distributions
    import torch

    features = torch.from_numpy(examples.features).float().numpy()  # several times as fast as NumPy's conversion
    return features if inputs == "features" else np.concatenate([features, distributions], axis=-1)


def fit(train: Examples, held_out: Examples, inputs: Inputs, options: FitOptions, on_progress: FitProgress) -> Network:
    """Train a network; return it with the weights of the epoch that had the lowest loss on `held_out`.

    Without `patience` these are the weights of the last epoch.
    """
    import torch
    from torch import nn

    torch.manual_seed(options.seed)
    window = options.window
    whitening = _fit_whitening(train, inputs, options.rank)
    body, to_class, to_survival = _layers(whitening.num_outputs, options)
    modules = nn.ModuleList([body, to_class, to_survival])
    optimiser = torch.optim.AdamW(modules.parameters(), lr=options.rate, weight_decay=options.decay, fused=True)
    weights = torch.tensor(_class_weights(train.classes(window), options.balance))

    def loss_of(examples: Examples, seen: Array | None, chosen: Array) -> Any:
        part = examples.take(chosen)
        x = body(torch.from_numpy(whitening.transform(part) if seen is None else seen[chosen]))
        classes = nn.functional.cross_entropy(to_class(x), torch.from_numpy(part.classes(window)), weight=weights)
        stands, is_asked = _hazards(part, window)
        each = nn.functional.binary_cross_entropy_with_logits(to_survival(x), stands, reduction="none")
        return classes + (each * is_asked).sum() / is_asked.sum()

    # All numbers of all examples may not fit into memory; few directions do.
    parts = (train, held_out)
    seen, seen_held_out = (None if whitening.directions is None else whitening.transform(part) for part in parts)
    order = np.random.default_rng(options.seed)
    best, best_loss, stale, epoch = _arrays(body, to_class, to_survival), float("inf"), 0, 0
    for epoch in range(1, options.epochs + 1):
        modules.train()
        for chosen in _batches(order.permutation(len(train)), options.batch):
            optimiser.zero_grad()
            loss_of(train, seen, chosen).backward()
            optimiser.step()
        modules.eval()
        with torch.inference_mode():
            pieces = _batches(np.arange(len(held_out)), 4096)
            loss = sum(float(loss_of(held_out, seen_held_out, piece)) * len(piece) for piece in pieces) / len(held_out)
        on_progress(epoch, options.epochs, loss)
        stale = 0 if loss < best_loss else stale + 1
        if stale == 0 or options.patience is None:
            best, best_loss = _arrays(body, to_class, to_survival), loss
        elif stale >= options.patience:
            break
    if whitening.directions is not None:
        best["w0"] = whitening.directions @ best["w0"]  # fold the whitening into the first layer
    return Network(inputs, {"mean": whitening.mean, "scale": whitening.scale, **best}, epoch)


def _layers(num_inputs: int, options: FitOptions) -> tuple[Any, Any, Any]:
    """Return the hidden layers, the head for the classes, and the head for the number of accepted tokens."""
    from torch import nn

    wide, narrow = options.hidden
    body = nn.Sequential(
        nn.Linear(num_inputs, wide), nn.ReLU(), nn.Dropout(options.dropout),
        nn.Linear(wide, narrow), nn.ReLU(), nn.Dropout(options.dropout),
    )  # fmt: skip
    return body, nn.Linear(narrow, 3), nn.Linear(narrow, options.window)


@dataclass(frozen=True, slots=True)
class _Whitening:
    """A transformation of a network's inputs: subtract the mean, multiply by `scale`, project to fewer directions.

    An input has `d_in` numbers before and `d_seen` after it. Without `directions` nothing is projected.
    """

    inputs: Inputs
    mean: Array  # [d_in]
    scale: Array  # [d_in]
    directions: Array | None  # [d_in, d_seen]

    @property
    def num_outputs(self) -> int:
        return len(self.mean) if self.directions is None else int(self.directions.shape[1])

    def transform(self, examples: Examples, rows: int = 4096) -> Array:
        """Return the whitened inputs of n examples, [n, d_seen]; `d_seen` is the number of directions.

        At most `rows` examples are transformed at a time, to limit memory.
        """
        parts = [examples.take(slice(start, start + rows)) for start in range(0, len(examples), rows)]
        return np.concatenate([self._transformed(select_inputs(part, self.inputs)) for part in parts])

    def _transformed(self, x: Array) -> Array:
        even = np.subtract(x, self.mean, dtype=np.float32)
        even *= self.scale
        return even if self.directions is None else even @ self.directions


def _fit_whitening(examples: Examples, inputs: Inputs, rank: int | None, most: int = 20_000) -> _Whitening:
    """Fit a whitening to at most `most` sampled examples, with at most `rank` principal components; return it.

    Only the target's features are projected to principal components, not inputs from the draft's distribution.
    """
    import torch

    chosen = np.random.default_rng(0).permutation(len(examples))[:most]
    x = select_inputs(examples.take(chosen), inputs)
    mean, scale = x.mean(0), (1 / np.maximum(x.std(0), 1e-3)).astype(np.float32)
    num_features = 0 if inputs == "confidence" else examples.features.shape[1]
    if not num_features:
        return _Whitening(inputs, mean, scale, np.eye(len(mean), dtype=np.float32))
    if rank is None:
        return _Whitening(inputs, mean, scale, None)
    features = torch.from_numpy(((x - mean) * scale)[:, :num_features])
    _, spread, axes = torch.pca_lowrank(features, q=min(rank, *features.shape), center=False)
    axes = axes / (spread / len(features) ** 0.5).clamp(min=1e-3)
    return _Whitening(inputs, mean, scale, torch.block_diag(axes, torch.eye(len(mean) - num_features)).numpy())


def _class_weights(classes: Array, balance: float) -> Array:
    shares = np.bincount(classes, minlength=3) / len(classes)
    return ((1 / (3 * np.maximum(shares, 1e-3))) ** balance).astype(np.float32)


def _hazards(examples: Examples, window: int) -> tuple[Any, Any]:
    """Return two tensors [n, window]: whether each token of the window was accepted, and whether it was tested at all.

    A token is tested if all tokens before it were accepted and the answer has a token at its position.
    """
    import torch

    runs = torch.from_numpy(examples.runs)[:, None]
    left = torch.from_numpy(examples.left)[:, None]
    depth = torch.arange(window)[None]
    return (runs > depth).float(), ((runs >= depth) & (left > depth)).float()


def _batches(order: Array, size: int) -> list[Array]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def _arrays(body: Any, to_class: Any, to_survival: Any) -> dict[str, Array]:
    found = {}
    for name, layer in (("0", body[0]), ("1", body[3]), ("_class", to_class), ("_survival", to_survival)):
        found[f"w{name}"] = layer.weight.detach().T.contiguous().numpy().copy()
        found[f"b{name}"] = layer.bias.detach().numpy().copy()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well predicted class probabilities match the true classes, over a number of `positions`."""

    positions: int
    accuracy: float
    macro_f1: float
    log_loss: float
    calibration_error: float  # mean distance between confidence and accuracy, over bins of confidence
    confusion: tuple[tuple[int, ...], ...]  # rows: true class; columns: predicted class
    bins: tuple[tuple[float, float, int], ...]  # mean confidence, accuracy, count

    def as_json(self) -> dict[str, Any]:
        """Return the scores as a JSON dict."""
        return {name: getattr(self, name) for name in self.__slots__}


def score(chances: Array, classes: Array) -> Score:
    """Return how well predicted probabilities match the true classes of n examples.

    The metrics are accuracy, macro F1, log loss, calibration error, the confusion matrix, and confidence and accuracy
    in bins of confidence. `chances` [n, 3] has the probability predicted for each class, and the predicted class is the
    likeliest. `classes` [n] has the true ones: 0, 1 or 2 if no, some or all tokens of the window were accepted.
    """
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
    """Return the score of a baseline that predicts for every example the class frequencies of the training set.

    `train` and `classes` are the true classes of the training examples and of the examples to score.
    """
    shares = np.bincount(train, minlength=3) / len(train)
    return score(np.tile(shares, (len(classes), 1)), classes)


def _macro_f1(confusion: Array) -> float:
    """Return the mean F1 score over the classes that occur; rows of `confusion` are true classes."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The networks by kind of input, and their scores on prompts that they were not trained on.

    `splits` has the examples by the name of their split. `across[a][b]` is the accuracy on task b of a network that was
    trained on task a.
    """

    splits: Mapping[str, Examples]
    options: FitOptions
    networks: Mapping[str, Network]
    scores: Mapping[str, Score]
    across: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return all scores as a JSON dict."""
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
        """Write the predictor, its card, its scores and a figure of the scores to a directory."""
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


def evaluate(data: Examples, options: FitOptions, is_across: bool, on_progress: EvaluationProgress) -> Evaluation:
    """Train one network per kind of input, and return all networks with their scores.

    If `is_across`, also train one network per task and test it on all tasks. `on_progress` is called after each epoch
    with the stage, the epochs done and the maximum of epochs. Raise `ExamplesError` if a split is empty.
    """
    splits = {name: data.split(name) for name in SPLITS}
    for name, part in splits.items():
        if not len(part):
            raise ExamplesError(
                f"the {name} split has no prompts; collect more prompts with `specbranch train collect`"
            )
    networks: dict[str, Network] = {
        inputs: _fit(splits["train"], splits["held-out"], inputs, options, inputs, on_progress) for inputs in INPUTS
    }
    truth = splits["test"].classes(options.window)
    scores = {"majority": majority(splits["train"].classes(options.window), truth)}
    for name, network in networks.items():
        scores[name] = score(network.foresee(splits["test"])[0], truth)
    across = _across(splits, options, on_progress) if is_across else {}
    return Evaluation(splits=splits, options=options, networks=networks, scores=scores, across=across)


def scores_by_task(network: Network, test: Examples, window: int) -> dict[str, dict[str, Any]]:
    """Return the main scores of a network on the examples of each task, by task and name of the score."""
    found = {}
    for task in test.card.tasks:
        part = test.of_task(task)
        if len(part):
            one = score(network.foresee(part)[0], part.classes(window))
            found[task] = {name: getattr(one, name) for name in ("positions", "accuracy", "macro_f1", "log_loss")}
    return found


def _fit(
    train: Examples, held_out: Examples, inputs: Inputs, options: FitOptions, name: str, on_progress: EvaluationProgress
) -> Network:
    return fit(
        train, held_out, inputs, options, lambda epoch, most, loss: on_progress(f"fitting on {name}", epoch, most)
    )


def _across(
    splits: Mapping[str, Examples], options: FitOptions, on_progress: EvaluationProgress
) -> dict[str, dict[str, float]]:
    """Train one network per task; return the accuracy of each by the task of training and the task of testing."""
    found = {}
    for task in splits["train"].card.tasks:
        parts = [splits[name].of_task(task) for name in ("train", "held-out")]
        if all(len(part) for part in parts):
            network = _fit(parts[0], parts[1], SHOWN, options, task, on_progress)
            by_task = scores_by_task(network, splits["test"], options.window)
            found[task] = {name: one["accuracy"] for name, one in by_task.items()}
    return found


def draw_scores(scores: Mapping[str, Score], shown: str, path: Path) -> None:
    """Draw to a file the calibration of all predictors by name, and the confusion matrix of the predictor `shown`."""
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2))
    left.plot([0.3, 1], [0.3, 1], color="0.7", linewidth=1)
    for name, one in scores.items():
        sure, true, _ = zip(*one.bins, strict=True)
        left.plot(sure, true, marker="o", markersize=4, label=f"{name}: error {one.calibration_error:.3f}")
    left.set(xlabel="confidence", ylabel="accuracy", xlim=(0.3, 1), ylim=(0, 1.02))
    left.legend(frameon=False)
    confusion = scores[shown].confusion
    totals = [sum(row) or 1 for row in confusion]
    right.imshow([[count / total for count in row] for row, total in zip(confusion, totals, strict=True)], cmap="Blues")
    for row, counts in enumerate(confusion):
        for column, count in enumerate(counts):
            share = count / totals[row]
            colour = "white" if share > 0.6 else "black"
            right.text(column, row, f"{share:.2f}\n{count}", ha="center", va="center", color=colour)
    right.set(xticks=range(3), yticks=range(3), xlabel="predicted class", ylabel="true class", title=shown)
    right.set_xticklabels(_CLASSES)
    right.set_yticklabels(_CLASSES)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
