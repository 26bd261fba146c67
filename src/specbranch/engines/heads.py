"""Heads: a small trained network beside a draft, which guesses the token behind the one that the draft just chose.

It looks at the hidden state that chose the token, which is the input of the draft's output layer, and at the token's
input embedding. One residual block makes of both what the next hidden state may be; the draft's own output layer,
narrowed to frequent tokens, makes the guess of that. A directory holds `heads.safetensors` and `card.json`; this file
is the only one that knows their form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from specbranch.engines.protocol import EngineError

FORMAT = "specbranch-heads"
VERSION = 1
WEIGHTS, CARD = "heads.safetensors", "card.json"

Array = np.ndarray[Any, np.dtype[Any]]
_Positive = Annotated[int, Meta(ge=1)]


class HeadsError(EngineError, ValueError):
    """Heads that cannot be read, or do not belong to the draft."""


class HeadsCard(msgspec.Struct, frozen=True, kw_only=True):
    """Which draft the heads belong to, what they were trained on, and how often they were right on unseen prompts."""

    format: str = FORMAT
    version: int = VERSION
    draft: str
    hidden_len: _Positive  # of the draft
    vocab_len: _Positive  # of the draft
    tasks: list[str] = []
    positions: int = 0  # that they were trained on
    scores: dict[str, dict[str, float]] = {}  # by task
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """The network: `tokens` are those that can be guessed [n], the others are the block's weights."""

    card: HeadsCard
    tokens: Array  # [n] int32
    w_in: Array  # [width, 2 * hidden] float16
    b_in: Array  # [width] float16
    w_out: Array  # [hidden, width] float16

    def require_fit(self, hidden_len: int, vocab_len: int) -> None:
        """Refuse heads of a draft of other sizes."""
        theirs, ours = (self.card.hidden_len, self.card.vocab_len), (hidden_len, vocab_len)
        if theirs != ours:
            raise HeadsError(
                f"the heads were trained for {self.card.draft}, with hidden states of {theirs[0]} and {theirs[1]} "
                f"tokens; this draft has {ours[0]} and {ours[1]}: train heads for it with `specbranch train heads`"
            )


def read_heads(directory: Path) -> Heads:
    """The heads in a directory; `HeadsError` names what is wrong with them and what to do."""
    from safetensors.numpy import load_file

    try:
        card = msgspec.json.decode((directory / CARD).read_bytes(), type=HeadsCard)
        tensors = load_file(directory / WEIGHTS)
    except OSError as error:
        raise HeadsError(
            f"{directory} holds no heads ({error}); give a directory of `specbranch train heads`"
        ) from error
    except Exception as error:  # safetensors has an error class of its own for each fault of a file
        raise HeadsError(f"{directory} cannot be read ({error}); train the heads again") from error
    if (card.format, card.version) != (FORMAT, VERSION):
        raise HeadsError(
            f"{directory / CARD} is {card.format} version {card.version}; this reads {FORMAT} version {VERSION}: "
            "train the heads again with this release"
        )
    return _checked(card, tensors, directory / WEIGHTS)


def write_heads(directory: Path, heads: Heads) -> None:
    """Write heads with their card."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(getattr(heads, name)) for name in ("tokens", "w_in", "b_in", "w_out")}
    _checked(heads.card, tensors, directory / WEIGHTS)
    save_file(tensors, directory / WEIGHTS)
    (directory / CARD).write_text(json.dumps(msgspec.to_builtins(heads.card), indent=2) + "\n")


def _checked(card: HeadsCard, tensors: Mapping[str, Array], path: Path) -> Heads:
    """Heads of these tensors, if they are those of the card; the width of the block is theirs to say."""
    width = len(tensors["b_in"]) if "b_in" in tensors and tensors["b_in"].ndim else 0
    num_tokens = len(tensors["tokens"]) if "tokens" in tensors and tensors["tokens"].ndim else 0
    expected = {
        "tokens": ("int32", (num_tokens,)),
        "w_in": ("float16", (width, 2 * card.hidden_len)),
        "b_in": ("float16", (width,)),
        "w_out": ("float16", (card.hidden_len, width)),
    }
    found = {name: (tensor.dtype.name, tensor.shape) for name, tensor in tensors.items()}
    if found != expected or not width or not num_tokens:
        raise HeadsError(f"{path}: its tensors are not those of the card; train the heads again")
    if tensors["tokens"].min() < 0 or tensors["tokens"].max() >= card.vocab_len:
        raise HeadsError(f"{path}: guesses tokens that the draft does not have; train the heads again")
    return Heads(card, **tensors)
