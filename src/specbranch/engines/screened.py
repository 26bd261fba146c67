"""An output layer in two steps: a narrow product over the whole vocabulary, then the whole one for the best tokens.

The output layer of a small model with a large vocabulary is a quarter of what a step reads, and all but a few of its
tokens never matter. Hidden states vary along few directions; which ones is learned from the sequences that come
through. Now and then the whole layer is computed too, to see whether the narrow one still finds its first choice.
"""

from __future__ import annotations

from specbranch.engines.protocol import EngineError

try:
    import torch
    from torch import nn
except ImportError as missing:
    raise EngineError(f"8 bits need torch ({missing}); pip install 'specbranch[torch]'") from missing

from specbranch.engines.int8 import PackedLinear

LEARNED = 8192  # hidden states that the directions are learned from
_PART = 4  # the narrow product has so much less width
_MARGIN = 12.0  # below the best logit by the narrow product: what is further off is no candidate
_COUNT = 512  # and of blocks only so many of the best have candidates
_MOST = 1024  # candidates: a flat distribution has tens of thousands within the margin, only the first are needed
_BLOCK = 64  # tokens
_AUDIT_EVERY = 32  # products
_KEEP = 0.98  # of what audits have found, at the next one
_MOST_LOST = 0.02  # share of first choices that may be lost
_MOST_ROWS = 4  # for more of them the whole layer, read once for all, is cheaper than each one's candidates
_LEAST_VOCAB = 32768  # below it there is little to save


class ScreenedHead(nn.Module):
    """An output layer without bias; once it has learned, only the best tokens have whole logits, the others guesses."""

    def __init__(self, linear: nn.Linear, kind: type[PackedLinear]) -> None:
        super().__init__()
        self._weight = linear.weight.detach().float()  # often the input embedding's, so this costs no memory
        self._kind = kind
        self._whole = kind(linear)
        self._screen: _Screen | None = None
        self._seen: list[torch.Tensor] = []
        self._num_seen = 0
        self._num_products = 0
        self.lost = 0.0  # share of first choices that audits did not find, lately

    @property
    def is_narrow(self) -> bool:
        """Whether it has learned enough."""
        return self._screen is not None

    def learn(self, hidden: torch.Tensor) -> None:
        """Take in hidden states [tokens, hidden] of sequences; with enough of them the narrow product is made."""
        if self._screen is not None:
            return
        self._seen.append(hidden.clone())
        self._num_seen += len(hidden)
        if self._num_seen >= LEARNED:
            self._screen = _Screen(self._weight, torch.cat(self._seen)[-LEARNED:], self._kind)
            self._forget()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocabulary] of hidden states [..., hidden]."""
        flat = rows.reshape(-1, rows.shape[-1])
        if self._screen is None or len(flat) > _MOST_ROWS:
            whole: torch.Tensor = self._whole(rows)
            return whole
        logits = self._screen.logits(flat, self._weight)
        self._num_products += 1
        if self._num_products % _AUDIT_EVERY == 0:
            self._audit(logits, self._whole(flat))
        return logits.view(*rows.shape[:-1], -1)

    def _audit(self, logits: torch.Tensor, whole: torch.Tensor) -> None:
        lost = (logits.argmax(-1) != whole.argmax(-1)).float().mean().item()
        self.lost = _KEEP * self.lost + (1 - _KEEP) * lost
        if self.lost > _MOST_LOST:  # the sequences have become others
            self._screen = None
            self._forget()

    def _forget(self) -> None:
        self._seen, self._num_seen, self._num_products, self.lost = [], 0, 0, 0.0


class _Screen:
    """The narrow product: hidden states less their mean, along the directions that move the logits most."""

    def __init__(self, weight: torch.Tensor, seen: torch.Tensor, kind: type[PackedLinear]) -> None:
        width = weight.shape[1]
        self._mean = seen.mean(dim=0)
        self._bias = weight @ self._mean
        centred = seen - self._mean
        spread = centred.T @ centred / len(seen)
        spread += 1e-3 * spread.diagonal().mean() * torch.eye(width)
        values, axes = torch.linalg.eigh(spread)
        root, inverse = (axes * values**power @ axes.T for power in (0.5, -0.5))
        energies, directions = torch.linalg.eigh(root @ (weight.T @ weight) @ root)  # the strongest last
        chosen = slice(width - width // _PART, None)
        # Shared between both factors, so that 8 bits serve both.
        balance = energies[chosen].clamp(min=1e-12) ** 0.25
        self._into = (inverse @ directions[:, chosen] * balance).contiguous()
        narrow = nn.Linear(len(balance), len(weight), bias=False, device="meta")
        narrow.weight = nn.Parameter(weight @ (root @ directions[:, chosen] / balance), requires_grad=False)
        self._out = kind(narrow)

    def logits(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states [rows, hidden], whole for the best tokens."""
        logits: torch.Tensor = self._out((rows - self._mean) @ self._into).add_(self._bias)
        num_blocks = logits.shape[1] // _BLOCK
        peaks = logits[:, : num_blocks * _BLOCK].view(len(rows), num_blocks, _BLOCK).amax(dim=-1)
        best = peaks.topk(min(_COUNT, num_blocks), dim=-1).values  # [rows, count], falling
        bars = torch.maximum(best[:, -1], best[:, 0] - _MARGIN)
        for row, hidden, bar in zip(logits, rows, bars, strict=True):
            near = (row >= bar).nonzero()[:, 0]
            if len(near) > _MOST:
                near = near[row[near].topk(_MOST, sorted=False).indices]
            row[near] = weight[near] @ hidden
        return logits


def can_screen(linear: nn.Linear) -> bool:
    """Whether an output layer is large enough, and plain enough, to be worth it."""
    return linear.bias is None and linear.out_features >= _LEAST_VOCAB
