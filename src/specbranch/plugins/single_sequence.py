"""Drafts for an engine that decodes one sequence at a time: from the draft service, or else by n-gram lookup.

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
from specbranch.service.client.interface import NO_ANSWER, DraftSettings, SequenceUpdate
from specbranch.service.client.pool import draft_client

TokenArray = np.ndarray[Any, np.dtype[Any]]


class SingleSequenceDrafts:
    """Gets drafts for a target that decodes one sequence at a time. No call raises or exceeds the deadline.

    `max_draft_tokens` is the maximum that the target verifies at once; `target` describes its vocabulary. If the
    settings name no service, all drafts come from n-gram lookup in the text.
    """

    def __init__(self, settings: DraftSettings, max_draft_tokens: int, target: VocabFingerprint) -> None:
        self._text_drafter = settings.text_drafter(max_draft_tokens)
        self._client = None
        if settings.address is not None:
            self._client = draft_client(settings.client_options(max_draft_tokens, target.size, target.hashes))
        self._max_draft_tokens = max_draft_tokens
        self._gate = Gate() if settings.is_gated else None
        self._lock = threading.Lock()
        self._text: TokenArray = np.empty(0, dtype=np.int32)
        self._num_texts = 0
        self._num_drafted = 0  # in the last call
        self._num_from_service = 0  # of these tokens
        self._was_asked = False  # whether the client was asked in the last call
        self._called_s = 0.0
        self._waited_s = 0.0  # for the service, in the last call
        self.num_accepted = 0  # draft tokens of all sequences

    def announce_prompt(self, prompt: TokenArray) -> None:
        """Send a prompt that the target begins to prefill, so that the draft prefills it at the same time."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._client is not None and (self._gate is None or self._gate.was_open):
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
        """Close the connection to the draft service, if there is one."""
        if self._client is not None:
            self._client.close()

    def _after(self, text: TokenArray, max_len: int, has_recurring_noise: bool) -> list[int]:
        num_new = self._num_new(text)
        now_s = time.monotonic()
        step_s = now_s - self._called_s if num_new else None
        if step_s is not None:
            self.num_accepted += num_new - 1
            if self._gate is not None:
                self._gate.observe(1, num_new, step_s, self._num_from_service > 0)
        else:
            if self._text_drafter is not None:
                self._text_drafter.forget([str(self._num_texts)])
            self._num_texts += 1
        was_asked, num_from_text = self._was_asked, self._num_drafted - self._num_from_service
        self._was_asked = self._client is not None and max_len > 0 and (self._gate is None or self._gate.is_open(1))
        update = SequenceUpdate(
            text,
            num_new or 1,
            self._num_from_service if num_new else 0,
            name=str(self._num_texts),
            has_recurring_noise=has_recurring_noise,
        )
        answer, waited_s, self._waited_s = NO_ANSWER, self._waited_s, 0.0
        if self._client is not None and self._was_asked:
            (answer,) = self._client.propose([update], step_s if was_asked and not num_from_text else None)
            self._waited_s = self._client.waited_s
        elif self._client is not None and was_asked and self._gate is not None and not self._gate.was_open:
            self._client.rest()
        draft = answer.tokens
        self._num_from_service = min(len(draft), max_len)
        if self._text_drafter is not None and step_s is not None:
            self._text_drafter.observe_step(1, self._num_drafted, num_new, max(step_s - waited_s, 0.0))
        if self._text_drafter is not None and max_len and answer is NO_ANSWER:
            draft = self._text_drafter.draft(str(self._num_texts), text, update.num_new, max_len, has_recurring_noise)
        self._text, self._num_drafted, self._called_s = text, min(len(draft), max_len), now_s
        return draft[:max_len]

    def _num_new(self, text: TokenArray) -> int:
        """Return by how many tokens `text` continues that of the last call; 0 if it cannot be its continuation."""
        before = len(self._text)
        num_new = len(text) - before
        is_same = 1 <= num_new <= self._num_drafted + 1 and np.array_equal(text[:before], self._text)
        return num_new if is_same else 0
