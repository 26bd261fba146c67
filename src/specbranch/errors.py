"""All errors that this package raises on purpose."""

from __future__ import annotations


class SpecBranchError(Exception):
    """Something that the caller can act on; the message says what to do."""


class EngineError(SpecBranchError, RuntimeError):
    """An engine cannot do what was asked. The message names the cause and the way out; users read it."""


class EngineFull(EngineError):
    """No room for another handle or for more tokens. Nothing was changed; close something and try again."""


class UsageError(SpecBranchError, ValueError):
    """Options that are wrong or contradict each other."""


class FlagError(SpecBranchError, ValueError):
    """A flag of vLLM that cannot be used here; the message says what to do instead."""
