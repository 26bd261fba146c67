"""The target's own draw of draft tokens that a service says it drew by chance."""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.core.distribution import TEXT_LEN, Distribution, number, pick
from specbranch.service.draft_probs import DrawnFrom


def redraw(
    text: Sequence[int], length: int, draft: Sequence[int], drawn_from: DrawnFrom, seed: int, vocab_len: int | None
) -> tuple[list[int], list[Distribution | None]]:
    """A draft whose tokens are drawn here, from the distributions that came with it, and those distributions.

    `text` is the end of the sequence, `length` how long it is in all. Tokens that were not drawn by chance stay, as
    long as all before them do: the draft ends behind a token that falls out otherwise here than there.
    """
    text = list(text[-TEXT_LEN:])
    tokens: list[int] = []
    used: list[Distribution | None] = []
    for told, one in zip(draft, drawn_from, strict=True):
        q = _within(one, vocab_len) if one else None
        token = told if q is None else q.ids[pick(q.probs, number(seed, length + len(tokens), text))]
        tokens.append(token)
        used.append(q)
        text.append(token)
        if token != told:
            break
    return tokens, used


def _within(q: Distribution, vocab_len: int | None) -> Distribution | None:
    """A distribution over the tokens that the target has; None if it has none of them."""
    if vocab_len is None or all(token < vocab_len for token in q.ids):
        return q
    kept = [index for index, token in enumerate(q.ids) if token < vocab_len]
    ids, probs = tuple(q.ids[index] for index in kept), tuple(q.probs[index] for index in kept)
    return Distribution(ids, probs, q.entropy) if kept else None
