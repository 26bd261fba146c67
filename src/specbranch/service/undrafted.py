"""Texts that are not drafted for: counted by namespace and reason; the first of each reason is logged."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from typing import Literal, get_args

log = logging.getLogger(__name__)

Reason = Literal["too_long", "foreign_token", "no_room"]
REASONS: tuple[Reason, ...] = get_args(Reason)
_MAX_NAMESPACES = 1024  # that are counted apart
_MESSAGES: dict[Reason, str] = {
    "too_long": "a text of %d tokens is not drafted for: the draft's KV cache has room for texts of %d; start the "
    "draft with a larger --cache-tokens",
    "foreign_token": "a text with token %d is not drafted for: the draft knows %d tokens; use a draft with the "
    "target's vocabulary",
    "no_room": "a text of %d tokens is not drafted for until it has been read again: others needed its room in the "
    "draft's KV cache of %d tokens; start the draft with larger --cache-tokens, --max-handles or --max-sessions",
}


class Undrafted:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: OrderedDict[bytes, Counter[Reason]] = OrderedDict()  # the last to be noted last
        self._total: Counter[Reason] = Counter()

    def note(self, namespace: bytes, reason: Reason, value: int, limit: int) -> None:
        """Count a text; `value` is what is beyond the `limit`, for the log."""
        with self._lock:
            is_first = not self._total[reason]
            self._total[reason] += 1
            self._counts.setdefault(namespace, Counter())[reason] += 1
            self._counts.move_to_end(namespace)
            if len(self._counts) > _MAX_NAMESPACES:
                self._counts.popitem(last=False)
        if is_first:
            log.warning(_MESSAGES[reason] + "; further ones are only counted", value, limit)

    def counts(self, namespace: bytes | None = None) -> dict[Reason, int]:
        """How many there were, by reason: of one namespace, or of all."""
        with self._lock:
            counter = self._total if namespace is None else self._counts.get(namespace, Counter())
            return {reason: counter[reason] for reason in REASONS}
