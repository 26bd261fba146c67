"""A low-rank output layer that computes exact logits for a few candidates only.

The output layer of a small model with a large vocabulary is a quarter of the memory that a step reads, and nearly all
of its tokens are irrelevant. A low-rank product approximates all logits; only its best tokens, the candidates, get
exact ones. The projection is fitted to hidden states seen in use. Audits compare the result with the full layer.
"""

from __future__ import annotations

from specbranch.engines.torch.linear import QuantizedLinear
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch
    from torch import nn

LEARNED = 2048  # number of hidden states that the projection is fitted to; 8192 lose as many top-1 tokens
_DIVISOR = 4  # the projection uses 1/4 of the hidden size
_BLOCK = 64  # tokens; thresholds come from the largest logit of each block, which is cheaper than sorting
_MAX_BLOCKS = 512  # a candidate's approximate logit is at least the largest of the 512th best block,
_MARGIN = 12.0  # and at most this far below the best one
_MAX_CANDIDATES = 1024  # per row; in a flat distribution tens of thousands lie within the margin
_AUDIT_EVERY = 32  # calls of the low-rank product; an audit also computes the full layer
_DECAY = 0.98  # weight of the old value in the moving average over audits
_MAX_LOST = 0.02  # share of top-1 tokens that may be lost before the projection is fitted again
_MAX_ROWS = 4  # for more rows the full layer, read once for all, is cheaper than each row's candidates
_MIN_VOCAB = 32768  # a smaller vocabulary leaves little to save
_RIDGE = 1e-3  # added to the covariance, relative to its mean diagonal, to make it invertible


class LowRankOutputLayer(nn.Module):
    """An output layer without bias that computes exact logits for a few candidates, and approximate ones for the rest.

    It replaces `linear`. For more than 4 rows, and until `observe` has collected `LEARNED` hidden states, it computes
    all logits with a full layer of the class `kind`.
    """

    def __init__(self, linear: nn.Linear, kind: type[QuantizedLinear]) -> None:
        super().__init__()
        self.exact = linear.weight.detach()  # of any dtype; usually shared with the input embedding
        self._gram = self.exact.T @ self.exact
        self._kind = kind
        self._full = kind(linear)
        self._low_rank: _LowRank | None = None
        self._seen: list[torch.Tensor] = []
        self._num_seen = 0
        self._num_calls = 0
        self._lost = 0.0  # moving average of the share of top-1 tokens that audits found lost

    @property
    def is_narrow(self) -> bool:
        """Whether the projection is fitted and in use."""
        return self._low_rank is not None

    def observe(self, hidden: torch.Tensor) -> None:
        """Collect hidden states [tokens, hidden], and fit the projection once there are `LEARNED` of them.

        After that, calls do nothing.
        """
        if self._low_rank is not None:
            return
        self._seen.append(hidden.clone())
        self._num_seen += len(hidden)
        if self._num_seen >= LEARNED:
            self._low_rank = _LowRank(self.exact.float(), self._gram, torch.cat(self._seen)[-LEARNED:], self._kind)
            self._forget()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., vocabulary] of hidden states [..., hidden].

        Every 32nd low-rank result is audited against the full layer; too many wrong ones discard the projection.
        """
        flat = rows.reshape(-1, rows.shape[-1])
        if self._low_rank is None or len(flat) > _MAX_ROWS:
            full: torch.Tensor = self._full(rows)
            return full
        logits = self._low_rank.logits(flat, self.exact)
        self._num_calls += 1
        if self._num_calls % _AUDIT_EVERY == 0:
            self._audit(logits, self._full(flat))
        return logits.view(*rows.shape[:-1], -1)

    def _audit(self, logits: torch.Tensor, full: torch.Tensor) -> None:
        lost = (logits.argmax(-1) != full.argmax(-1)).float().mean().item()
        self._lost = _DECAY * self._lost + (1 - _DECAY) * lost
        if self._lost > _MAX_LOST:  # the sequences are unlike those that it was fitted to
            self._low_rank = None
            self._forget()

    def _forget(self) -> None:
        self._seen, self._num_seen, self._num_calls, self._lost = [], 0, 0, 0.0


class _LowRank:
    """A low-rank approximation of an output layer, fitted to the hidden states `seen` [tokens, hidden].

    It projects centred hidden states to the directions that change logits most. `gram` [hidden, hidden] is the product
    of the transposed weight and the weight.
    """

    def __init__(
        self, weight: torch.Tensor, gram: torch.Tensor, seen: torch.Tensor, kind: type[QuantizedLinear]
    ) -> None:
        hidden_len = weight.shape[1]
        self._mean = seen.mean(dim=0)
        self._bias = weight @ self._mean
        centred = seen - self._mean
        covariance = centred.T @ centred / len(seen)
        covariance += _RIDGE * covariance.diagonal().mean() * torch.eye(hidden_len)
        values, axes = torch.linalg.eigh(covariance)
        root, inverse = (axes * values**power @ axes.T for power in (0.5, -0.5))
        energies, directions = torch.linalg.eigh(root @ gram @ root)  # ascending
        chosen = slice(hidden_len - hidden_len // _DIVISOR, None)
        # Split the singular values between both factors, so that 8 bits are enough for the second.
        balance = energies[chosen].clamp(min=1e-12) ** 0.25
        self._down = (inverse @ directions[:, chosen] * balance).contiguous()
        up = nn.Linear(len(balance), len(weight), bias=False, device="meta")
        up.weight = nn.Parameter(weight @ (root @ directions[:, chosen] / balance), requires_grad=False)
        self._up = kind(up)

    def logits(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the approximate logits of hidden states [rows, hidden], with exact ones for the candidates.

        `weight` is the exact weight of the full layer, of any dtype.
        """
        logits: torch.Tensor = self._up((rows - self._mean) @ self._down).add_(self._bias)
        for row, hidden, threshold in zip(logits, rows, _thresholds(logits), strict=True):
            candidates = (row >= threshold).nonzero()[:, 0]
            if len(candidates) > _MAX_CANDIDATES:
                candidates = candidates[row[candidates].topk(_MAX_CANDIDATES, sorted=False).indices]
            row[candidates] = weight[candidates].to(hidden.dtype) @ hidden
        return logits


def _thresholds(logits: torch.Tensor) -> torch.Tensor:
    """Return for each row of approximate logits [rows, vocabulary] the lowest logit that makes a token a candidate."""
    num_blocks = logits.shape[1] // _BLOCK
    peaks = logits[:, : num_blocks * _BLOCK].view(len(logits), num_blocks, _BLOCK).amax(dim=-1)
    best = peaks.topk(min(_MAX_BLOCKS, num_blocks), dim=-1).values  # [rows, blocks], descending
    return torch.maximum(best[:, -1], best[:, 0] - _MARGIN)


def is_worth_narrowing(linear: nn.Linear) -> bool:
    """Return whether `LowRankOutputLayer` can replace an output layer and saves time.

    It does for a layer without bias and with a vocabulary of at least 32768 tokens.
    """
    return linear.bias is None and linear.out_features >= _MIN_VOCAB
