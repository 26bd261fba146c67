"""What a client does to a draft before the target sees it: check the vocabulary, draw sampled tokens again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from specbranch.core.distribution import TEXT_LEN, Distribution, inverse_cdf, seeded_uniform
from specbranch.engines.vocabulary import VocabFingerprint, fingerprint_mismatch
from specbranch.service.wire.messages import Welcome
from specbranch.service.wire.payloads import DrawnFrom

log = logging.getLogger(__name__)


class VocabularyCheck:
    """What is known of the draft at the other end. A target that says nothing of its own tokens takes every draft."""

    def __init__(self, target: VocabFingerprint) -> None:
        self._target = target
        self._has_target = target.size is not None or bool(target.hashes)
        self._compared: VocabFingerprint | None = None
        self._flaw: str | None = None
        self._synced: tuple[str, str] | None = None  # the draft, and why it does not fit
        self.is_known = not self._has_target
        self.is_mismatch = False

    def update(self, welcome: Welcome) -> None:
        """Compare the draft that this is from. A draft that does not fit is told of once."""
        if not self._has_target:
            return
        draft = VocabFingerprint(welcome.vocab_len, welcome.vocab_fingerprint)
        if draft != self._compared:
            self._compared, self._flaw = draft, fingerprint_mismatch(self._target, draft)
        self.is_known, self.is_mismatch = True, self._flaw is not None
        if self._flaw is None:
            if self._synced is not None:
                log.info("the draft service now runs %.200r, which has the target's vocabulary", welcome.model)
            self._synced = None
        elif self._synced != (welcome.model, self._flaw):
            self._synced = (welcome.model, self._flaw)
            log.warning(
                "nothing is drafted: the draft %.200r has another vocabulary than the target: %s, and start the draft "
                "service with it; the target can go on running",
                welcome.model,
                self._flaw,
            )

    def reset(self) -> None:
        """The connection is gone; whoever comes next may be another."""
        self.is_known, self.is_mismatch = not self._has_target, False


def resample_draft(
    text: Sequence[int], length: int, draft: Sequence[int], sampled_from: DrawnFrom, seed: int, vocab_len: int | None
) -> tuple[list[int], list[Distribution | None]]:
    """A draft whose tokens are drawn here, from the distributions that came with it, and those distributions.

    `text` is the end of the sequence, `length` how long it is in all. Tokens that were not drawn by chance stay, as
    long as all before them do: the draft ends behind a token that falls out otherwise here than there.
    """
    text = list(text[-TEXT_LEN:])
    tokens: list[int] = []
    used: list[Distribution | None] = []
    for told, one in zip(draft, sampled_from, strict=True):
        q = _within(one, vocab_len) if one else None
        token = told if q is None else q.ids[inverse_cdf(q.probs, seeded_uniform(seed, length + len(tokens), text))]
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
