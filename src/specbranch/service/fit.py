"""Whether the draft behind a connection has the target's vocabulary. No socket and no clock here."""

from __future__ import annotations

import logging

from specbranch.engines.vocabulary import VocabSample, sample_difference
from specbranch.service.wire import Welcome

log = logging.getLogger(__name__)


class Fit:
    """What is known of the draft at the other end. A target that says nothing of its own tokens takes every draft."""

    def __init__(self, target: VocabSample) -> None:
        self._target = target
        self._has_target = target.size is not None or bool(target.hashes)
        self._compared: VocabSample | None = None
        self._flaw: str | None = None
        self._told: tuple[str, str] | None = None  # the draft, and why it does not fit
        self.is_known = not self._has_target
        self.is_other = False

    def take(self, welcome: Welcome) -> None:
        """Compare the draft that this is from. A draft that does not fit is told of once."""
        if not self._has_target:
            return
        draft = VocabSample(welcome.vocab_len, welcome.vocab_sample)
        if draft != self._compared:
            self._compared, self._flaw = draft, sample_difference(self._target, draft)
        self.is_known, self.is_other = True, self._flaw is not None
        if self._flaw is None:
            if self._told is not None:
                log.info("the draft service now runs %.200r, which has the target's vocabulary", welcome.model)
            self._told = None
        elif self._told != (welcome.model, self._flaw):
            self._told = (welcome.model, self._flaw)
            log.warning(
                "nothing is drafted: the draft %.200r has another vocabulary than the target: %s, and start the draft "
                "service with it; the target can go on running",
                welcome.model,
                self._flaw,
            )

    def forget(self) -> None:
        """The connection is gone; whoever comes next may be another."""
        self.is_known, self.is_other = not self._has_target, False
