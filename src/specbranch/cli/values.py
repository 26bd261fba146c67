"""Values of options: lists of numbers, KEY=VALUE."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from specbranch.errors import UsageError


def table(option: str, given: Sequence[str] | None) -> dict[str, Any]:
    """KEY=VALUE pairs as a table; values are JSON if they parse as JSON, else strings."""
    found: dict[str, Any] = {}
    for one in given or ():
        key, is_pair, value = one.partition("=")
        if not key or not is_pair:
            raise UsageError(f"{option} is {one!r}; give KEY=VALUE, such as waits=true")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found
