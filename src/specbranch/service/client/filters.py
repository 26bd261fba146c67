"""Make drafts safe for the target: compare vocabularies, cut drafts, and repeat the sampling of their tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from specbranch.core.distribution import TEXT_LEN, Distribution, inverse_cdf, seeded_uniform
from specbranch.core.round import Draft
from specbranch.engines.vocabulary import VocabFingerprint, fingerprint_mismatch
from specbranch.service.client.interface import ClientCounts, SequenceUpdate
from specbranch.service.wire.messages import Welcome, WireSampling
from specbranch.service.wire.payloads import DrawnFrom, unpack_probs

log = logging.getLogger(__name__)


class VocabularyCheck:
    """Compares the vocabulary of the service's draft model with the target's; if this is unknown, accepts any.

    `is_known`: the two were compared, or need not be. `is_mismatch`: they differ, so no draft may be used.
    """

    def __init__(self, target: VocabFingerprint) -> None:
        self._target = target
        self._has_target = target.size is not None or bool(target.hashes)
        self._compared: VocabFingerprint | None = None
        self._flaw: str | None = None
        self._logged: tuple[str, str] | None = None  # the draft, and why it does not fit
        self._is_size_logged = False
        self.is_known = not self._has_target
        self.is_mismatch = False

    def update(self, welcome: Welcome) -> None:
        """Compare the target's vocabulary with that of the draft model in this message, and log once if they differ."""
        if not self._has_target:
            return
        draft = VocabFingerprint(welcome.vocab_len, welcome.vocab_fingerprint)
        if draft != self._compared:
            self._compared, self._flaw = draft, fingerprint_mismatch(self._target, draft)
        self.is_known, self.is_mismatch = True, self._flaw is not None
        if self._flaw is None:
            if self._logged is not None:
                log.info("the draft service now runs %.200r, which has the target's vocabulary", welcome.model)
            self._logged = None
            self._log_larger_size(welcome)
        elif self._logged != (welcome.model, self._flaw):
            self._logged = (welcome.model, self._flaw)
            log.warning(
                "the draft %.200r is not used, because it has another vocabulary than the target: %s, and start the "
                "draft service with it; the target can go on running",
                welcome.model,
                self._flaw,
            )

    def reset(self) -> None:
        """Discard the comparison's result. Call it after the connection was lost: another service may answer next."""
        self.is_known, self.is_mismatch = not self._has_target, False

    def _log_larger_size(self, welcome: Welcome) -> None:
        """Log once if the draft model has more tokens than the target, and may propose some that the target lacks."""
        vocab_len = self._target.size
        if vocab_len is not None and welcome.vocab_len > vocab_len and not self._is_size_logged:
            self._is_size_logged = True
            log.warning(
                "the draft %r has a vocabulary of %d tokens, the target one of %d; drafts are cut before tokens that "
                "the target does not have",
                welcome.model,
                welcome.vocab_len,
                vocab_len,
            )


class DraftFilter:
    """Turns the proposals of a service into drafts that the target can verify."""

    def __init__(self, vocab_len: int | None, counts: ClientCounts) -> None:
        self._vocab_len = vocab_len
        self._counts = counts

    def apply(
        self, row: SequenceUpdate, proposed: Sequence[int], packed: bytes, sampling: WireSampling | None
    ) -> Draft:
        """Cut the tokens that a service proposed, sample again those that it sampled, and return them as a draft.

        Only the second sample surely comes from the distribution that was sent, as rejection sampling requires. The
        draft ends at the row's `max_draft_tokens`, before a token that the target lacks, and after a token that the
        second sample has changed. `packed` holds the distributions that the service has sampled from, b"" if there are
        none. `sampling` has the row's sampling parameters, None if the draft must not sample; `packed` is then ignored.
        """
        tokens: Sequence[int] = proposed[: row.max_draft_tokens]
        sampled_from: DrawnFrom = ()
        if packed and sampling is not None:
            try:
                sampled_from = unpack_probs(packed, len(proposed))[: len(tokens)]
            except ValueError:
                self._counts.refused += 1  # and its tokens are proposals like any others
            else:
                end = row.tokens[-TEXT_LEN:]
                text = end.tolist() if isinstance(end, np.ndarray) else end
                tokens, sampled_from = resample_draft(
                    text, len(row.tokens), tokens, sampled_from, sampling.seed, self._vocab_len
                )
                self._counts.sampled += sum(q is not None for q in sampled_from)
        if self._vocab_len is not None and any(token >= self._vocab_len for token in tokens):
            tokens = self._known_tokens(tokens, self._vocab_len)
        return Draft(list(tokens), sampled_from[: len(tokens)])

    def _known_tokens(self, tokens: Sequence[int], vocab_len: int) -> Sequence[int]:
        """Return a draft's tokens before the first one that the target lacks, and count the draft.

        Log the first draft that has such a token.
        """
        position = next(position for position, token in enumerate(tokens) if token >= vocab_len)
        if not self._counts.unknown_token:
            log.warning(
                "the draft service proposed token %d, which the target does not have; such drafts are cut. "
                "Was it started with a draft model for this target?",
                tokens[position],
            )
        self._counts.unknown_token += 1
        return tokens[:position]


def resample_draft(
    text: Sequence[int], length: int, draft: Sequence[int], sampled_from: DrawnFrom, seed: int, vocab_len: int | None
) -> tuple[list[int], list[Distribution | None]]:
    """Sample a draft's tokens again from the distributions in `sampled_from`; return the tokens and distributions used.

    `text` is the end of the sequence, `length` the length of the whole sequence; the random numbers depend on these two
    and on `seed`. Tokens that were not sampled stay, with None as distribution. The draft ends after the first token
    that differs from the service's, because the tokens after it were drafted to follow the service's token.
    """
    text = list(text[-TEXT_LEN:])
    tokens: list[int] = []
    used: list[Distribution | None] = []
    for proposed, one in zip(draft, sampled_from, strict=True):
        q = _restrict(one, vocab_len) if one else None
        token = proposed if q is None else q.ids[inverse_cdf(q.probs, seeded_uniform(seed, length + len(tokens), text))]
        tokens.append(token)
        used.append(q)
        text.append(token)
        if token != proposed:
            break
    return tokens, used


def _restrict(q: Distribution, vocab_len: int | None) -> Distribution | None:
    """Return a distribution without the tokens that the target lacks; None if no token is left."""
    if vocab_len is None or all(token < vocab_len for token in q.ids):
        return q
    kept = [index for index, token in enumerate(q.ids) if token < vocab_len]
    ids, probs = tuple(q.ids[index] for index in kept), tuple(q.probs[index] for index in kept)
    return Distribution(ids, probs, q.entropy) if kept else None
