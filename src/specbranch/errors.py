"""The root of all errors that this package raises on purpose."""

from __future__ import annotations


class SpecBranchError(Exception):
    """Something that the caller can act on; the message says what to do."""
