"""Drafts for an engine that decodes one sequence at a time; if the draft service fails, it decodes without drafts.

Such an engine does not say when a sequence begins or ends, nor which draft tokens were accepted; all of this is derived
from the sequence that each call passes. Sequences that several threads decode at the same time get few drafts.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from specbranch.engines.vocabulary import VocabFingerprint
from specbranch.service.client.gate import Gate
from specbranch.service.client.interface import DraftSettings, SequenceUpdate
from specbranch.service.client.pool import draft_client

TokenArray = np.ndarray[Any, np.dtype[Any]]


class SingleSequenceDrafts:
    """Gets drafts for a target that decodes one sequence at a time. No call raises or exceeds the deadline.

    `max_draft_tokens` is the maximum that the target verifies at once; `target` describes its vocabulary.
    """

    def __init__(self, settings: DraftSettings, max_draft_tokens: int, target: VocabFingerprint) -> None:
        self._client = draft_client(settings.client_options(max_draft_tokens, target.size, target.hashes))
        self._max_draft_tokens = max_draft_tokens
        self._gate = Gate() if settings.is_gated else None
        self._lock = threading.Lock()
        self._text: TokenArray = np.empty(0, dtype=np.int32)
        self._num_texts = 0
        self._num_drafted = 0  # in the last call
        self._was_asked = False  # whether the client was asked in the last call
        self._called_s = 0.0
        self.num_accepted = 0  # draft tokens of all sequences

    def announce_prompt(self, prompt: TokenArray) -> None:
        """Send a prompt that the target begins to prefill, so that the draft prefills it at the same time."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._gate is None or self._gate.was_open:
                self._client.announce_prompts([prompt])
        finally:
            self._lock.release()

    def after(self, text: TokenArray, room: int | None = None, has_recurring_noise: bool = False) -> list[int]:
        """Return the draft tokens to verify after `text`, the whole sequence so far; empty if none arrive in time.

        `room` is the maximum number of draft tokens, if below `max_draft_tokens`. `has_recurring_noise`: the target may
        draw the same random numbers again, for example from a seed, so `text` must not help to draft another sequence.
        """
        if not self._lock.acquire(blocking=False):
            return []
        try:
            max_len = self._max_draft_tokens if room is None else min(max(room, 0), self._max_draft_tokens)
            return self._after(text.astype(np.int32), max_len, has_recurring_noise)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connection to the draft service."""
        self._client.close()

    def _after(self, text: TokenArray, max_len: int, has_recurring_noise: bool) -> list[int]:
        num_new = self._num_new(text)
        now_s = time.monotonic()
        if num_new:
            self.num_accepted += num_new - 1
            if self._gate is not None:
                self._gate.observe(1, num_new, now_s - self._called_s, self._num_drafted > 0)
        else:
            self._num_texts += 1
        was_asked = self._was_asked
        self._was_asked = max_len > 0 and (self._gate is None or self._gate.is_open(1))
        draft: list[int] = []
        if self._was_asked:
            submitted = self._num_drafted if num_new else 0
            committed = SequenceUpdate(
                text,
                num_new or 1,
                submitted,
                name=str(self._num_texts),
                has_recurring_noise=has_recurring_noise,
            )
            step_s = now_s - self._called_s if was_asked and num_new else None
            draft = self._client.propose([committed], step_s)[0].tokens
        self._text, self._num_drafted, self._called_s = text, min(len(draft), max_len), now_s
        return draft[:max_len]

    def _num_new(self, text: TokenArray) -> int:
        """Return how many tokens the target has added since the last call; 0 if `text` does not continue the last."""
        before = len(self._text)
        num_new = len(text) - before
        is_same = 1 <= num_new <= self._num_drafted + 1 and np.array_equal(text[:before], self._text)
        return num_new if is_same else 0
