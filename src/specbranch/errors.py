"""The errors that this package raises on purpose, and a short form for the messages of other errors."""

from __future__ import annotations


class SpecBranchError(Exception):
    """An error that the caller can act on; the message says how."""


class EngineError(SpecBranchError, RuntimeError):
    """An engine cannot do what the caller asks for. Users read the message, which says why, and what to do."""


class EngineFull(EngineError):
    """The engine has no room for another handle or more tokens. It changed nothing; close a handle and try again."""


class UsageError(SpecBranchError, ValueError):
    """Options are wrong or contradict each other."""


class FlagError(SpecBranchError, ValueError):
    """A flag of vLLM cannot be used here; the message says what to do instead."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty.

    Messages of Transformers can fill a page.
    """
    return next(iter(str(error).splitlines()), type(error).__name__)
