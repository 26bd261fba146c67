"""What single requests ask of their drafts: none at all, or no more than so many tokens at once.

A request says so in its sampling parameters' `extra_args`, over HTTP in `vllm_xargs`: `{"specbranch_gamma": 4}`. At 0
it is not drafted for.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

log = logging.getLogger("vllm.specbranch")

KEY = "specbranch_gamma"


class Limits:
    """The longest submission of each request that named one, by vLLM's id, while the request runs."""

    def __init__(self) -> None:
        self._longest: dict[str, int] = {}

    def begin(self, limits: Mapping[str, int]) -> None:
        """Take in what new requests ask for."""
        self._longest.update(limits)

    def end(self, names: Iterable[str]) -> None:
        """Forget requests that have ended."""
        if self._longest:
            for name in names:
                self._longest.pop(name, None)

    def longest(self, name: str | None) -> int | None:
        """The most draft tokens that a request takes at once; None if it has not said."""
        return self._longest.get(name) if name is not None else None

    def rows_off(self, names: Sequence[str | None]) -> list[int]:
        """Rows whose requests want no drafts."""
        return [row for row, name in enumerate(names) if self.longest(name) == 0] if self._longest else []


def limit_of(sampling_params: Any) -> int | None:
    """What a request's parameters say; None if nothing, or nothing that can be read."""
    value = (getattr(sampling_params, "extra_args", None) or {}).get(KEY)
    if value is None or value is True:
        return None
    try:
        limit = int(value)
    except (TypeError, ValueError):
        limit = -1
    if limit < 0:
        _warn_of_value()
        return None
    return limit


@functools.cache
def _warn_of_value() -> None:
    log.warning("a request has a %s that is not a whole number of at least 0; it is ignored. Said once", KEY)
