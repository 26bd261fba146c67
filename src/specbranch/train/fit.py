"""Fit H-RAD: the paper's network of three classes, and beside it a head that says how much of the window is accepted.

Prompts are split, never positions. Training stops when the held-out prompts are no longer foreseen better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from specbranch.predictor.hrad import class_logits, survival
from specbranch.train.examples import Array, Examples

Inputs = Literal["features", "confidence", "both"]
INPUTS: tuple[Inputs, ...] = ("features", "confidence", "both")
Tell = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class FitOptions:
    """The network and how it is trained. `balance` 1 weighs classes alike, 0 as often as they come.

    Of the features only the `rank` directions in which they differ most are learned from: thousands of inputs overfit.
    """

    window: int
    rank: int = 256
    hidden: tuple[int, int] = (256, 64)
    dropout: float = 0.2
    rate: float = 1e-3
    decay: float = 1e-2
    batch: int = 256
    epochs: int = 20
    patience: int = 3
    balance: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Network:
    """A trained network as arrays, under the names of `predictor/hrad.py`, and what it looks at."""

    inputs: Inputs
    tensors: dict[str, Array]
    epochs: int

    def foresee(self, examples: Examples, rows: int = 4096) -> tuple[Array, Array]:
        """Chances of the three classes [n, 3], and that at least 1, 2, ... tokens are accepted [n, window]."""
        parts = [
            self._forward(look(examples.take(slice(start, start + rows)), self.inputs))
            for start in range(0, len(examples), rows)
        ]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def _forward(self, x: Array) -> tuple[Array, Array]:
        logits = class_logits(self.tensors, x)
        classes = np.exp(logits - logits.max(-1, keepdims=True))
        return classes / classes.sum(-1, keepdims=True), survival(self.tensors, x)


def look(examples: Examples, inputs: Inputs) -> Array:
    """The network's input as float32 [n, d_in]: the draft's next distribution, the target's features, or both."""
    confidence, second, entropy = examples.distributions.T
    odds = np.log(np.clip(confidence, 1e-4, 1 - 1e-4) / np.clip(1 - confidence, 1e-4, 1))
    distributions = np.stack([odds, np.log(second + 1e-4), entropy], axis=-1).astype(np.float32)
    if inputs == "confidence":
        return distributions
    features = examples.features.astype(np.float32)
    return features if inputs == "features" else np.concatenate([features, distributions], axis=-1)


def fit(train: Examples, held_out: Examples, inputs: Inputs, options: FitOptions, tell: Tell) -> Network:
    """Train on one split and stop by the other; `tell` hears the epoch, how many there may be, the held-out loss."""
    import torch
    from torch import nn

    torch.manual_seed(options.seed)
    window = options.window
    lens = _lens(train, inputs, options.rank)
    wide, narrow = options.hidden
    body = nn.Sequential(
        nn.Linear(lens.directions.shape[1], wide), nn.ReLU(), nn.Dropout(options.dropout),
        nn.Linear(wide, narrow), nn.ReLU(), nn.Dropout(options.dropout),
    )  # fmt: skip
    to_class, to_survival = nn.Linear(narrow, 3), nn.Linear(narrow, window)
    modules = nn.ModuleList([body, to_class, to_survival])
    optimiser = torch.optim.AdamW(modules.parameters(), lr=options.rate, weight_decay=options.decay)
    weights = torch.tensor(_class_weights(train.classes(window), options.balance))

    def loss_of(examples: Examples, seen: Array, chosen: Array) -> Any:
        part = examples.take(chosen)
        x = body(torch.from_numpy(seen[chosen]))
        classes = nn.functional.cross_entropy(to_class(x), torch.from_numpy(part.classes(window)), weight=weights)
        stands, is_asked = _hazards(part, window)
        each = nn.functional.binary_cross_entropy_with_logits(to_survival(x), stands, reduction="none")
        return classes + (each * is_asked).sum() / is_asked.sum()

    seen, seen_held_out = lens.see(train), lens.see(held_out)
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
        tell(epoch, options.epochs, loss)
        if loss < best_loss:
            best, best_loss, stale = _arrays(body, to_class, to_survival), loss, 0
        else:
            stale += 1
        if stale >= options.patience:
            break
    best["w0"] = lens.directions @ best["w0"]  # what the lens does is part of the first layer from now on
    return Network(inputs, {"mean": lens.mean, "scale": lens.scale, **best}, epoch)


@dataclass(frozen=True, slots=True)
class _Lens:
    """What is learned from: inputs less their mean, by their spread, along few directions."""

    inputs: Inputs
    mean: Array  # [d_in]
    scale: Array  # [d_in]
    directions: Array  # [d_in, d_seen]

    def see(self, examples: Examples, rows: int = 4096) -> Array:
        """Examples through the lens, [n, d_seen]."""
        parts = [examples.take(slice(start, start + rows)) for start in range(0, len(examples), rows)]
        return np.concatenate([(look(part, self.inputs) - self.mean) * self.scale @ self.directions for part in parts])


def _lens(examples: Examples, inputs: Inputs, rank: int, most: int = 20_000) -> _Lens:
    """Made from as many examples as are needed for it. What the draft's distribution says is seen as it is."""
    import torch

    chosen = np.random.default_rng(0).permutation(len(examples))[:most]
    x = look(examples.take(chosen), inputs)
    mean, scale = x.mean(0), (1 / np.maximum(x.std(0), 1e-3)).astype(np.float32)
    num_features = 0 if inputs == "confidence" else examples.features.shape[1]
    if not num_features:
        return _Lens(inputs, mean, scale, np.eye(len(mean), dtype=np.float32))
    features = torch.from_numpy(((x - mean) * scale)[:, :num_features])
    _, spread, axes = torch.pca_lowrank(features, q=min(rank, *features.shape), center=False)
    axes = axes / (spread / len(features) ** 0.5).clamp(min=1e-3)
    return _Lens(inputs, mean, scale, torch.block_diag(axes, torch.eye(len(mean) - num_features)).numpy())


def _class_weights(classes: Array, balance: float) -> Array:
    shares = np.bincount(classes, minlength=3) / len(classes)
    return ((1 / (3 * np.maximum(shares, 1e-3))) ** balance).astype(np.float32)


def _hazards(examples: Examples, window: int) -> tuple[Any, Any]:
    """For each position of the window: was the token accepted, and was it reached at all."""
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
